"""Bringing the pinned packages of a release, on small stand-ins and once on the real ones."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from fixes.applier.errors import CannotWrite, UsageError
from fixes.applier.pack import Pack
from fixes.applier.profiles import PackagePin
from fixes.authoring import fetching, sources
from fixes.authoring.fetching import SourcesError
from tests.support.trees import Trees

ROOT = Path(__file__).resolve().parents[2]

RELEASE = "v1.2.3"
COMMIT = "0123456789" * 4
PKG_INFO = """\
Metadata-Version: 2.4
Name: vllm
Version: 1.2.3
Summary: serves
Requires-Dist: numpy>=1
Requires-Dist: torch==9.9
Requires-Dist: pandas; extra == "bench"

A readme with Version: and Requires-Dist: torch in it.
"""
SDIST = {
    "PKG-INFO": PKG_INFO,
    "LICENSE": "free",
    "setup.py": "raise SystemExit('never run')",
    "requirements/common.txt": "-r more.txt\nnumpy >= 1  # arrays\n\n# torch\n",
    "csrc/kernel.cu": "kernel",
    "tests/test_it.py": "",
    "vllm/__init__.py": "from vllm._version import __version__\n",
    "vllm/_version.py": "__version__ = '1.2.3'\n__commit_id__ = 'gffffffff'\n",
    "vllm/model/configs/a.json": "{}",
    "vllm/model/no_init/kernel.py": "x = 'é'\r\n",
    "vllm/run.sh": "#!/bin/sh\n",
    "vllm.egg-info/entry_points.txt": "[vllm.general_plugins]\nplug = vllm.model:plug\n",
    "vllm.egg-info/top_level.txt": "vllm\n",
}
CHECKOUT = {
    "pyproject.toml": """\
[project]
name = "vllm_gaudi"
description = "a plugin"
readme = "README.md"
license = "Apache-2.0"
requires-python = ">=3.9"
urls = { Homepage = "https://example.invalid" }
scripts = { gaudi = "vllm_gaudi:main" }
""",
    "setup.py": """\
import os
def requirements():
    raise SystemExit("never run")
setup(
    name="vllm_gaudi",
    version=VERSION,
    py_modules=["compat"],
    install_requires=requirements(),
    entry_points={
        "vllm.platform_plugins": ["hpu = vllm_gaudi:register"],
        "vllm.general_plugins": ["01.a = vllm_gaudi:a", "02.b = vllm_gaudi:b"],
    },
)
""",
    "README.md": "# Plugin\n",
    "requirements.txt": "numba>=0.5\n",
    "compat.py": "",
    "tests/test_it.py": "",
    "vllm_gaudi/__init__.py": "def register():\n    return 'platform'\n",
    "vllm_gaudi/crlf.py": "a = 1\r\nb = 2\r\n",
    "vllm_gaudi/data.txt": "data",
}


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def write_sdist(path: Path, files: dict[str, str], *extra: tarfile.TarInfo) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"vllm-1.2.3/{name}")
            member.size = len(text.encode())
            member.mode = 0o755 if name.endswith((".sh", "__init__.py")) else 0o600
            tar.addfile(member, io.BytesIO(text.encode()))
        for member in extra:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    command = ["git", *identity, "-c", "core.autocrlf=false", *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@dataclass
class World:
    """Stand-ins for the index, the repository and the cache."""

    folder: Path
    vllm: PackagePin
    gaudi: PackagePin

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def index(self) -> Path:
        return self.folder / "index"

    @property
    def repository(self) -> Path:
        return self.folder / "plugin"

    def lay_out(
        self, *pins: PackagePin, bytecode: bool = False, **local: Path
    ) -> tuple[Path, sources.Sources]:
        into = self.folder / "site"
        result = sources.lay_out(
            RELEASE,
            pins or (self.vllm, self.gaudi),
            into,
            local=local,
            cache=self.cache,
            bytecode=bytecode,
        )
        return into, result

    def leftovers(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path.name.startswith((".", "site"))]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    index = tmp_path / "index"
    index.mkdir()
    sha256 = write_sdist(index / "vllm-1.2.3.tar.gz", SDIST)
    plugin = write_tree(tmp_path / "plugin", CHECKOUT)
    git(plugin, "init", "--quiet", "--initial-branch=main")
    git(plugin, "add", ".")
    git(plugin, "commit", "--quiet", "--message=one")
    # What a public server of git allows.
    git(plugin, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(plugin, "config", "uploadpack.allowFilter", "true")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return World(
        tmp_path,
        PackagePin("vllm", "vllm", "1.2.3", COMMIT, sdist_sha256=sha256),
        PackagePin(
            "vllm_gaudi",
            "vllm-gaudi",
            "1.2.3",
            git(plugin, "rev-parse", "HEAD"),
            repository=plugin.as_uri(),
        ),
    )


def installed(site: Path, name: str) -> importlib.metadata.Distribution:
    found = list(importlib.metadata.distributions(name=name, path=[str(site)]))
    assert len(found) == 1
    return found[0]


def check_record(distribution: importlib.metadata.Distribution) -> set[str]:
    """Every file of RECORD is there and is what RECORD says."""
    for file in distribution.files or []:
        path = Path(str(file.locate()))
        if file.hash is None:
            assert path.suffix == ".pyc" or path.name == "RECORD", path
            assert path.is_file(), path
            continue
        content = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (file.hash.mode, file.hash.value, file.size) == ("sha256", digest, len(content))
    return {str(file) for file in distribution.files or []}


# -- what is laid out ------------------------------------------------------------------------------


def test_vllm_is_installed_as_a_build_for_no_device_does(world: World) -> None:
    site, _ = world.lay_out()
    vllm = installed(site, "vllm")
    assert vllm.version == "1.2.3+empty"
    assert vllm.requires == ["numpy>=1", 'pandas; extra == "bench"']
    assert "Requires-Dist: torch in it" in (vllm.read_text("METADATA") or "")
    assert {(e.group, e.name, e.value) for e in vllm.entry_points} == {
        ("vllm.general_plugins", "plug", "vllm.model:plug")
    }
    assert check_record(vllm) == {
        "vllm/__init__.py",
        "vllm/_version.py",
        "vllm/model/configs/a.json",
        "vllm/model/no_init/kernel.py",
        "vllm/run.sh",
        *(
            f"vllm-1.2.3+empty.dist-info/{name}"
            for name in (
                "INSTALLER",
                "METADATA",
                "RECORD",
                "WHEEL",
                "entry_points.txt",
                "licenses/LICENSE",
                "top_level.txt",
            )
        ),
    }
    assert not (site / "csrc").exists()
    assert not (site / "tests").exists()
    assert (site / "vllm/model/no_init/kernel.py").read_bytes() == "x = 'é'\r\n".encode()
    assert (site / "vllm/__init__.py").stat().st_mode & 0o777 == 0o644
    assert (site / "vllm/run.sh").stat().st_mode & 0o777 == 0o755


def test_the_plugin_is_installed_with_its_modules_and_entry_points(world: World) -> None:
    site, _ = world.lay_out()
    gaudi = installed(site, "vllm-gaudi")
    assert gaudi.version == "1.2.3"
    assert gaudi.requires == ["numba>=0.5"]
    assert gaudi.metadata["License-Expression"] == "Apache-2.0"
    assert [(e.group, e.name) for e in gaudi.entry_points] == [
        ("console_scripts", "gaudi"),
        ("vllm.general_plugins", "01.a"),
        ("vllm.general_plugins", "02.b"),
        ("vllm.platform_plugins", "hpu"),
    ]
    assert check_record(gaudi) >= {"compat.py", "vllm_gaudi/crlf.py", "vllm_gaudi/data.txt"}
    assert (gaudi.read_text("top_level.txt") or "").split() == ["compat", "vllm_gaudi"]
    assert (site / "vllm_gaudi/crlf.py").read_bytes() == b"a = 1\r\nb = 2\r\n"


def test_versions_and_plugins_work_in_a_fresh_interpreter(world: World) -> None:
    site, _ = world.lay_out(bytecode=True)
    code = (
        "import vllm, vllm._version, vllm_gaudi._version as g\n"
        "from importlib.metadata import entry_points\n"
        "(hpu,) = entry_points(group='vllm.platform_plugins')\n"
        "print(vllm.__version__, vllm._version.commit_id, vllm._version.version_tuple,\n"
        "      g.__commit_id__, hpu.load()())"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    commit = world.gaudi.commit[:9]
    assert printed.stdout == f"1.2.3 g012345678 (1, 2, 3) g{commit} platform\n"


def test_bytecode_is_stamped_recorded_and_names_the_final_place(world: World) -> None:
    site, _ = world.lay_out(bytecode=True)
    tag = sys.implementation.cache_tag
    pycs = {str(path.relative_to(site)) for path in site.rglob("*.pyc")}
    assert f"vllm/model/no_init/__pycache__/kernel.{tag}.pyc" in pycs
    recorded = check_record(installed(site, "vllm")) | check_record(installed(site, "vllm-gaudi"))
    assert {name for name in recorded if name.endswith(".pyc")} == pycs
    content = (site / f"vllm/__pycache__/__init__.{tag}.pyc").read_bytes()
    source = (site / "vllm/__init__.py").stat()
    assert content[4:8] == b"\0\0\0\0"  # checked by time and size
    assert int.from_bytes(content[8:12], "little") == int(source.st_mtime)
    assert str(site / "vllm/__init__.py").encode() in content


def test_sources_json_says_what_came_from_where(world: World) -> None:
    site, result = world.lay_out()
    document = json.loads((site / "sources.json").read_text())
    assert document == json.loads(result.as_json()) == sources.read_summary(site)
    assert document["packages"]["vllm"]["sha256"] == world.vllm.sdist_sha256
    assert document["packages"]["vllm_gaudi"]["commit"] == world.gaudi.commit
    assert document["missing"] == {}
    assert world.leftovers() == ["site"]


# -- the cache, and what goes wrong ----------------------------------------------------------------


def test_the_second_time_needs_no_network(world: World) -> None:
    world.lay_out()
    shutil.rmtree(world.folder / "site")
    shutil.rmtree(world.index)
    shutil.rmtree(world.repository)
    site, _ = world.lay_out()
    assert installed(site, "vllm").version == "1.2.3+empty"


def test_a_damaged_cache_is_not_used(world: World) -> None:
    world.lay_out()
    (archive,) = (world.cache / "sdists").glob("*.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-1])
    shutil.rmtree(world.folder / "site")
    world.lay_out()
    assert fetching.sha256_of(archive) == world.vllm.sdist_sha256


def test_another_sdist_than_the_pinned_one_is_refused(world: World) -> None:
    with pytest.raises(
        SourcesError, match=r"(?s)not the pinned.*expected sha256 00.*found"
    ) as info:
        world.lay_out(replace(world.vllm, sdist_sha256="0" * 64))
    assert world.vllm.sdist_sha256 in str(info.value)
    assert world.leftovers() == []
    assert list((world.cache / "sdists").glob("*.tar.gz")) == []


def test_an_index_without_the_sdist_is_named_as_the_cause(world: World) -> None:
    with pytest.raises(SourcesError, match=r"offers no source distribution of vllm 1\.2\.4"):
        world.lay_out(replace(world.vllm, version="1.2.4"))
    assert world.leftovers() == []


def test_an_index_that_cannot_be_reached_is_told_apart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(SourcesError, match="connection error"):
        world.lay_out(world.vllm)


def test_without_pip_the_message_says_what_helps(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching._python_with_pip.cache_clear()
    monkeypatch.setattr(fetching, "_succeeds", lambda command: False)
    with pytest.raises(SourcesError, match=r"-m ensurepip"):
        world.lay_out(world.vllm)
    fetching._python_with_pip.cache_clear()


def test_without_git_the_message_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(world.folder))
    with pytest.raises(SourcesError, match="git is needed"):
        world.lay_out(world.gaudi)


def test_a_full_commit_that_is_not_there_is_an_error(world: World) -> None:
    with pytest.raises(SourcesError, match=f"commit {COMMIT} of file:.* cannot be had"):
        world.lay_out(world.vllm, replace(world.gaudi, commit=COMMIT))
    assert world.leftovers() == []


def test_a_server_that_gives_no_single_commits_is_asked_for_the_branch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(world.repository, "commit", "--quiet", "--allow-empty", "--message=two")
    git(world.repository, "config", "uploadpack.allowAnySHA1InWant", "false")
    # Protocol 2 allows any commit whatever the server's configuration says.
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.version")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "0")
    site, result = world.lay_out(world.gaudi)
    assert result.packages["vllm_gaudi"].commit == world.gaudi.commit
    assert (site / "vllm_gaudi/data.txt").read_text() == "data"
    (store,) = (world.cache / "git").glob("*.git")
    assert git(store, "rev-parse", "--is-shallow-repository") == "false"


def short(pin: PackagePin, **changes: str) -> PackagePin:
    return replace(pin, commit=pin.commit[:7], **changes)


def test_a_short_commit_is_found_in_its_branch(world: World) -> None:
    git(world.repository, "checkout", "--quiet", "-b", "releases/v1")
    git(world.repository, "commit", "--quiet", "--allow-empty", "--message=after the pin")
    site, result = world.lay_out(short(world.gaudi, branch="releases/v1"))
    assert result.packages["vllm_gaudi"].commit == world.gaudi.commit
    assert f"g{world.gaudi.commit[:9]}" in (site / "vllm_gaudi/_version.py").read_text()


def test_without_the_branch_of_a_short_commit_vllm_alone_is_laid_out(world: World) -> None:
    site, result = world.lay_out(world.vllm, short(world.gaudi, branch="releases/v1"))
    assert installed(site, "vllm").version == "1.2.3+empty"
    assert not (site / "vllm_gaudi").exists()
    assert "releases/v1" in result.missing["vllm_gaudi"]
    assert sources.read_summary(site)["missing"] == result.missing


@pytest.mark.parametrize("name", ["vllm-1.2.3/../../evil", "/evil", "../evil"])
def test_an_archive_cannot_write_outside(tmp_path: Path, name: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = 1
    write_sdist(tmp_path / "a.tar.gz", SDIST, member)
    with (
        (tmp_path / "a.tar.gz").open("rb") as file,
        pytest.raises(SourcesError, match="leads outside"),
    ):
        fetching.extract(file, tmp_path / "out" / "deep", strip=1)
    assert not list(tmp_path.rglob("*evil*"))


def test_links_in_an_archive_are_left_out(tmp_path: Path) -> None:
    """A link to a folder outside, then a file "in" it: the classic."""
    outside = tmp_path / "outside"
    outside.mkdir()
    link = tarfile.TarInfo("vllm-1.2.3/vllm/link")
    link.type, link.linkname = tarfile.SYMTYPE, str(outside)
    through = tarfile.TarInfo("vllm-1.2.3/vllm/link/evil")
    through.size = 1
    write_sdist(tmp_path / "a.tar.gz", SDIST, link, through)
    with (tmp_path / "a.tar.gz").open("rb") as file:
        fetching.extract(file, tmp_path / "out", strip=1)
    assert list(outside.iterdir()) == []
    assert (tmp_path / "out/vllm/link/evil").read_bytes() == b"x"


def test_a_cut_off_archive_is_an_error(world: World) -> None:
    archive = world.folder / "copy.tar.gz"
    archive.write_bytes((world.index / "vllm-1.2.3.tar.gz").read_bytes()[:300])
    with pytest.raises(SourcesError, match="damaged"):
        world.lay_out(world.vllm, vllm=archive)


def test_a_folder_with_something_in_it_is_left_alone(world: World) -> None:
    (world.folder / "site").mkdir()
    (world.folder / "site" / "mine").touch()
    with pytest.raises(UsageError, match="not an empty folder"):
        world.lay_out()
    assert [path.name for path in (world.folder / "site").iterdir()] == ["mine"]


def test_an_empty_folder_is_taken(world: World) -> None:
    (world.folder / "site").mkdir()
    site, _ = world.lay_out()
    assert (site / "sources.json").is_file()


def test_a_place_that_cannot_be_written_is_exit_code_4(world: World) -> None:
    (world.folder / "file").touch()
    with pytest.raises(CannotWrite, match="cannot lay out"):
        sources.lay_out(RELEASE, [world.vllm], world.folder / "file" / "x", cache=world.cache)


@pytest.mark.parametrize("empty", [False, True])
def test_who_comes_second_is_told_that_the_folder_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    """Two runs lay out the same folder; another one is done while this one is at work."""
    site = world.folder / "site"
    if empty:
        site.mkdir()

    def another_run(made: Path, *rest: object) -> sources.Sources:
        write_tree(site, {"vllm/__init__.py": "the other's"})
        return fill(made, *rest)  # type: ignore[arg-type]

    fill = sources._fill
    monkeypatch.setattr(sources, "_fill", another_run)
    with pytest.raises(UsageError, match="site is there now, another run has made it meanwhile"):
        world.lay_out(world.vllm)
    assert [path.name for path in site.iterdir()] == ["vllm"]
    assert world.leftovers() == ["site"]


def test_what_a_killed_run_has_left_is_removed_after_an_hour(world: World) -> None:
    killed, at_work, other = (
        world.folder / name
        for name in (".site-gaudi-fix-pack-a", ".site-gaudi-fix-pack-b", ".site-of-mine")
    )
    for folder in (killed, at_work, other):
        write_tree(folder, {"vllm/__init__.py": ""})
    for folder in (killed, other):
        os.utime(folder, (time.time() - 3700,) * 2)
    world.lay_out(world.vllm)
    assert not killed.exists()
    assert at_work.exists()
    assert other.exists()


# -- local copies ----------------------------------------------------------------------------------


def test_a_checkout_replaces_the_index(world: World) -> None:
    own = write_tree(world.folder / "vllm", SDIST)
    site, result = world.lay_out(world.vllm, vllm=own)
    assert installed(site, "vllm").version == "1.2.3+empty"
    assert result.packages["vllm"].path == str(own)
    # Nobody knows which commit that is, so the file stays as it was.
    assert "gffffffff" in (site / "vllm/_version.py").read_text()
    assert result.packages["vllm"].commit is None


def test_a_git_checkout_is_asked_for_its_commit(world: World) -> None:
    _, result = world.lay_out(world.gaudi, vllm_gaudi=world.repository)
    assert result.packages["vllm_gaudi"].commit == world.gaudi.commit


def test_an_sdist_can_be_the_local_copy(world: World) -> None:
    archive = world.index / "vllm-1.2.3.tar.gz"
    _, result = world.lay_out(world.vllm, vllm=archive)
    assert (result.packages["vllm"].kind, result.packages["vllm"].commit) == ("local", COMMIT)


def test_an_installation_keeps_its_own_metadata(world: World) -> None:
    site, _ = world.lay_out()
    image = site.rename(world.folder / "image")
    pins = [replace(pin, version="9.9.9") for pin in (world.vllm, world.gaudi)]
    again, _ = world.lay_out(*pins, vllm=image, vllm_gaudi=image)
    assert installed(again, "vllm").version == "1.2.3+empty"
    assert installed(again, "vllm-gaudi").version == "1.2.3"
    assert (again / "compat.py").is_file()
    check_record(installed(again, "vllm-gaudi"))


def test_a_bare_package_takes_its_project_from_the_repository(world: World) -> None:
    bare = world.folder / "bare"
    write_tree(bare, {"vllm_gaudi/__init__.py": "changed = True\n"})
    for given in (bare, bare / "vllm_gaudi"):
        shutil.rmtree(world.folder / "site", ignore_errors=True)
        site, result = world.lay_out(world.gaudi, vllm_gaudi=given)
        assert (site / "vllm_gaudi/__init__.py").read_text() == "changed = True\n"
        assert not (site / "vllm_gaudi/data.txt").exists()
        assert len(installed(site, "vllm-gaudi").entry_points) == 4
        assert "project metadata from" in result.packages["vllm_gaudi"].note


def test_a_folder_without_the_package_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="holds no vllm"):
        world.lay_out(world.vllm, vllm=world.repository)


def test_a_path_that_is_not_there_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="nowhere: there is no such file or folder to take vllm"):
        world.lay_out(world.vllm, vllm=world.folder / "nowhere")
    assert world.leftovers() == []


def test_where_local_copies_are_looked_for(world: World, tmp_path: Path) -> None:
    named = {"GAUDI_FIX_PACK_VLLM_GAUDI_V1_2_3": "/there"}
    assert sources.local_copy(world.gaudi, RELEASE, world.cache, named) == Path("/there")
    assert sources.local_copy(world.vllm, RELEASE, world.cache, named) is None
    conventional = world.cache / f"vllm-gaudi-{RELEASE}"
    assert sources.local_copy(short(world.gaudi), RELEASE, world.cache, {}) is None
    conventional.mkdir(parents=True)
    assert sources.local_copy(short(world.gaudi), RELEASE, world.cache, {}) == conventional
    # A commit that can be asked for by its full id is: whatever lies there cannot replace it.
    assert sources.local_copy(world.gaudi, RELEASE, world.cache, {}) is None


def test_the_cache_folder_follows_the_variables() -> None:
    own = {"GAUDI_FIX_PACK_CACHE": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}
    assert fetching.cache_folder(own) == Path("/own")
    del own["GAUDI_FIX_PACK_CACHE"]
    assert fetching.cache_folder(own) == Path("/xdg/gaudi-fix-pack")
    del own["XDG_CACHE_HOME"]
    assert fetching.cache_folder(own) == Path("/home/me/.cache/gaudi-fix-pack")


# -- the command -----------------------------------------------------------------------------------


def test_the_command_says_what_came_from_where(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAUDI_FIX_PACK_CACHE", str(world.cache))
    profile = "\n".join(
        [
            f'release = "{RELEASE}"\nfix = []',
            *(
                "\n".join(
                    [f"[packages.{pin.name}]"]
                    + [
                        f'{key.replace("_", "-")} = "{value}"'
                        for key, value in asdict(pin).items()
                        if value and key != "name"
                    ]
                )
                for pin in (world.vllm, world.gaudi)
            ),
        ]
    )
    write_tree(world.folder, {f"profiles/{RELEASE}.toml": profile})
    parser = argparse.ArgumentParser()
    sources.add_arguments(parser)
    into = world.folder / "site"
    arguments = [RELEASE, "--into", str(into), "--vllm-gaudi", str(world.repository)]
    assert sources.run(Pack(world.folder), parser.parse_args([*arguments, "--no-bytecode"])) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"vllm 1.2.3+empty from pip's index ({COMMIT})"
    assert second == f"vllm_gaudi 1.2.3 from {world.repository} ({world.gaudi.commit})"
    assert not list(into.rglob("*.pyc"))


# -- the real packages -----------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["v0.26.0", "v0.30.0"])
def test_the_real_vllm(trees: Trees, release: str) -> None:
    site = trees.stock(release).path
    vllm = installed(site, "vllm")
    assert vllm.version == f"{release[1:]}+empty"
    files = check_record(vllm)
    assert "vllm/v1/sample/logits_processor/__init__.py" in files
    assert any(name.endswith("configs/README") for name in files)
    assert any("fused_moe/configs/" in name and name.endswith(".json") for name in files)
    assert not any(name.startswith("csrc") or name.endswith(".so") for name in files)
    assert vllm.requires is not None
    assert not any(line.startswith(("torch==", "flashinfer")) for line in vllm.requires)
    assert "compressed-tensors==0.17.0" in vllm.requires
    assert vllm.entry_points.select(group="console_scripts")["vllm"].value.endswith(":main")


def test_the_real_vllm_gaudi(trees: Trees) -> None:
    site = trees.stock("v0.26.0").path
    gaudi = installed(site, "vllm-gaudi")
    assert gaudi.version == "0.26.0"
    assert check_record(gaudi) >= {"pytest_compat.py", "vllm_gaudi/v1/worker/hpu_model_runner.py"}
    (platform,) = gaudi.entry_points.select(group="vllm.platform_plugins")
    assert platform.value == "vllm_gaudi:register"
    crlf = [path for path in (site / "vllm_gaudi").rglob("*.py") if b"\r\n" in path.read_bytes()]
    assert len(crlf) == 2
