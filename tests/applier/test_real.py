"""The applier on the real packages of each release."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixes.applier.definitions import Source, fingerprint
from fixes.applier.pack import Pack
from fixes.applier.plan import MARKER, make_plan
from fixes.authoring.trees import Tree
from tests.applier.interpreters import VERSIONS, need
from tests.support.trees import Trees

ROOT = Path(__file__).resolve().parents[2]
PACK = Pack(ROOT)
OTHER = {"v0.26.0": "v0.30.0", "v0.30.0": "v0.26.0"}


class Installation:
    """A release's packages, ours to write into, and the applier run on them."""

    def __init__(self, trees: Trees, release: str, folder: Path) -> None:
        self.release = release
        missing = trees.stock(release).missing
        self.only = [
            word
            for name in PACK.profile(release).packages
            if missing and name not in missing
            for word in ("--package", name)
        ]
        self.site = trees.copy(release, folder / release)

    def run(
        self, *words: str, profile: str | None = None, python: str = sys.executable, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command as people do, in a process of its own."""
        command = [python, str(ROOT / "fixes" / "apply_all.py"), "--site-packages", str(self.site)]
        if profile != "":
            command += ["--profile", profile or self.release, *self.only]
        environment = {**os.environ, **env}
        return subprocess.run(
            [*command, *words], capture_output=True, text=True, env=environment, check=False
        )

    def snapshot(self, *, times: bool = False) -> dict[str, tuple[object, ...]]:
        """Every file: content, mode, owner and, if asked, time."""
        found: dict[str, tuple[object, ...]] = {}
        for path in sorted(self.site.rglob("*")):
            if path.is_file():
                stat = path.stat()
                facts: list[object] = [stat.st_mode, stat.st_uid, stat.st_gid]
                if times:
                    facts.append(stat.st_mtime_ns)
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path.relative_to(self.site))] = (digest, *facts)
        return found


def packages_only(snapshot: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """Without the state folder."""
    return {name: facts for name, facts in snapshot.items() if ".gaudi-fix-pack" not in name}


def written(release: str) -> list[str]:
    """The fixes that a run without words applies."""
    entries = PACK.profile(release).entries
    return [e.id for e in entries if e.id not in PACK.unwritten and not e.opt_in]


@pytest.fixture(params=PACK.profile_names)
def installed(request: pytest.FixtureRequest, trees: Trees, tmp_path: Path) -> Installation:
    """The packages of each release in turn."""
    return Installation(trees, request.param, tmp_path)


def test_apply_again_and_revert(installed: Installation) -> None:
    pristine = installed.snapshot(times=True)
    first = installed.run("--json")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["counts"]["applied"] == len(document["fixes"]) > 0
    after = installed.snapshot(times=True)
    rewritten = {
        name for name, facts in packages_only(after).items() if facts != pristine.get(name)
    }
    assert rewritten == {file["path"] for file in document["files"]}
    for file in document["files"]:
        assert after[file["path"]][0] == file["after"]

    again = installed.run()
    assert again.stdout.splitlines()[-1].startswith("applied=0 unchanged=")
    assert installed.snapshot(times=True) == after

    reverted = installed.run("--revert", profile="")
    assert reverted.returncode == 0, reverted.stderr
    assert installed.snapshot(times=True) == pristine
    assert not (installed.site / "vllm" / ".gaudi-fix-pack").exists()


def test_only_the_lines_of_sites_differ_and_all_compiles(installed: Installation) -> None:
    before = {path: (installed.site / path).read_bytes() for path in sites_by_file(installed)}
    assert installed.run().returncode == 0
    for path, names in sites_by_file(installed).items():
        after = (installed.site / path).read_bytes()
        assert after != before[path]
        assert outside(Source(path, after), names) == outside(Source(path, before[path]), names)
    compiled = subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-f", *before], cwd=installed.site, check=False
    )
    assert compiled.returncode == 0


def sites_by_file(installed: Installation) -> dict[str, set[str]]:
    """The locked sites of the release that are rewritten here."""
    found: dict[str, set[str]] = {}
    for fix in written(installed.release):
        for site in PACK.lock(installed.release).sites[fix]:
            inside = not installed.only or site.file.split("/")[0] in installed.only
            if site.rewritten and inside:
                found.setdefault(site.file, set()).add(site.definition)
    return found


def outside(source: Source, names: set[str]) -> list[str]:
    """A file's lines without those of some definitions."""
    spans = [span for name in names for span in source.definitions[name]]
    return [
        line
        for number, line in enumerate(source.lines)
        if not any(span.start <= number < span.stop for span in spans)
    ]


def test_from_one_set_to_another_as_if_from_pristine(installed: Installation) -> None:
    fixes = written(installed.release)
    one = ["--without", fixes[0]]
    other = ["--without", fixes[-1]]
    assert installed.run(*other).returncode == 0
    direct = packages_only(installed.snapshot())
    installed.run("--revert", profile="")
    assert installed.run(*one).returncode == 0
    assert packages_only(installed.snapshot()) != direct
    changed = installed.run(*other)
    assert changed.returncode == 0, changed.stderr
    assert packages_only(installed.snapshot()) == direct


def test_another_release_is_refused_with_every_mismatch(installed: Installation) -> None:
    before = installed.snapshot(times=True)
    ran = installed.run("--json", profile=OTHER[installed.release])
    assert ran.returncode == 3
    mismatches = json.loads(ran.stdout)["error"]["mismatches"]
    names = {(m["file"], m["definition"]) for m in mismatches}
    lock = PACK.lock(OTHER[installed.release])
    expected = set()
    for fix in written(OTHER[installed.release]):
        for site in lock.sites[fix]:
            path = installed.site / site.file
            if not path.is_relative_to(installed.site / "vllm") and installed.only:
                continue
            source = Source(site.file, path.read_bytes() if path.exists() else b"")
            spans = source.definitions.get(site.definition, [])
            if [fingerprint(source.text(span)) for span in spans] != [site.sha256]:
                expected.add((site.file, site.definition))
    assert names == expected != set()
    assert f"those of --profile {installed.release}" in ran.stderr
    assert installed.snapshot(times=True) == before


def test_without_a_profile_the_one_that_fits_is_named(installed: Installation) -> None:
    ran = installed.run(profile="")
    assert ran.returncode == 2
    assert f"the installed packages match {installed.release}" in ran.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_makes_the_same_tree(version: str, installed: Installation) -> None:
    """With libcst provisioned, as on a stock image; fingerprints and rewrites are the same."""
    assert installed.run().returncode == 0
    ours = packages_only(installed.snapshot())
    installed.run("--revert", profile="")
    ran = installed.run(python=need(version), PYTHONPATH="")
    if ran.returncode == 6:
        pytest.skip(f"libcst cannot be had for Python {version}: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert packages_only(installed.snapshot()) == ours


@pytest.mark.parametrize("libcst", ["1.1.0", "1.5.1", "1.8.6"])
def test_every_libcst_makes_the_same_tree(
    libcst: str, installed: Installation, tmp_path: Path
) -> None:
    assert installed.run().returncode == 0
    ours = packages_only(installed.snapshot())
    installed.run("--revert", profile="")
    target = tmp_path / "libcst"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    pip = subprocess.run(
        [*command, str(target), "--only-binary=:all:", f"libcst=={libcst}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if pip.returncode != 0:
        pytest.skip(f"pip has no libcst {libcst} for this Python: {pip.stderr.strip()[-200:]}")
    # 1.1 imports two small libraries that later ones do without.
    extra = ["typing-extensions", "typing-inspect", "mypy-extensions", "pyyaml"]
    subprocess.run([*command, str(target), *extra], capture_output=True, check=False)
    check = "import libcst; print(libcst.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", check],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(target))
    ran = installed.run(PYTHONPATH=str(target))
    assert ran.returncode == 0, ran.stderr
    assert packages_only(installed.snapshot()) == ours


@pytest.mark.parametrize("change", ["byte", "renamed", "twice", "crlf"])
def test_a_changed_site_is_refused(installed: Installation, change: str) -> None:
    path, names = next(iter(sites_by_file(installed).items()))
    target = installed.site / path
    source = Source(path, target.read_bytes())
    name = sorted(names)[0]
    span = source.definitions[name][0]
    text = source.text(span)
    last = name.rpartition(".")[2]
    new = {
        "byte": text.replace("return", "retuRn", 1).replace("self", "self ", 1),
        "renamed": text.replace(f"def {last}(", f"def {last}_(", 1),
        "twice": f"{text}\n{text}",
        "crlf": text.replace("\n", "\r\n"),
    }[change]
    assert new != text
    target.write_bytes(source.replaced({span: new}))
    before = installed.snapshot(times=True)
    ran = installed.run()
    assert ran.returncode == 3
    assert path in ran.stderr
    assert "applied" not in ran.stdout + ran.stderr
    assert installed.snapshot(times=True) == before


@pytest.mark.parametrize("release", PACK.profile_names)
def test_every_two_fixes_on_one_definition_fit_together(trees: Trees, release: str) -> None:
    """On pristine text, by themselves, in the profile's order: both leave their marks in it."""
    stock = trees.stock(release)
    tree, lock = Tree(stock.path), PACK.lock(release)
    entries = PACK.profile(release).entries
    fixes = PACK.fixes([e.id for e in entries if e.id not in PACK.unwritten])
    labels = {
        fix.id: {site.label for site in lock.sites[fix.id] if site.rewritten} for fix in fixes
    }
    at_hand = [fix for fix in fixes if all(tree.has(site.file) for site in lock.sites[fix.id])]
    pairs = 0
    for one, other in itertools.combinations(at_hand, 2):
        shared = labels[one.id] & labels[other.id]
        if not shared:
            continue
        pairs += 1
        texts = {file.path: file.rewritten for file in make_plan([one, other], lock, tree.read)}
        for path, _, name in (label.partition("::") for label in shared):
            source = Source(path, texts[path])
            (span,) = source.definitions[name]
            for fix in (one, other):
                assert f"{MARKER}{fix.id}\n" in source.text(span), (one.id, other.id, name)
    assert pairs or stock.missing
