"""Finding the installed packages, whatever way they were installed, without importing them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixes.applier import fast
from fixes.applier.errors import ImageMismatch
from fixes.applier.locate import (
    Package,
    find_packages,
    missing_message,
    release_differs,
    require_packages,
)
from fixes.applier.profiles import PackagePin
from tests.applier.command import run_command
from tests.applier.world import World

COMMIT = "568afb3a13806beb53bb2e6bd518269357b237c0"
PIN = PackagePin("vllm", "vllm", "0.26.0", COMMIT)
GAUDI = PackagePin("vllm_gaudi", "vllm-gaudi", "0.26.0", "b059f9c9" * 5)


def package(folder: Path, name: str = "vllm") -> Path:
    """Write a package that must not be imported."""
    target = folder / name
    target.mkdir(parents=True)
    (target / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return target


def metadata(folder: Path, version: str, name: str = "vllm") -> Path:
    """Write a distribution's metadata."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


def found(folder: Path) -> Package:
    """The one package that is found in a folder."""
    packages = find_packages([PIN], folder)
    assert list(packages) == ["vllm"]
    return packages["vllm"]


# Where it is --------------------------------------------------------------------------------------


def test_a_plain_installation(tmp_path: Path) -> None:
    folder = package(tmp_path)
    metadata(tmp_path, "0.26.0+empty")
    assert found(tmp_path) == Package("vllm", folder, "0.26.0+empty", "")


def test_both_packages_are_found_by_their_distributions(tmp_path: Path) -> None:
    package(tmp_path)
    package(tmp_path, "vllm_gaudi")
    metadata(tmp_path, "0.26.0")
    metadata(tmp_path, "0.26.1", "vllm_gaudi")
    packages = find_packages([PIN, GAUDI], tmp_path)
    assert {name: found.version for name, found in packages.items()} == {
        "vllm": "0.26.0",
        "vllm_gaudi": "0.26.1",
    }


def test_an_editable_installation_by_path_file(tmp_path: Path) -> None:
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    folder = package(checkout)
    metadata(site, "0.26.0")
    (site / "editable.pth").write_text(f"# a comment\nimport nothing_at_all\n\n{checkout}\n")
    assert found(site) == Package("vllm", folder, "0.26.0", "")


def test_a_path_file_may_be_relative_and_name_what_is_not_there(tmp_path: Path) -> None:
    site = tmp_path / "site"
    folder = package(tmp_path / "checkout")
    site.mkdir()
    (site / "a.pth").write_text("/no/such/folder\n../checkout\n")
    assert found(site).folder == folder


def test_code_in_path_files_is_not_run(tmp_path: Path) -> None:
    package(tmp_path)
    (tmp_path / "a.pth").write_text("import sys; sys.exit('run')\nimport\tsys\n")
    assert found(tmp_path).name == "vllm"


def test_an_editable_installation_by_finder(tmp_path: Path) -> None:
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    folder = package(checkout)
    metadata(site, "0.26.0")
    (site / "__editable___vllm_0_26_0_finder.py").write_text(
        "import sys\n"
        f"MAPPING: dict[str, str] = {{'vllm': {str(folder)!r}, 'other': '/x'}}\n"
        "NAMESPACES: dict[str, list[str]] = {}\n"
        "raise RuntimeError('imported')\n"
    )
    assert found(site) == Package("vllm", folder, "0.26.0", "")


def test_a_finder_of_old_setuptools_without_annotation(tmp_path: Path) -> None:
    site = tmp_path / "site"
    folder = package(tmp_path / "checkout")
    site.mkdir()
    finder = site / "__editable___vllm_0_26_0_finder.py"
    finder.write_text(f"MAPPING = {{'vllm': {str(folder)!r}}}\n")
    assert found(site).folder == folder


def test_a_finder_that_says_nothing_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "__editable___vllm_0_26_0_finder.py").write_text("MAPPING = dict(vllm=1)\n")
    assert find_packages([PIN], tmp_path) == {}


@pytest.mark.parametrize("name", ["vllm", "vllm-src-0.26"])
def test_a_package_folder_that_is_a_link_is_the_link_s_target(tmp_path: Path, name: str) -> None:
    site, store = tmp_path / "site", tmp_path / "store"
    package(store).rename(store / name) if name != "vllm" else package(store)
    site.mkdir()
    (site / "vllm").symlink_to(store / name)
    assert found(site).folder == store / name


def test_a_package_behind_a_link_of_another_name_is_rewritten_and_reverted(world: World) -> None:
    store = world.site.with_name("store")
    store.mkdir()
    shutil.move(world.site / "vllm", store / "vllm-src-0.26")
    (world.site / "vllm").symlink_to(store / "vllm-src-0.26")
    engine = store / "vllm-src-0.26" / "engine.py"
    before = engine.read_bytes()
    assert world.run().code == 0
    assert b"# fix: alpha" in engine.read_bytes()
    again = world.run()
    assert again.last.startswith("applied=0 unchanged=3 files=0")
    assert world.run("--revert", profile=None).code == 0
    assert engine.read_bytes() == before


def test_a_folder_without_init_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    assert find_packages([PIN], tmp_path) == {}


def test_a_module_of_that_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("")
    assert find_packages([PIN], tmp_path) == {}


def test_the_first_of_two_copies_is_the_one_that_is_imported(tmp_path: Path) -> None:
    folder = package(tmp_path / "site")
    package(tmp_path / "checkout")
    (tmp_path / "site" / "a.pth").write_text(f"{tmp_path / 'checkout'}\n")
    assert found(tmp_path / "site").folder == folder


# What it says it is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "commit"),
    [
        ("0.26.1.dev3+g568afb3a1.empty", "568afb3a1"),
        ("0.26.1.dev3+g568afb3a1", "568afb3a1"),
        ("0.26.1.dev3+empty.g568afb3a1", "568afb3a1"),
        ("0.26.1.dev3+g568afb3a1.d20260901", "568afb3a1"),
        ("0.26.0+empty", ""),
        ("0.26.0+gaudi", ""),
        ("0.26.0+gabc", ""),
        ("0.0.0", ""),
        ("not a version at all", ""),
    ],
)
def test_the_commit_in_a_version(tmp_path: Path, version: str, commit: str) -> None:
    package(tmp_path)
    metadata(tmp_path, version)
    assert (found(tmp_path).version, found(tmp_path).commit) == (version, commit)


@pytest.mark.parametrize("text", ["'g568afb3a1'", '"568afb3a1"', repr(COMMIT)])
def test_the_commit_in_the_version_file_comes_first(tmp_path: Path, text: str) -> None:
    folder = package(tmp_path)
    metadata(tmp_path, "0.26.0+g1111111")
    (folder / "_version.py").write_text(
        "__version__ = version = '0.26.0'\n__commit_id__: str | None\n"
        f"__commit_id__ = commit_id = {text}\n"
    )
    assert found(tmp_path).commit == text.strip("'\"g")


def test_a_version_file_may_know_no_commit(tmp_path: Path) -> None:
    folder = package(tmp_path)
    metadata(tmp_path, "0.26.0+g1111111")
    (folder / "_version.py").write_text("__commit_id__ = commit_id = None\n")
    assert found(tmp_path).commit == "1111111"


def test_the_commit_of_an_installation_from_a_repository(tmp_path: Path) -> None:
    package(tmp_path)
    info = metadata(tmp_path, "0.26.0")
    (info / "direct_url.json").write_text(
        json.dumps({"url": "https://x", "vcs_info": {"vcs": "git", "commit_id": COMMIT}})
    )
    assert found(tmp_path).commit == COMMIT


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"vcs_info": []}', '{"vcs_info": {"commit_id": 3}}', '{"url": "x"}'],
)
def test_other_origins_name_no_commit(tmp_path: Path, text: str) -> None:
    package(tmp_path)
    info = metadata(tmp_path, "0.26.0")
    (info / "direct_url.json").write_text(text)
    assert found(tmp_path).commit == ""


def test_an_installation_without_metadata(tmp_path: Path) -> None:
    folder = package(tmp_path)
    assert found(tmp_path) == Package("vllm", folder, "unknown", "")


def test_without_metadata_the_version_file_tells_both(tmp_path: Path) -> None:
    folder = package(tmp_path)
    (folder / "_version.py").write_text("__version__ = version = '0.26.1.dev1+g568afb3a1'\n")
    assert (found(tmp_path).version, found(tmp_path).commit) == (
        "0.26.1.dev1+g568afb3a1",
        "568afb3a1",
    )


@pytest.mark.parametrize("content", [None, "", "Name: vllm\n\n", "\0\xff"])
def test_metadata_without_a_version_is_like_none(tmp_path: Path, content: str | None) -> None:
    package(tmp_path)
    path = metadata(tmp_path, "0.26.0") / "METADATA"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert found(tmp_path).version == "unknown"


# Checkouts ----------------------------------------------------------------------------------------


def checkout(folder: Path) -> Path:
    """A folder that looks like a git checkout, at a branch that has no commit yet."""
    package(folder)
    git = folder / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    return git


def test_the_commit_of_a_checkout_by_its_branch(tmp_path: Path) -> None:
    (checkout(tmp_path) / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    assert found(tmp_path).commit == COMMIT


def test_the_commit_of_a_checkout_by_a_packed_branch(tmp_path: Path) -> None:
    (checkout(tmp_path) / "packed-refs").write_text(
        f"# pack-refs with: peeled fully-peeled sorted\n"
        f"{'1' * 40} refs/heads/main-2\n{COMMIT} refs/heads/main\n^{'2' * 40}\n"
        f"{'3' * 40} refs/remotes/x/refs/heads/main\n"
    )
    assert found(tmp_path).commit == COMMIT


def test_a_loose_branch_is_newer_than_a_packed_one(tmp_path: Path) -> None:
    git = checkout(tmp_path)
    (git / "packed-refs").write_text(f"{'1' * 40} refs/heads/main\n")
    (git / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    assert found(tmp_path).commit == COMMIT


def test_the_commit_of_a_detached_checkout(tmp_path: Path) -> None:
    (checkout(tmp_path) / "HEAD").write_text(f"{COMMIT}\n")
    assert found(tmp_path).commit == COMMIT


@pytest.mark.parametrize("head", ["", "nonsense\n", "ref: refs/heads/gone\n", "ref: ../../x\n"])
def test_a_checkout_that_is_at_no_commit(tmp_path: Path, head: str) -> None:
    (checkout(tmp_path) / "HEAD").write_text(head)
    assert found(tmp_path).commit == ""


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")
@pytest.mark.parametrize("how", ["branch", "packed", "detached", "worktree"])
def test_git_agrees_about_the_commit(tmp_path: Path, how: str) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        return subprocess.run(
            ["git", *identity, *words], cwd=repository, check=True, capture_output=True, text=True
        ).stdout.strip()

    repository = tmp_path / "repository"
    package(repository)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    here = repository
    if how == "packed":
        git("pack-refs", "--all")
    elif how == "detached":
        git("checkout", "-q", "--detach")
    elif how == "worktree":
        here = tmp_path / "worktree"
        git("worktree", "add", "-q", str(here))
    assert found(here).commit == git("rev-parse", "HEAD")


# This environment ---------------------------------------------------------------------------------


def test_without_a_folder_this_environment_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(tmp_path / "site")
    metadata(tmp_path / "site", "0.26.0+empty")
    monkeypatch.syspath_prepend(tmp_path / "site")
    here = find_packages([PIN], None)["vllm"]
    assert (here.folder, here.version, here.note) == (folder, "0.26.0+empty", "")


def test_another_copy_in_the_working_directory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(tmp_path / "site")
    package(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path / "here")
    here = find_packages([PIN], None)["vllm"]
    assert here.folder == folder
    assert "the working directory holds another vllm" in here.note


@pytest.mark.parametrize("linked", [False, True])
def test_the_same_copy_in_the_working_directory_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    folder = package(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    here = folder.parent
    if linked:
        here = tmp_path / "here"
        here.mkdir()
        (here / "vllm").symlink_to(folder)
    monkeypatch.chdir(here)
    assert find_packages([PIN], None)["vllm"].note == ""


def test_a_working_directory_that_is_gone_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert find_packages([PIN], None)["vllm"].folder == folder


# Packages that are not there ----------------------------------------------------------------------


def test_a_missing_package_is_a_mismatch_that_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ImageMismatch) as caught:
        require_packages(["vllm", "vllm_gaudi"], {}, tmp_path)
    assert str(caught.value).splitlines() == [
        f"{name} is not installed in {tmp_path}; name the folder that has it,"
        " or rewrite only what is there (--package)"
        for name in ("vllm", "vllm_gaudi")
    ]


@pytest.mark.parametrize("found_on_path", [False, True])
def test_the_interpreter_of_the_vllm_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found_on_path: bool
) -> None:
    command = tmp_path / "vllm"
    if found_on_path:
        command.write_text("#!/opt/venv/bin/python3\nimport vllm\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    message = missing_message("vllm", None)
    assert sys.executable in message
    assert ("`vllm` runs /opt/venv/bin/python3" in message) == found_on_path


@pytest.mark.parametrize("content", [b"", b"#!", b"\x7fELF\0\xff", f"#!{sys.executable}".encode()])
def test_a_vllm_command_that_tells_nothing_new_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    command = tmp_path / "vllm"
    command.write_bytes(content)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_message("vllm", None).endswith("or use --site-packages")


def test_a_missing_package_is_exit_3_on_the_command_line(world: World) -> None:
    shutil.rmtree(world.site / "vllm_gaudi")
    ran = world.run()
    assert (ran.code, ran.out) == (3, "")
    assert f"vllm_gaudi is not installed in {world.site}" in ran.err


def test_a_site_packages_folder_that_is_none_is_a_usage_error(world: World) -> None:
    ran = world.run("--site-packages", str(world.site / "none"), site=False)
    assert ran.code == 2
    assert "is no folder" in ran.err


# Releases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "commit", "differs"),
    [
        ("0.26.0", "", False),
        ("0.26.0+empty", "", False),
        ("0.26", "", False),
        ("0.26.0rc1", "", False),
        ("0.26.1.dev3+g568afb3a1.empty", COMMIT[:9], False),
        ("0.26.1.dev3+g111111111.empty", "111111111", True),
        ("0.30.0", "", True),
        ("0.0.0", "", False),
        ("unknown", "", False),
        ("not a version at all", "", False),
    ],
)
def test_another_release_is_told(version: str, commit: str, differs: bool) -> None:
    here = Package("vllm", Path("/site/vllm"), version, commit)
    assert release_differs(PIN, here) == differs


def test_another_release_is_a_note_and_the_fingerprints_decide(world: World) -> None:
    path = world.site / "vllm-1.0.0.dist-info" / "METADATA"
    path.write_text(path.read_text().replace("1.0.0", "1.0.1.dev1+gabcdef012.empty"))
    ran = world.run()
    assert ran.code == 0
    assert "vllm calls itself 1.0.1.dev1+gabcdef012.empty, the profile is for 1.0.0" in ran.err


# Nothing is imported ------------------------------------------------------------------------------

PATCHED = ("vllm", "vllm_gaudi", "torch")


@pytest.mark.parametrize(
    "argv",
    [
        ("--profile", "v1.0.0"),
        ("--profile", "v1.0.0", "delta", "--dry-run"),
        ("--profile", "v1.0.0", "--diff"),
        ("--profile", "v2.0.0"),
        ("--profile", "v1.0.0", "--list"),
        ("--status",),
        ("--revert",),
        (),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_the_command_imports_none_of_the_packages(
    world: World, argv: tuple[str, ...], named: bool
) -> None:
    words = ["--site-packages", str(world.site)] if named else []
    ran, modules = run_command(world, *argv, *words, path=[] if named else [world.site])
    expected = 3 if "v2.0.0" in argv else 2 if not argv else 0
    assert ran.code == expected, ran.err
    assert "json" in modules
    assert not [name for name in modules if name.split(".")[0] in PATCHED]


def test_the_second_run_imports_even_less(world: World) -> None:
    words = ["--profile", "v1.0.0"]
    first, _ = run_command(world, *words, path=[world.site])
    again, modules = run_command(world, *words, path=[world.site])
    assert (first.code, again.code) == (0, 0)
    assert again.last.startswith("applied=0 unchanged=3 files=0")
    heavy = {*PATCHED, "libcst", "packaging", "tomllib", "tomli", "ast", "subprocess"}
    assert not heavy & modules


def test_the_report_names_the_folder_that_this_place_imports(world: World) -> None:
    other = world.pack.parent / "elsewhere"
    shutil.copytree(world.site / "vllm", other / "vllm")
    ran, _ = run_command(world, "--profile", "v1.0.0", path=[world.site], cwd=other)
    assert ran.out.splitlines()[0] == f"vllm 1.0.0 in {world.site / 'vllm'}"
    assert "the working directory holds another vllm" in ran.err
    assert "# fix:" not in (other / "vllm" / "engine.py").read_text()


def test_the_fast_path_looks_where_the_full_one_does(world: World) -> None:
    request = {"site_packages": os.path.realpath(world.site)}
    full = find_packages([PIN, GAUDI], world.site)
    assert {name: fast._folder(name, request) for name in full} == {
        name: str(here.folder) for name, here in full.items()
    }
