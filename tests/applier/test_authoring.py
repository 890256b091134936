"""Authoring: recording locks, carrying fixes to another release, starting a new one."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from fixes.applier.definitions import fingerprint
from fixes.applier.edits import rewrite
from fixes.applier.errors import ImageMismatch, UsageError
from fixes.applier.pack import Pack
from fixes.applier.profiles import Lock, load_lock
from fixes.authoring import cli
from fixes.authoring.locks import Origin, record
from fixes.authoring.porting import Ported, port
from fixes.authoring.scaffold import Start, new_fix
from fixes.authoring.trees import Tree
from tests.applier.world import ENGINE, RUNNER, World

HERE = Origin("1" * 40, "written by this test")
ORIGINS = {"vllm": HERE, "vllm_gaudi": HERE}

SHAPES = '''
    """alpha: the same repair for two shapes of the code."""
    from fixes.applier.fix import Fix, site

    FIX = Fix(summary="shapes", symptom="wrong", references=("#1",), drop_when="never")

    @site("vllm/engine.py", "Engine.step", shape="inline")
    def inline(code):
        code.replace_statement("value = double(request)", "value = double(request) + 1")

    @site("vllm/engine.py", "Engine.step", shape="factored")
    def factored(code):
        code.replace_statement("value = self.run(request)", "value = self.run(request) + 1")

    @site("vllm/engine.py", "double")
    def always(code):
        code.insert_first("value += 0")
'''


def recorded(world: World, folder: Path | None = None) -> Lock:
    """The lock of v1.0.0 for a tree, the pristine installation's unless another is given."""
    return record(Pack(world.pack), "v1.0.0", Tree(folder or world.site), ORIGINS)


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text in a file that has it once."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


# Recording ----------------------------------------------------------------------------------------


def test_a_lock_has_the_fingerprint_of_every_definition_and_its_origin(world: World) -> None:
    lock = recorded(world)
    assert list(lock.sites) == ["alpha", "beta", "gamma", "delta"]
    step, double = lock.sites["alpha"]
    text = ENGINE[ENGINE.index("    def step") : ENGINE.index("\n    @property")]
    assert step.label == "vllm/engine.py::Engine.step"
    assert step.sha256 == fingerprint(text)
    assert (step.commit, step.evidence, step.newlines) == (HERE.commit, HERE.evidence, "lf")
    assert (step.rewritten, double.rewritten) == (True, False)


def test_a_lock_on_disk_is_what_record_gave(world: World) -> None:
    lock = recorded(world)
    path = world.pack / "profiles" / "v1.0.0.lock"
    assert load_lock(path) == lock


@pytest.mark.parametrize("change", ["missing", "older"])
def test_check_tells_a_lock_that_is_not_current(
    world: World, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = world.pack / "profiles" / "v1.0.0.lock"
    write_summary(world)
    finish(world)
    words = ["v1.0.0", "--from", str(world.site)]
    assert cli.main(str(world.pack), ["record", *words]) == 0
    assert cli.main(str(world.pack), ["docs"]) == 0
    assert cli.main(str(world.pack), ["check", *words]) == 0
    if change == "missing":
        path.unlink()
    else:
        edit(path, recorded(world).sites["delta"][0].sha256, "0" * 64)
    assert cli.main(str(world.pack), ["check", *words]) == 1
    assert "v1.0.0.lock is not current" in capsys.readouterr().out


def write_summary(world: World, commit: str = "1" * 40) -> None:
    """What `sources` leaves beside the packages that it lays out."""
    packages = {name: {"kind": "index", "commit": commit} for name in ("vllm", "vllm_gaudi")}
    (world.site / "sources.json").write_text(json.dumps({"packages": packages}))


def finish(world: World) -> None:
    """Give the fixes of the small pack what a finished one must have."""
    (world.pack / "tests" / "fixes").mkdir(parents=True, exist_ok=True)
    for fix_id in ("alpha", "beta", "gamma", "delta"):
        module = world.pack / "fixes" / f"{fix_id}.py"
        more = '\n\nReference: none.\n\nOther places with the pattern: none.\n"""\n'
        world.write_fix(fix_id, module.read_text().replace('"""\n', more, 1))
        test = world.pack / "tests" / "fixes" / f"test_{fix_id}.py"
        test.write_text('import pytest\n\n@pytest.mark.red("x")\ndef test_it(): ...\n')
    (world.pack / "CHANGELOG.md").write_text("`alpha` `beta` `gamma` `delta`\n")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("fixes/alpha.py", "alpha: step", "step", "its docstring does not begin with `alpha: `"),
        ("fixes/alpha.py", "Reference:", "See", "its docstring does not have `Reference:`"),
        ("fixes/alpha.py", "Other places", "Places", "not have `Other places with the pattern`"),
        ("fixes/alpha.py", "Reference: none.", "Reference: TODO", "alpha.py:3 still has `TODO`"),
        ("fixes/alpha.py", 'symptom="wrong values"', 'symptom="write me"', "has `write me`"),
        ("tests/fixes/test_alpha.py", '"x"', '"write me"', "alpha.py:3 still has `write me`"),
        ("tests/fixes/test_alpha.py", '@pytest.mark.red("x")', "", "no test is red on v1.0.0"),
        ("CHANGELOG.md", "`alpha`", "", "CHANGELOG.md has no line about `alpha`"),
    ],
)
def test_check_says_what_a_fix_has_not_got(
    world: World, file: str, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(world)
    edit(world.pack / file, old, new)
    world.write_fix("alpha", (world.pack / "fixes" / "alpha.py").read_text())
    words = ["v1.0.0", "--from", str(world.site)]
    assert cli.main(str(world.pack), ["record", *words]) == 0
    said = capsys.readouterr().out
    assert "note: alpha is not finished: `check` says what is missing" in said
    assert cli.main(str(world.pack), ["docs"]) == 0
    assert cli.main(str(world.pack), ["check", *words]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "not finished" in line]
    assert len(lines) == 1
    assert lines[0].startswith("alpha is not finished: ")
    assert message in lines[0]


def test_a_new_fix_is_not_finished(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    finish(world)
    words = ["--from", str(world.site)]
    site = ["--site", "vllm/engine.py::LIMIT"]
    assert cli.main(str(world.pack), ["new", "zeta", "--profile", "v1.0.0", *words, *site]) == 0
    assert cli.main(str(world.pack), ["check", "v1.0.0", *words]) == 1
    said = capsys.readouterr().out
    assert "zeta is not finished: CHANGELOG.md has no line about `zeta`" in said
    assert "zeta is not finished: fixes/zeta.py:1 still has `TODO`" in said
    assert "zeta is not finished: tests/fixes/test_zeta.py:7 still has `write me`" in said


@pytest.mark.parametrize(
    ("fix_id", "hint"),
    [("alpah", "; did you mean alpha?"), ("qqqq", "; the pack's checkout is not complete")],
)
def test_a_misspelt_fix_of_a_profile_is_told(
    world: World, fix_id: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite_profile(world, 'id = "gamma"\n', f'id = "gamma"\n\n[[fix]]\nid = "{fix_id}"\n')
    assert cli.main(str(world.pack), ["record", "v1.0.0", "--from", str(world.site)]) == 2
    module = world.pack / "fixes" / f"{fix_id}.py"
    said = f"{fix_id} (listed in v1.0.0.toml): there is no {module}{hint}"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["record", "check"])
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("empty", "has no package vllm and no vllm_gaudi: `python3 fixes/dev.py sources v1.0.0"),
        ("site/vllm", "has no package vllm and no vllm_gaudi: give the folder around it, "),
        ("half", "has no package vllm_gaudi: `python3 fixes/dev.py sources v1.0.0"),
    ],
)
def test_a_folder_without_the_packages_is_refused(
    world: World, command: str, folder: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = world.site.parent
    (root / "empty").mkdir()
    shutil.copytree(world.site / "vllm", root / "half" / "vllm")
    assert cli.main(str(world.pack), [command, "v1.0.0", "--from", str(root / folder)]) == 2
    assert f"{root / folder} {message}" in capsys.readouterr().err


def test_what_sources_could_not_bring_is_said_not_to_be_tried(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(world.site / "vllm_gaudi")
    (world.site / "sources.json").write_text('{"missing": {"vllm_gaudi": "unreachable"}}')
    assert cli.main(str(world.pack), ["record", "v1.0.0", "--from", str(world.site)]) == 0
    assert (
        "note: v1.0.0: 3 locked definitions of beta, gamma, delta are not in the packages at hand:"
        " they were not tried, and their codemods are untested here" in capsys.readouterr().out
    )


def test_what_is_all_tried_needs_no_note(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    finish(world)
    assert cli.main(str(world.pack), ["record", "v1.0.0", "--from", str(world.site)]) == 0
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["record", "check"])
def test_an_edited_file_is_not_what_the_lock_says_it_is(
    world: World, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summary(world)
    words = ["v1.0.0", "--from", str(world.site)]
    assert cli.main(str(world.pack), ["record", *words]) == 0
    edit(world.site / "vllm/engine.py", "LIMIT = 3", "LIMIT = 4")
    before = (world.pack / "profiles" / "v1.0.0.lock").read_bytes()
    assert cli.main(str(world.pack), [command, *words]) == 3
    said = capsys.readouterr().err
    assert f"vllm/engine.py: edited in {world.site} (v1.0.0.lock has another text of it)" in said
    assert "lay the sources out anew" in said
    assert (world.pack / "profiles" / "v1.0.0.lock").read_bytes() == before


def test_another_commit_is_no_edit(world: World) -> None:
    write_summary(world)
    words = ["v1.0.0", "--from", str(world.site)]
    assert cli.main(str(world.pack), ["record", *words]) == 0
    edit(world.site / "vllm/engine.py", "LIMIT = 3", "LIMIT = 4")
    write_summary(world, commit="2" * 40)
    assert cli.main(str(world.pack), ["record", *words]) == 0


def test_a_file_that_no_lock_knows_is_compared_with_what_was_installed(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (world.site / "vllm_gaudi" / "runner.py").read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    record_file = world.site / "vllm_gaudi-1.0.0.dist-info" / "RECORD"
    record_file.write_text(f"vllm_gaudi/runner.py,sha256={digest},{len(data)}\nRECORD,,\n")
    (world.pack / "profiles" / "v1.0.0.lock").unlink()
    words = ["record", "v1.0.0", "--from", str(world.site)]
    assert cli.main(str(world.pack), words) == 0
    (world.pack / "profiles" / "v1.0.0.lock").unlink()
    edit(world.site / "vllm_gaudi" / "runner.py", "fill=0", "fill=1")
    assert cli.main(str(world.pack), words) == 3
    assert "runner.py: edited in" in capsys.readouterr().err


# What cannot be applied is not recorded -----------------------------------------------------------


def rewrite_profile(world: World, old: str, new: str) -> None:
    """Change the lines of v1.0.0."""
    edit(world.pack / "profiles" / "v1.0.0.toml", old, new)


@pytest.mark.parametrize("command", ["record", "check"])
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'id = "gamma"\n',
            'id = "gamma"\nconflicts = ["alpha"]\n',
            "v1.0.0 with its default fixes cannot run: gamma conflicts with alpha",
        ),
        (
            'requires = ["gamma"]',
            'conflicts = ["gamma"]',
            "v1.0.0 with delta cannot run: delta conflicts with gamma",
        ),
        (
            '[[fix]]\nid = "epsilon"\n',
            '[[fix]]\nid = "zeta"\nrequires = ["delta"]\n',
            "v1.0.0 with its default fixes cannot run: zeta requires delta; name it as well",
        ),
    ],
)
def test_a_profile_that_cannot_run_is_refused(
    world: World, command: str, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write_fix("zeta", SHAPES.replace("alpha", "zeta"))
    rewrite_profile(world, old, new)
    assert cli.main(str(world.pack), [command, "v1.0.0", "--from", str(world.site)]) == 2
    assert message in capsys.readouterr().err


def test_an_opt_in_fix_may_need_another_one(world: World) -> None:
    rewrite_profile(world, 'id = "gamma"\n', 'id = "gamma"\nopt-in = true\n')
    assert cli.main(str(world.pack), ["record", "v1.0.0", "--from", str(world.site)]) == 0


AFTER_ALPHA = '''
    """gamma: edits what alpha leaves."""
    from fixes.applier.fix import Fix, site

    FIX = Fix(summary="s", symptom="s", references=("#3",), drop_when="never")

    @site("vllm/engine.py", "Engine.step")
    def step(code):
        code.replace_expression("double(request) + 1", "double(request) + 2")
'''


def test_a_fix_that_works_only_after_another_must_say_so(world: World) -> None:
    world.write_fix("gamma", AFTER_ALPHA)
    with pytest.raises(
        UsageError, match=r"gamma: vllm/engine\.py::Engine\.step: .* works only after alpha: say in"
    ):
        recorded(world)
    rewrite_profile(world, 'id = "gamma"\n', 'id = "gamma"\nrequires = ["alpha"]\n')
    recorded(world)


def test_fixes_that_conflict_are_tried_apart(world: World) -> None:
    """Both rewrite the same expression: the second finds it no more."""
    world.write_fix("gamma", AFTER_ALPHA.replace('"double(request) + 1"', '"double(request)"'))
    edit(world.pack / "fixes" / "alpha.py", "double(request) + 1", "max(request, 0)")
    with pytest.raises(ImageMismatch, match=r"expected 1 x .double\(request\)., found 0"):
        recorded(world)
    rewrite_profile(world, 'id = "gamma"\n', 'id = "gamma"\nconflicts = ["alpha"]\n')
    recorded(world)


def test_a_package_that_is_not_at_hand_keeps_its_locked_sites(world: World) -> None:
    before = load_lock(world.pack / "profiles" / "v1.0.0.lock")
    shutil.rmtree(world.site / "vllm_gaudi")
    lock = recorded(world)
    assert lock.sites["gamma"] == before.sites["gamma"]
    assert lock.sites["alpha"] == before.sites["alpha"]


def test_line_ends_are_recorded(world: World) -> None:
    path = world.site / "vllm_gaudi" / "runner.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    lock = recorded(world)
    assert {site.newlines for site in lock.sites["gamma"]} == {"crlf"}
    assert {site.newlines for site in lock.sites["alpha"]} == {"lf"}


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "vllm/engine.py",
            "def step(",
            "def stepp(",
            r"Engine\.step: there is no such definition in the file; the file has Engine\.stepp",
        ),
        ("vllm/engine.py", "def double(", "def twice(", "double: there is no such definition"),
        (
            "vllm/engine.py",
            "    size = 1\n",
            "    def step(self): ...\n",
            r"defines it 2 times \(lines 14, 19\); one that a file has more than once cannot be",
        ),
        ("vllm/engine.py", "double(request)  # twice", "twice(request)", "expected 1 x .*found 0"),
        ("vllm/engine.py", "import os", "import", "cannot parse"),
    ],
)
def test_what_the_release_does_not_have_cannot_be_recorded(
    world: World, file: str, old: str, new: str, message: str
) -> None:
    edit(world.site / file, old, new)
    with pytest.raises(ImageMismatch, match=message):
        recorded(world)


def test_a_file_that_is_not_there_cannot_be_recorded(world: World) -> None:
    (world.site / "vllm_gaudi" / "runner.py").unlink()
    with pytest.raises(ImageMismatch, match="collate: there is no such file"):
        recorded(world)


@pytest.mark.parametrize("shape", ["inline", "factored"])
def test_the_shape_that_fits_is_recorded(world: World, shape: str) -> None:
    world.write_fix("alpha", SHAPES)
    if shape == "factored":
        edit(world.site / "vllm/engine.py", "double(request)  # twice", "self.run(request)")
    sites = {site.label: site.shape for site in recorded(world).sites["alpha"]}
    assert sites == {"vllm/engine.py::Engine.step": shape, "vllm/engine.py::double": ""}


@pytest.mark.parametrize("shape", ["inline", "factored"])
def test_the_recorded_shape_is_the_one_that_is_applied(world: World, shape: str) -> None:
    world.write_fix("alpha", SHAPES)
    call = "double" if shape == "inline" else "self.run"
    if shape == "factored":
        edit(world.site / "vllm/engine.py", "double(request)  # twice", "self.run(request)")
    (world.pack / "profiles" / "v1.0.0.lock").write_text(recorded(world).dump())
    assert world.run().code == 0
    assert f"value = {call}(request) + 1" in (world.site / "vllm/engine.py").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("double(request)  # twice", "other(request)", r"\(factored, inline\) must fit; none does"),
        (
            "limit = LIMIT",
            "limit = LIMIT\n        value = self.run(request)",
            "must fit; factored and inline do",
        ),
    ],
)
def test_exactly_one_shape_must_fit(world: World, old: str, new: str, message: str) -> None:
    world.write_fix("alpha", SHAPES)
    edit(world.site / "vllm/engine.py", old, new)
    with pytest.raises(ImageMismatch, match=message):
        recorded(world)


# Published fingerprints ---------------------------------------------------------------------------


def publish(world: World, definitions: dict[str, object], file: str = "vllm/engine.py") -> None:
    """Write a file of fingerprints for v1.0.0."""
    entry = {"evidence": "branch x at commit abcdef0, quoted in a report"}
    document = {
        "files": {file: {**entry, "definitions": definitions}},
        "files_not_listed": {"vllm": {"commit": "fedcba9", "evidence": "unchanged since"}},
    }
    path = world.pack / "profiles" / "v1.0.0.fingerprints.json"
    path.write_text(json.dumps(document))


def engine_fingerprints(world: World) -> dict[str, object]:
    """What an honest publisher writes about the engine."""
    return {site.definition: site.sha256 for site in recorded(world).sites["alpha"]}


def test_a_published_fingerprint_that_agrees_gives_its_own_evidence(world: World) -> None:
    publish(world, engine_fingerprints(world))
    lock = recorded(world)
    assert {site.commit for site in lock.sites["alpha"]} == {"abcdef0"}
    assert lock.sites["alpha"][0].evidence == "branch x at commit abcdef0, quoted in a report"
    assert lock.sites["gamma"][0].commit == HERE.commit


def test_a_file_that_was_not_published_is_known_by_what_is_said_of_its_package(
    world: World,
) -> None:
    publish(world, {}, "vllm/other.py")
    lock = recorded(world)
    assert (lock.sites["alpha"][0].commit, lock.sites["alpha"][0].evidence) == (
        "fedcba9",
        "unchanged since",
    )
    assert lock.sites["gamma"][0].commit == HERE.commit


def test_a_published_fingerprint_stands_for_a_file_that_the_tree_has_not(world: World) -> None:
    honest = engine_fingerprints(world)
    whole = recorded(world)
    publish(world, honest)
    (world.site / "vllm" / "engine.py").unlink()
    lock = recorded(world)
    assert [s.sha256 for s in lock.sites["alpha"]] == [s.sha256 for s in whole.sites["alpha"]]


def test_a_published_fingerprint_that_contradicts_the_tree_is_refused(world: World) -> None:
    publish(world, {**engine_fingerprints(world), "Engine.step": "a" * 64})
    with pytest.raises(ImageMismatch, match=f"but {'a' * 64} was published"):
        recorded(world)


@pytest.mark.parametrize("value", [None, ["a" * 64, "b" * 64]])
def test_a_published_file_must_have_the_definition_just_once(world: World, value: object) -> None:
    honest = engine_fingerprints(world)
    publish(world, {"double": honest["double"], **({"Engine.step": value} if value else {})})
    with pytest.raises(ImageMismatch, match=r"Engine\.step: the fingerprints do not have it"):
        recorded(world)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", '{"files": {}}'])
def test_a_file_that_holds_no_fingerprints_is_a_usage_error(world: World, text: str) -> None:
    path = world.pack / "profiles" / "v1.0.0.fingerprints.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a file of fingerprints"):
        recorded(world)


def test_a_further_text_of_a_definition_is_locked_and_applied_too(world: World) -> None:
    """A release of which one definition is known in two texts."""
    other = world.site.with_name("further")
    shutil.copytree(world.site, other)
    edit(other / "vllm" / "engine.py", "# stock comment", "# another comment")
    (text,) = (site for site in recorded(world, other).sites["alpha"] if site.rewritten)
    publish(world, engine_fingerprints(world))
    path = world.pack / "profiles" / "v1.0.0.fingerprints.json"
    document = json.loads(path.read_text())
    further = {"sha256": text.sha256, "commit": "1234567", "evidence": "a pull request"}
    document["alternatives"] = {text.label: [further]}
    path.write_text(json.dumps(document))

    lock = recorded(world)
    both = [site for site in lock.sites["alpha"] if site.label == text.label]
    assert [site.commit for site in both] == ["abcdef0", "1234567"]
    (world.pack / "profiles" / "v1.0.0.lock").write_text(lock.dump())
    source = (other / "vllm" / "engine.py").read_bytes()
    (world.site / "vllm" / "engine.py").write_bytes(source)
    assert world.run().last == "applied=3 unchanged=0 files=2 profile=v1.0.0"
    assert b"double(request) + 1" in (world.site / "vllm" / "engine.py").read_bytes()


def test_a_lock_from_published_fingerprints_alone_is_applied_like_any_other(world: World) -> None:
    publish(world, engine_fingerprints(world))
    bare = world.site.with_name("bare")
    shutil.copytree(world.site, bare)
    (bare / "vllm" / "engine.py").unlink()
    (world.pack / "profiles" / "v1.0.0.lock").write_text(recorded(world, bare).dump())
    assert world.run().last == "applied=3 unchanged=0 files=2 profile=v1.0.0"


# Porting ------------------------------------------------------------------------------------------


def ported(world: World, new: Path, *, old: bool = True) -> dict[str, Ported]:
    """What porting says of alpha's and gamma's definitions, by the definition's name."""
    pack = Pack(world.pack)
    fixes = pack.fixes(["alpha", "gamma"])
    found = port(fixes, pack.lock("v1.0.0"), Tree(world.site) if old else None, Tree(new))
    return {one.label.rpartition("::")[2]: one for one in found}


@pytest.fixture
def release(world: World) -> Path:
    """The next release, so far the same as the last."""
    folder = world.site.with_name("next")
    shutil.copytree(world.site, folder)
    return folder


def test_unchanged_definitions_are_unchanged(world: World, release: Path) -> None:
    edit(release / "vllm/engine.py", "LIMIT = 3", "LIMIT = 4\n\n")
    states = {name: one.state for name, one in ported(world, release).items()}
    assert states == {"Engine.step": "unchanged", "double": "unchanged", "collate": "unchanged"}


def test_porting_names_fix_and_definition(world: World, release: Path) -> None:
    one = ported(world, release)["collate"]
    assert (one.fixes, one.label) == (("gamma",), "vllm_gaudi/runner.py::collate")


def test_a_definition_under_another_class_has_moved(world: World, release: Path) -> None:
    edit(release / "vllm/engine.py", "class Engine:", "class Core:")
    one = ported(world, release)["Engine.step"]
    assert (one.state, one.detail) == ("moved", "now vllm/engine.py::Core.step")


def test_a_definition_in_another_file_has_moved(world: World, release: Path) -> None:
    (release / "vllm/core").mkdir()
    (release / "vllm/engine.py").rename(release / "vllm/core/steps.py")
    one = ported(world, release)["double"]
    assert (one.state, one.detail) == ("moved", "now vllm/core/steps.py::double")


def test_files_that_are_no_python_do_not_stop_the_search(world: World, release: Path) -> None:
    (release / "vllm/a.py").write_text("def double(\n")
    (release / "vllm/b.py").write_bytes(b"double\0\xff")
    (release / "vllm/engine.py").rename(release / "vllm/c.py")
    assert ported(world, release)["double"].detail == "now vllm/c.py::double"


def test_a_changed_definition_comes_with_its_diff(world: World, release: Path) -> None:
    edit(release / "vllm/engine.py", "limit = LIMIT", "limit = LIMIT + 1")
    one = ported(world, release)["Engine.step"]
    assert one.state == "changed"
    assert one.detail == "the codemod still fits: read the diff, run the test, record"
    lines = one.diff.splitlines()
    assert lines[:2] == [
        "--- 111111111111 vllm/engine.py::Engine.step",
        "+++ 1.0.0 vllm/engine.py::Engine.step",
    ]
    assert "-        limit = LIMIT" in lines
    assert "+        limit = LIMIT + 1" in lines


def test_without_the_old_tree_a_change_comes_without_diff(world: World, release: Path) -> None:
    edit(release / "vllm/engine.py", "limit = LIMIT", "limit = LIMIT + 1")
    one = ported(world, release, old=False)["Engine.step"]
    assert (one.state, one.diff) == ("changed", "")


def test_a_codemod_that_fits_no_more_is_told(world: World, release: Path) -> None:
    edit(release / "vllm/engine.py", "double(request)  # twice", "double(request) + 1")
    one = ported(world, release)["Engine.step"]
    assert one.state == "changed"
    assert one.detail.startswith("the codemod does not fit (")
    assert "found 0" in one.detail


def test_a_change_of_what_is_only_relied_on_is_told(world: World, release: Path) -> None:
    edit(release / "vllm/engine.py", "return value * 2", "return value + value")
    one = ported(world, release)["double"]
    assert (one.state, one.detail) == ("changed", "relied on, not rewritten: read the diff")


def test_another_shape_that_fits_is_told(world: World, release: Path) -> None:
    world.write_fix("alpha", SHAPES)
    (world.pack / "profiles" / "v1.0.0.lock").write_text(recorded(world).dump())
    edit(release / "vllm/engine.py", "double(request)  # twice", "self.run(request)")
    one = ported(world, release)["Engine.step"]
    assert (one.state, "another shape of alpha fits, factored" in one.detail) == ("changed", True)
    edit(release / "vllm/engine.py", "self.run(request)", "other(request)")
    assert "shape" not in ported(world, release)["Engine.step"].detail


def test_a_definition_that_was_renamed_and_changed_is_gone(world: World, release: Path) -> None:
    edit(release / "vllm/engine.py", "def step(self, request)", "def steps(self, requests)")
    one = ported(world, release)["Engine.step"]
    assert one.state == "gone"
    assert one.detail.startswith("there is no such definition in the file; the file has Engine.st")


def test_a_file_that_is_gone_is_told(world: World, release: Path) -> None:
    (release / "vllm_gaudi/runner.py").unlink()
    one = ported(world, release)["collate"]
    assert (one.state, one.detail) == ("gone", "there is no such file")


def test_a_file_with_other_line_ends_differs_as_it_does_for_the_applier(
    world: World, release: Path
) -> None:
    """Its definitions have the same fingerprints."""
    path = release / "vllm_gaudi/runner.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    one = ported(world, release)["collate"]
    assert one.state == "converted"
    assert one.detail.startswith("its line ends are crlf, recorded were lf")
    assert world.run("--site-packages", str(release), site=False).code == 3


def test_a_change_of_a_converted_file_is_shown_without_the_line_ends(
    world: World, release: Path
) -> None:
    edit(release / "vllm/engine.py", "limit = LIMIT", "limit = LIMIT + 1")
    path = release / "vllm/engine.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    one = ported(world, release)["Engine.step"]
    assert one.detail.startswith("its line ends are crlf now; the codemod still fits")
    assert sum(line[0] in "+-" for line in one.diff.splitlines()) == 4  # two of them the head


def test_a_module_that_a_fix_adds_and_upstream_has_is_told(world: World, release: Path) -> None:
    (release / "vllm_gaudi" / "_fix_delta.py").write_text("")
    pack = Pack(world.pack)
    found = port(pack.fixes(["gamma", "delta"]), pack.lock("v1.0.0"), None, Tree(release))
    (one,) = (one for one in found if one.state != "unchanged")
    assert (one.label, one.state, one.fixes) == ("vllm_gaudi/_fix_delta.py", "taken", ("delta",))


def test_a_definition_that_two_fixes_rewrite_is_told_once(world: World, release: Path) -> None:
    edit(release / "vllm/engine.py", "# stock comment", "# another comment")
    pack = Pack(world.pack)
    fixes = pack.fixes(["alpha", "beta"])
    found = port(fixes, pack.lock("v1.0.0"), Tree(world.site), Tree(release))
    assert len({one.label for one in found}) == len(found)
    (one,) = (one for one in found if one.state == "changed")
    assert one.users == "alpha, beta"
    assert one.detail == "the codemod still fits: read the diff, run the test, record"
    edit(release / "vllm/engine.py", "limit = LIMIT", "limit = other()")
    found = port(fixes, pack.lock("v1.0.0"), Tree(world.site), Tree(release))
    (one,) = (one for one in found if one.state == "changed")
    assert one.detail.startswith("alpha: the codemod still fits: read the diff, run the test,")
    assert "; beta: the codemod does not fit (" in one.detail


def test_a_definition_there_twice_is_told_with_its_lines(world: World, release: Path) -> None:
    path = release / "vllm/engine.py"
    path.write_text(path.read_text() + "\n\ndef double(value):\n    return value * 2\n")
    one = ported(world, release)["double"]
    assert (one.state, one.detail) == ("duplicate", "the file defines it 2 times (lines 7, 35)")


def test_a_file_that_python_cannot_parse_is_not_gone(world: World, release: Path) -> None:
    edit(release / "vllm/engine.py", "import os", "import")
    one = ported(world, release)["double"]
    assert one.state == "unreadable"
    assert "vllm/engine.py: Python cannot parse it" in one.detail


@pytest.mark.parametrize("gone", [False, True])
def test_another_shape_that_fits_is_named(world: World, release: Path, gone: bool) -> None:
    world.write_fix("alpha", SHAPES.replace('step", shape="factored', 'core", shape="factored'))
    (world.pack / "profiles" / "v1.0.0.lock").write_text(recorded(world).dump())
    edit(release / "vllm/engine.py", "double(request)  # twice", "self.run(request)")
    path = release / "vllm/engine.py"
    core = path.read_text().replace("def step(", "def core(")
    path.write_text(core if gone else core + "\n    def step(self):\n        return self.core()\n")
    one = ported(world, release)["Engine.step"]
    assert one.state == ("gone" if gone else "changed")
    assert one.detail.endswith("another shape of alpha fits, factored: run the test, record")


def port_command(world: World, *words: str) -> int:
    """The exit code of `port` for v1.0.0."""
    return cli.main(str(world.pack), ["port", "--profile", "v1.0.0", *words])


@pytest.mark.parametrize("lacking", ["vllm", "vllm_gaudi", "all"])
@pytest.mark.parametrize("option", ["--from", "--to"])
def test_a_package_that_is_missing_is_an_error_that_names_it(
    world: World,
    release: Path,
    lacking: str,
    option: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("vllm", "vllm_gaudi") if lacking == "all" else (lacking,):
        shutil.rmtree(release / package)
    folders = {"--from": world.site, "--to": world.site, option: release}
    words = [word for name, folder in folders.items() for word in (name, str(folder))]
    assert port_command(world, *words) == 2
    told = capsys.readouterr()
    named = "vllm" if lacking == "all" else lacking
    assert f"{release} holds no {named}" in told.err
    assert not told.out


def test_another_release_is_not_what_the_lock_was_recorded_from(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    other = world.site.with_name("other")
    assert port_command(world, "--from", str(other), "--to", str(world.site)) == 2
    said = capsys.readouterr().err
    assert f"{other} is not what v1.0.0.lock was recorded from: 1 of 4 definitions" in said
    assert "vllm/engine.py::Engine.step for one" in said


# The text of an issue -----------------------------------------------------------------------------


def issue(
    world: World, release: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> list[str]:
    """The lines that `port --markdown` prints of a release that differs."""
    folders = ["--from", str(world.site), "--to", str(release)]
    assert port_command(world, *folders, "--markdown", *words) == 3
    return capsys.readouterr().out.splitlines()


def test_an_issue_counts_definitions_and_names_both_sides(
    world: World, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(release / "vllm/engine.py", "# stock comment", "# another comment")
    (release / "sources.json").write_text(json.dumps({"packages": {"vllm": {"commit": "3" * 40}}}))
    title, *body = issue(world, release, capsys)
    assert title == "# v1.0.0: 1 of 4 definitions differ in vllm 333333333333 and vllm_gaudi 1.0.0"
    assert "| profile v1.0.0 | recorded from | compared with |" in body
    assert f"| vllm | {'1' * 40} | {'3' * 40} |" in body
    command = f"port --profile v1.0.0 --from {world.site} --to {release} --markdown"
    assert f"Found with `python3 fixes/dev.py {command}`." in body
    (row,) = (line for line in body if line.startswith("| `"))
    assert row.startswith("| `vllm/engine.py::Engine.step` | changed | alpha, beta | the codemod")
    assert body.count("```diff") == 1
    assert "+++ 333333333333 vllm/engine.py::Engine.step" in body


def test_an_issue_leaves_out_the_diffs_that_are_too_many(
    world: World, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(release / "vllm/engine.py", "limit = LIMIT", f"limit = {'LIMIT + ' * 300}1")
    edit(release / "vllm_gaudi/runner.py", "assert rows", "assert rows is not None")
    body = issue(world, release, capsys, "--max-bytes", "3000")
    assert len("\n".join(body).encode()) < 3000
    assert sum(line.startswith("+++ ") for line in body) == 1
    assert body.count("```diff") == body.count("```") == 1
    assert body[-1].startswith("1 of 2 diffs are left out")


def test_a_diff_with_a_fence_in_it_is_fenced_with_more(
    world: World, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(release / "vllm/engine.py", '"""One step.', '"""One step.\n\n```\nstep()\n```\n')
    body = issue(world, release, capsys)
    assert "````diff" in body
    assert body[-1] == "````"


def test_an_issue_without_the_recorded_source_says_that_there_are_no_diffs(
    world: World, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(release / "vllm_gaudi/runner.py", "assert rows", "assert rows is not None")
    shutil.rmtree(world.site / "vllm_gaudi")
    missing = {"missing": {"vllm_gaudi": "commit 111 cannot be had"}}
    (world.site / "sources.json").write_text(json.dumps(missing))
    body = "\n".join(issue(world, release, capsys))
    assert "The recorded source of vllm_gaudi is not at hand, so no diff can be shown" in body
    assert "commit 111 cannot be had" in body
    assert "read the diff" not in body
    assert "```" not in body


# A new fix ----------------------------------------------------------------------------------------


def started(
    world: World,
    fix_id: str = "zeta-two",
    *sites: str,
    profiles: Sequence[str] = ("v1.0.0", "v2.0.0"),
    opt_in: bool = False,
) -> list[Path]:
    """Start a fix (of `pad` in both profiles) as `new` does, but do not record it."""
    starts = [Start.of(word) for word in sites or ("vllm_gaudi/runner.py::pad",)]
    tree = Tree(world.site)
    starts = [one.on(tree.text(one.file, one.definition) or "") for one in starts]
    made = new_fix(Pack(world.pack), fix_id, profiles, starts, opt_in=opt_in)
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(made)


def test_a_new_fix_is_a_module_a_test_and_a_line_in_each_profile(world: World) -> None:
    names = [path.relative_to(world.pack).as_posix() for path in started(world)]
    assert names == [
        "fixes/zeta_two.py",
        "tests/fixes/test_zeta_two.py",
        "profiles/v1.0.0.toml",
        "profiles/v2.0.0.toml",
    ]
    loaded = Pack(world.pack).fix("zeta-two")
    assert [site.label for site in loaded.sites] == ["vllm_gaudi/runner.py::pad"]
    assert loaded.doc.startswith("zeta-two:")


@pytest.mark.parametrize("opt_in", [False, True])
def test_a_new_fix_stands_last_in_the_profile(world: World, opt_in: bool) -> None:
    started(world, opt_in=opt_in)
    entry = Pack(world.pack).profile("v2.0.0").entries[-1]
    assert (entry.id, entry.opt_in) == ("zeta-two", opt_in)


def test_a_new_fix_can_be_recorded_and_applied(world: World) -> None:
    started(world)
    (world.pack / "profiles" / "v1.0.0.lock").write_text(recorded(world).dump())
    assert world.run().last == "applied=4 unchanged=0 files=2 profile=v1.0.0"
    text = (world.site / "vllm_gaudi/runner.py").read_text()
    assert "def pad(rows, size, fill):\n    # fix: zeta-two\n    pass\n" in text


def test_the_test_of_a_new_fix_fails_until_it_is_written(world: World) -> None:
    _, test, *_ = started(world)
    names: dict[str, object] = {}
    exec(compile(ast.parse(test.read_text()), str(test), "exec"), names)
    function = names["test_the_defect"]
    assert callable(function)
    marks = {mark.name: mark.args for mark in vars(function)["pytestmark"]}
    assert marks["needs"] == ("torch",), "importing vllm needs it"
    with pytest.raises(pytest.fail.Exception, match="write me"):
        function()


def test_a_planned_fix_that_is_started_is_planned_no_more(world: World) -> None:
    written = started(world, "epsilon")
    pack = Pack(world.pack)
    assert pack.unwritten == frozenset()
    assert [entry.id for entry in pack.profile("v1.0.0").entries].count("epsilon") == 1
    assert world.pack / "profiles" / "unwritten.toml" in written


@pytest.mark.parametrize(
    "text",
    [
        'fixes = ["epsilon", "omega"]\n',
        'fixes = ["omega", "epsilon"]\n',
        'fixes = [\n    "omega",\n    "epsilon",\n]\n',
        'fixes = [\n    "epsilon",  # why\n    "omega",\n]\n',
    ],
)
def test_other_planned_fixes_stay_planned(world: World, text: str) -> None:
    (world.pack / "profiles" / "unwritten.toml").write_text(text)
    started(world, "epsilon")
    assert Pack(world.pack).unwritten == {"omega"}


@pytest.mark.parametrize("fix_id", ["Zeta", "zeta_two", "", "-zeta", "zeta-", "../zeta", "ze\n"])
def test_a_name_that_is_no_id_is_refused(world: World, fix_id: str) -> None:
    with pytest.raises(UsageError, match="no fix id"):
        started(world, fix_id)


def test_a_fix_that_exists_is_refused_and_left_alone(world: World) -> None:
    before = (world.pack / "fixes" / "alpha.py").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        started(world, "alpha")
    assert (world.pack / "fixes" / "alpha.py").read_bytes() == before


def test_a_profile_that_does_not_exist_is_refused_before_anything_is_written(world: World) -> None:
    with pytest.raises(UsageError, match="there is no profile"):
        started(world, "zeta", profiles=["v9.0.0"])
    assert not (world.pack / "fixes" / "zeta.py").exists()


ODD = """
def plain(x): return x + 1


class Sub(Exception): pass


table = {
    "long": [1, 2, 3],
}
kind: int
rows = [one for one in "ab"]
"""


@pytest.mark.parametrize(
    "definition",
    [
        "Engine.__init__",
        "Engine",
        "Engine.last",
        "double",
        "LIMIT",
        "Engine.size",
        "plain",
        "Sub",
        "table",
        "kind",
        "rows",
    ],
)
def test_any_definition_can_be_started_with(world: World, definition: str) -> None:
    path = world.site / "vllm" / "engine.py"
    path.write_text(path.read_text() + ODD)
    started(world, "zeta", f"vllm/engine.py::{definition}", profiles=["v1.0.0"], opt_in=True)
    (site,) = Pack(world.pack).fix("zeta").sites
    text = Tree(world.site).text("vllm/engine.py", definition)
    assert text is not None
    assert "# fix: zeta" in rewrite(text, site.label, [("zeta", site.rewrite)])
    assert "write me" in (world.pack / "fixes" / "zeta.py").read_text()
    if definition != "Engine":  # alpha rewrites a method of it
        recorded(world)


def test_a_long_table_is_started_with_in_no_time(world: World) -> None:
    """One expression after the other would be tried, had it to be there once by trial alone."""
    path = world.site / "vllm" / "engine.py"
    rows = "".join(f'    "k{n}": lambda: get("k{n}", {n}),\n' for n in range(2000))
    path.write_text(path.read_text() + f"\n\ntable = {{\n{rows}}}\n")
    started(world, "zeta", "vllm/engine.py::table")
    text = (world.pack / "fixes" / "zeta.py").read_text()
    assert """code.replace_expression('lambda: get("k0", 0)', "TODO")""" in text


def test_what_no_edit_can_take_hold_of_says_so(world: World) -> None:
    path = world.site / "vllm" / "engine.py"
    path.write_text(path.read_text() + "\n\ndef nothing(): ...\n")
    with pytest.raises(UsageError, match=r"engine\.py::nothing: there is neither a body of lines"):
        started(world, "zeta", "vllm/engine.py::nothing")


def test_a_fix_of_several_sites_has_a_function_for_each(world: World) -> None:
    sites = ("vllm/engine.py::Engine.last", "vllm_gaudi/runner.py::pad", "vllm/engine.py::Engine")
    started(world, "zeta", *sites[:2])
    assert [site.label for site in Pack(world.pack).fix("zeta").sites] == list(sites[:2])
    started(world, "eta", "vllm/engine.py::Engine.__init__", "vllm/engine.py::Engine.last")
    text = (world.pack / "fixes" / "eta.py").read_text()
    assert "def init(code" in text
    assert "def last(code" in text


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("vllm/engine.py", "give FILE::DEFINITION"),
        ("vllm/../vllm/engine.py::double", "a path that leaves the package folders"),
        ("./vllm/engine.py::double", "a path that leaves the package folders"),
        ("/vllm/engine.py::double", "a path that leaves the package folders"),
        ("engine.py::double", "a path that leaves the package folders"),
        ("vllm/engine::double", "vllm/engine is no Python file"),
        ("other/engine.py::double", "in none of the packages of v1.0.0: vllm, vllm_gaudi"),
        ("vllm/other.py::double", "vllm/other.py::double: there is no such file"),
        ("vllm/engine.py/x.py::double", "x.py::double: there is no such file"),
        ("vllm/engine.py::doubel", "no such definition in the file; the file has double"),
    ],
)
def test_a_site_that_cannot_be_is_refused(
    world: World, site: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["new", "zeta", "--profile", "v1.0.0", "--from", str(world.site), "--site", site]
    assert cli.main(str(world.pack), words) in (2, 3)
    assert message in capsys.readouterr().err
    assert not (world.pack / "fixes" / "zeta.py").exists()


def test_new_takes_several_sites(world: World) -> None:
    words = ["new", "zeta", "--profile", "v1.0.0", "--from", str(world.site)]
    words += ["--site", "vllm/engine.py::LIMIT", "--site", "vllm_gaudi/runner.py::pad"]
    assert cli.main(str(world.pack), words) == 0
    locked = load_lock(world.pack / "profiles" / "v1.0.0.lock").sites["zeta"]
    assert [site.definition for site in locked] == ["LIMIT", "pad"]


def test_two_releases_do_not_come_from_one_folder(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["new", "zeta", "--from", str(world.site), "--site", "vllm/engine.py::LIMIT"]
    words += ["--profile", "v1.0.0", "--profile", "v2.0.0"]
    assert cli.main(str(world.pack), words) == 2
    assert "v1.0.0 and v2.0.0 are 2: leave --from out, or start" in capsys.readouterr().err
    assert cli.main(str(world.pack), ["record", "--from", str(world.site)]) == 2
    assert f"`record v2.0.0 --from {world.site}`" in capsys.readouterr().err


def test_a_name_too_long_for_a_file_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="has 300 letters: a fix id has 80 at most"):
        started(world, "z" * 300)


def test_an_interrupted_command_leaves_nothing_and_no_traceback(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_args: object) -> Lock:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "record", interrupted)
    words = ["new", "zeta", "--profile", "v1.0.0", "--from", str(world.site)]
    assert cli.main(str(world.pack), [*words, "--site", "vllm/engine.py::LIMIT"]) == 130
    assert capsys.readouterr().err == "gaudi-fix-pack: interrupted\n"
    assert not (world.pack / "fixes" / "zeta.py").exists()


def test_the_small_world_is_what_these_tests_think_it_is() -> None:
    assert "limit = LIMIT" in ENGINE
    assert "def pad(rows, size, fill):" in RUNNER


def test_a_site_that_is_not_there_leaves_nothing_half_made(world: World) -> None:
    def files() -> dict[Path, bytes]:
        return {
            p: p.read_bytes() for p in world.pack.rglob("*") if p.suffix != ".pyc" and p.is_file()
        }

    before = files()
    words = ["new", "zeta", "--profile", "v1.0.0", "--site", "vllm/engine.py::Nope.x"]
    assert cli.main(str(world.pack), [*words, "--from", str(world.site)]) == 3
    assert files() == before


def test_packages_with_fixes_applied_are_no_release(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.run().code == 0
    applied = str(world.site)
    assert cli.main(str(world.pack), ["record", "v1.0.0", "--from", applied]) == 2
    assert cli.main(str(world.pack), ["port", "--profile", "v1.0.0", "--to", applied]) == 2
    said = capsys.readouterr().err
    assert said.count(f"{applied} has fixes applied: give pristine packages") == 2


def test_port_takes_the_newest_profile_that_has_the_fix(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    site, other = str(world.site), str(world.site.with_name("other"))
    words = ["port", "alpha", "--from", other, "--to", site]
    assert cli.main(str(world.pack), words) == 3
    assert "alpha: changed: vllm/engine.py::Engine.step" in capsys.readouterr().out
    words = ["port", "alpha", "--profile", "v1.0.0", "--from", site, "--to", site]
    assert cli.main(str(world.pack), words) == 0
    assert cli.main(str(world.pack), ["port", "nope", "--to", other]) == 2
    assert "no profile has all of these as written fixes: nope" in capsys.readouterr().err
