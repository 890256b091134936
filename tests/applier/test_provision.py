"""A stock image without libcst: the command helps itself, in a folder of its own, or says how.

The wheels come once from whatever index pip is configured to use; after that a folder of them
stands for an index, and an empty one for a machine without any.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fixes.applier import provision
from tests.applier import interpreters
from tests.applier.command import run_command
from tests.applier.world import Ran, World

LINE = "gaudi-fix-pack: provisioning libcst and what it needs with pip\n"
APPLY = ("--profile", "v1.0.0")
MODERN = [version for version in interpreters.VERSIONS if version != "3.10"]

Stock = Callable[[str], str]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Makes an environment with pip and nothing else, once for a version; its interpreter."""
    made: dict[str, str] = {}

    def make(version: str) -> str:
        base = interpreters.need(version)
        if version not in made:
            folder = tmp_path_factory.mktemp(f"stock-{version}")
            done = subprocess.run(
                [base, "-m", "venv", str(folder)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"Python {version} makes no environments: {done.stderr.strip()}")
            made[version] = str(folder / "bin" / "python")
        return made[version]

    return make


@pytest.fixture(scope="session")
def any_stock(stock: Stock) -> str:
    """The interpreter of one such environment; its version reads TOML without help."""
    for version in MODERN:
        if interpreters.find(version):
            return stock(version)
    pytest.skip("no Python 3.11 or newer on this machine")


@pytest.fixture(scope="session")
def wheels(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Downloads the pinned wheels, once for an interpreter; the folder they are in."""
    made: dict[str, Path] = {}

    def download(python: str) -> Path:
        if python not in made:
            folder = tmp_path_factory.mktemp("wheels")
            command = [python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
            command += ["--require-hashes", "-r", str(provision.REQUIREMENTS), "-d"]
            done = subprocess.run(
                [*command, str(folder)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                pytest.skip(f"no index gives the pinned wheels: {done.stderr.strip()[-200:]}")
            made[python] = folder
        return made[python]

    return download


class Machine:
    """An interpreter without libcst, with caches of its own and an index that is a folder."""

    def __init__(self, world: World, python: str, index: Path | None) -> None:
        self.world = world
        self.python = python
        self.cache = world.pack.parent / "cache"
        self.temporary = world.pack.parent / "temporary"
        self.temporary.mkdir()
        self.index = index

    def run(self, *argv: str, **environment: str) -> tuple[Ran, set[str]]:
        """Run the command on the small installation."""
        empty = self.temporary / "no-index"
        empty.mkdir(exist_ok=True)
        return run_command(
            self.world,
            *argv,
            "--site-packages",
            str(self.world.site),
            python=self.python,
            environment={
                "GAUDI_FIX_PACK_CACHE": str(self.cache),
                "HOME": str(self.temporary),
                "TMPDIR": str(self.temporary),
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": str(self.index or empty),
                **environment,
            },
        )

    @property
    def provisioned(self) -> list[str]:
        """What is in the cache."""
        folder = self.cache / "libraries"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def fingerprints(folder: Path) -> dict[str, str]:
    """Every file below a folder, but for bytecode that any import may leave."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


def own_site(python: str) -> Path:
    """The site-packages folder of an environment."""
    (folder,) = Path(python).parents[1].glob("lib/python3*/site-packages")
    return folder


@pytest.fixture
def online(world: World, any_stock: str, wheels: Callable[[str], Path]) -> Machine:
    """A machine that can have the wheels."""
    return Machine(world, any_stock, wheels(any_stock))


@pytest.fixture
def offline(world: World, any_stock: str) -> Machine:
    """A machine that cannot."""
    return Machine(world, any_stock, None)


def applied_already(machine: Machine) -> None:
    """Have the set applied by another interpreter, as an image's build step does."""
    ran, _ = run_command(machine.world, *APPLY, "--site-packages", str(machine.world.site))
    assert ran.code == 0, ran.err


# With an index ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", interpreters.VERSIONS)
def test_the_command_helps_itself(
    version: str, world: World, stock: Stock, wheels: Callable[[str], Path]
) -> None:
    python = stock(version)
    machine = Machine(world, python, wheels(python))
    before = fingerprints(own_site(python))
    first, modules = machine.run(*APPLY)
    assert (first.code, first.err) == (0, LINE)
    assert first.last == "applied=3 unchanged=0 files=2 profile=v1.0.0"
    assert "libcst" in modules
    assert len(machine.provisioned) == 1
    assert fingerprints(own_site(python)) == before


def test_a_second_run_needs_no_pip(online: Machine) -> None:
    online.run(*APPLY)
    online.index = None
    before = online.provisioned
    again, modules = online.run(*APPLY, "delta")
    assert (again.code, again.err) == (0, "")
    assert again.last.startswith("applied=1 unchanged=3")
    assert "subprocess" in modules  # imported, but pip would have failed
    assert online.provisioned == before


def test_the_cache_is_private(online: Machine) -> None:
    online.run(*APPLY)
    assert (online.cache / "libraries").stat().st_mode & 0o777 == 0o700


def test_without_a_named_cache_the_user_s_own_is_used(online: Machine) -> None:
    ran, _ = online.run(*APPLY, GAUDI_FIX_PACK_CACHE="", XDG_CACHE_HOME="")
    assert ran.code == 0
    assert len(list((online.temporary / ".cache/gaudi-fix-pack/libraries").iterdir())) == 1


def test_a_pip_that_installs_for_the_user_is_no_hindrance(online: Machine) -> None:
    ran, _ = online.run(*APPLY, PIP_USER="1")
    assert ran.code == 0, ran.err


def test_a_dry_run_may_provision_but_leaves_the_packages_alone(online: Machine) -> None:
    before = online.world.snapshot(times=True, state=True)
    ran, _ = online.run(*APPLY, "--dry-run")
    assert (ran.code, ran.err) == (0, LINE)
    assert online.world.snapshot(times=True, state=True) == before


# What is not to be trusted ------------------------------------------------------------------------


@pytest.mark.parametrize("wheel", ["libcst", "packaging"])
def test_a_wheel_with_another_hash_is_refused(online: Machine, wheel: str) -> None:
    assert online.index is not None
    forged = online.temporary / "forged"
    shutil.copytree(online.index, forged)
    (path,) = forged.glob(f"{wheel}-*.whl")
    path.write_bytes(path.read_bytes() + b"\0")
    online.index = forged
    ran, _ = online.run(*APPLY)
    assert ran.code == 6
    assert "DO NOT MATCH THE HASHES" in ran.err
    assert online.provisioned == []


def planted(machine: Machine) -> Path:
    """Let the machine provision, and make the result one that must not be used."""
    machine.run(*APPLY)
    machine.run("--revert")
    (folder,) = (machine.cache / "libraries").iterdir()
    (folder / "libcst" / "__init__.py").write_text("raise SystemExit('planted code was run')\n")
    return folder


def test_a_cache_that_others_can_write_is_not_used(online: Machine) -> None:
    planted(online)
    (online.cache / "libraries").chmod(0o777)
    ran, _ = online.run(*APPLY)
    assert (ran.code, ran.err) == (0, LINE)
    (private,) = online.temporary.glob("gaudi-fix-pack-*/libraries")
    assert len(list(private.iterdir())) == 1


@pytest.mark.parametrize("how", ["writable", "link"])
def test_provisioned_libraries_that_others_can_write_are_refused(online: Machine, how: str) -> None:
    folder = planted(online)
    if how == "writable":
        folder.chmod(0o777)
    else:
        folder.rename(online.temporary / "elsewhere")
        folder.symlink_to(online.temporary / "elsewhere")
    ran, _ = online.run(*APPLY)
    assert ran.code == 6
    assert f"others can write to {folder}" in ran.err
    assert "planted" not in ran.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_somebody_else_is_not_used(online: Machine) -> None:
    planted(online)
    os.chown(online.cache / "libraries", 1234, 1234)
    ran, _ = online.run(*APPLY)
    assert ran.code == 0, ran.err
    assert list(online.temporary.glob("gaudi-fix-pack-*/libraries/*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_libraries_of_somebody_else_are_refused(online: Machine) -> None:
    folder = planted(online)
    os.chown(folder, 1234, 1234)
    ran, _ = online.run(*APPLY)
    assert ran.code == 6
    assert "others can write" in ran.err


# Without an index ---------------------------------------------------------------------------------


def test_without_an_index_it_is_exit_6_with_the_command_that_helps(offline: Machine) -> None:
    before = offline.world.snapshot(times=True, state=True)
    ran, _ = offline.run(*APPLY)
    assert (ran.code, ran.out) == (6, "")
    line, error = ran.err.splitlines()
    assert line + "\n" == LINE
    assert "could not be provisioned (No matching distribution found for " in error
    assert error.endswith(f"; run: {offline.python} -m pip install libcst==1.9.0 packaging==26.4")
    assert offline.world.snapshot(times=True, state=True) == before
    assert offline.provisioned == []


def test_the_command_that_helps_does(
    world: World, stock: Stock, wheels: Callable[[str], Path], tmp_path: Path
) -> None:
    version = next((v for v in MODERN if interpreters.find(v)), None)
    if version is None:
        pytest.skip("no Python 3.11 or newer on this machine")
    plain = stock(version)
    machine = Machine(world, plain, None)
    ran, _ = machine.run(*APPLY)
    words = ran.err.rpartition("; run: ")[2].split()
    subprocess.run(
        [*words, "-q", "--no-deps", "--target", str(tmp_path / "there")],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels(plain))},
        check=True,
    )
    helped, _ = run_command(
        world,
        *APPLY,
        "--site-packages",
        str(world.site),
        python=plain,
        environment={"GAUDI_FIX_PACK_CACHE": str(machine.cache)},
        path=[tmp_path / "there"],
    )
    assert (helped.code, helped.err) == (0, "")
    assert machine.provisioned == []


def test_a_cache_that_may_not_be_searched_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's own, that an image names as everybody's home."""
    closed, own = tmp_path / "closed" / "libraries", tmp_path / "own" / "libraries"
    monkeypatch.setattr(provision, "_cache_folders", lambda: [closed, own])
    monkeypatch.setattr(provision, "_install", lambda work, folder: folder)
    is_dir, make = Path.is_dir, Path.mkdir

    def refused(path: Path) -> None:
        if path.is_relative_to(tmp_path / "closed"):
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", lambda path: refused(path) or is_dir(path))
    monkeypatch.setattr(
        Path, "mkdir", lambda path, *mode, **more: refused(path) or make(path, *mode, **more)
    )
    found = provision._provisioned()
    assert found.parent == own
    found.mkdir()
    assert provision._provisioned() == found


def test_without_a_temporary_folder_the_named_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setenv("GAUDI_FIX_PACK_CACHE", str(tmp_path))
    assert provision._cache_folders() == [tmp_path / "libraries"]


def test_no_folder_to_put_it_in_is_exit_6(offline: Machine) -> None:
    nowhere = offline.temporary / "file"
    nowhere.write_text("")
    (offline.temporary / f"gaudi-fix-pack-{os.geteuid()}").write_text("")
    ran, _ = offline.run(*APPLY, GAUDI_FIX_PACK_CACHE=str(nowhere))
    assert ran.code == 6
    assert "no folder to put it in could be written" in ran.err


@pytest.mark.parametrize(("words", "end"), [((), ""), (("--dry-run",), " dry-run")])
def test_a_run_with_nothing_to_do_needs_no_library(
    offline: Machine, words: tuple[str, ...], end: str
) -> None:
    applied_already(offline)
    ran, modules = offline.run(*APPLY, *words)
    assert (ran.code, ran.err) == (0, "")
    assert ran.last == f"applied=0 unchanged=3 files=0 profile=v1.0.0{end}"
    assert not {"libcst", "packaging", "tomli", "tomllib"} & modules


def test_a_run_with_nothing_to_do_needs_no_library_under_3_10(world: World, stock: Stock) -> None:
    machine = Machine(world, stock("3.10"), None)
    applied_already(machine)
    ran, modules = machine.run(*APPLY)
    assert (ran.code, ran.err) == (0, "")
    assert not {"libcst", "packaging", "tomli"} & modules


@pytest.mark.parametrize(
    "argv",
    [
        ("--list",),
        ("--list", "--profile", "v1.0.0", "--json"),
        ("--explain", "delta"),
        ("--status",),
        ("--status", "--json"),
        ("--version",),
        ("--help",),
        ("--revert",),
    ],
)
def test_what_rewrites_nothing_needs_no_library(offline: Machine, argv: tuple[str, ...]) -> None:
    applied_already(offline)
    ran, modules = offline.run(*argv)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out
    assert not {"libcst", "packaging"} & modules
    assert offline.provisioned == []


# Which libcst will do -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "usable"), [("1.0.1", False), ("1.1.0", True), ("1.9.0", True), ("2.0", True)]
)
def test_a_libcst_that_is_too_old_is_not_used(
    monkeypatch: pytest.MonkeyPatch, version: str, usable: bool
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert provision._usable("libcst") == usable


def test_the_pins_are_complete() -> None:
    text = re.sub(r"^#.*\n", "", provision.REQUIREMENTS.read_text(), flags=re.M)
    pin = r"(\S+)==\S+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    assert re.fullmatch(f"({pin})+", text)
    assert [match[1] for match in re.finditer(pin, text)] == ["libcst", "packaging", "tomli"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the names in the command differ")
def test_the_command_that_helps_names_all_that_is_needed() -> None:
    assert provision._help("x").endswith(" -m pip install libcst==1.9.0 packaging==26.4")
