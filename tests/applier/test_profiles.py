"""Profiles and locks: what is refused, and that the message names the place."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixes.applier import fast, profiles
from fixes.applier.errors import UsageError
from fixes.applier.pack import Pack
from fixes.applier.profiles import LockedSite, load_lock, load_profile
from tests.applier.world import World

VALID = """\
release = "v1.0.0"
summary = "a release"  # comment

[packages.vllm]
distribution = "vllm"
version = "1.0.0"
commit = "1111111"

[packages.vllm_gaudi]
distribution = "vllm-gaudi"
version = "1.0.0"
commit = "2222222"

[[fix]]
id = "one"

[[fix]]
id = "two"
opt-in = true
requires = ["one"]
after = [
    "one",
]

[[fix]]
id = "three"
conflicts = ["two"]
"""


def line_of(text: str, part: str) -> int:
    """The number of the line, counted from 1, that holds a mark."""
    return text[: text.index(part)].count("\n") + 1


def refused(path: Path, text: str) -> tuple[int, str]:
    """The line and the message with which a profile of this text is refused."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_profile(path)
    match = re.fullmatch(rf"{re.escape(str(path))}:(\d+): (.*)", str(caught.value))
    assert match, caught.value
    return int(match[1]), match[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the profile under test stands."""
    return tmp_path / "v1.0.0.toml"


def test_a_valid_profile_is_read(path: Path) -> None:
    path.write_text(VALID)
    profile = load_profile(path)
    assert [entry.id for entry in profile.entries] == ["one", "two", "three"]
    two = profile.entry("two")
    assert two is not None
    assert (two.opt_in, two.requires, two.after) == (True, ("one",), ("one",))
    assert profile.packages["vllm_gaudi"].distribution == "vllm-gaudi"


# What is replaced by what, a mark on the line that the message must name, and what it says.
WRONG = {
    "unknown key at the top": ("summary =", "sumary =", "sumary", "unknown key 'sumary'"),
    "unknown table": ("[packages.vllm]", "[pakages.vllm]", "[pakages", "unknown key 'pakages'"),
    "unknown key of a package": (
        'version = "1.0.0"\ncommit = "2',
        'verzion = "1.0.0"\ncommit = "2',
        "verzion",
        "unknown key 'verzion'",
    ),
    "unknown key of a fix": (
        "conflicts =",
        "conflict =",
        "conflict =",
        "unknown key 'conflict'",
    ),
    "unknown key that begins like a known one": (
        "opt-in = true",
        "opt-in = true\nopt = true",
        "opt = true",
        "unknown key 'opt'",
    ),
    "unknown key of a later fix": ('id = "three"', 'id = "three"\nx = 1', "x = 1", "unknown key"),
    "text instead of yes or no": (
        "opt-in = true",
        'opt-in = "yes"',
        "opt-in",
        "'opt-in' must be true or false",
    ),
    "text instead of a list": (
        'requires = ["one"]',
        'requires = "one"',
        "requires",
        "'requires' must be a list",
    ),
    "number instead of text": ('id = "two"', "id = 2", "id = 2", "'id' must be a string"),
    "number in a list": ('["two"]', "[2]", "conflicts", "'conflicts' must hold strings"),
    "number instead of a commit": (
        '"2222222"',
        "2222222",
        "commit = 2222222",
        "'commit' must be a string",
    ),
    "table instead of text": ('summary = "a release"', "summary = {}", "summary", "a string"),
    "the same fix twice": ('id = "three"', 'id = "one"', 'id = "one"\nconf', "'one' is listed tw"),
    "a name twice in a list": ('["two"]', '["two", "two"]', "conflicts", "something twice"),
    "unknown requirement": ('["one"]', '["nine"]', "requires", "two requires 'nine', which"),
    "unknown conflict": ('["two"]', '["nine"]', "conflicts", "three conflicts 'nine', which"),
    "unknown predecessor": ('    "one",', '    "nine",', "after = [", "two after 'nine', which"),
    "a requirement listed below": (
        '["one"]',
        '["three"]',
        "requires",
        "two requires three, so three must be listed above it",
    ),
    "a predecessor listed below": (
        '    "one",',
        '    "three",',
        "after = [",
        "two after three, so three must be listed above it",
    ),
    "a requirement of itself": ('["one"]', '["two"]', "requires", "two requires itself"),
    "a conflict with itself": ('["two"]', '["three"]', "conflicts", "three conflicts itself"),
    "a cycle": (
        'id = "one"\n',
        'id = "one"\nrequires = ["two"]\n',
        'requires = ["two"]',
        "one and two each come after the other: a cycle",
    ),
    "an id with underscores": ('"three"', '"thr_ee"', '"thr_ee"', "'thr_ee' is no fix id"),
    "an id with capitals": ('"three"', '"Three"', '"Three"', "'Three' is no fix id"),
    "an id that is a path": ('"three"', '"../three"', '"../three"', "is no fix id"),
    "an id that ends with a line": ('"three"', '"three\\n"', '"three\\n"', "is no fix id"),
    "no id": ('id = "three"\n', "", "[[fix]]\nconflicts", "'id' is missing"),
    "no commit": ('commit = "2222222"\n', "", "[packages.vllm_gaudi]", "'commit' is missing"),
    "no release": ('release = "v1.0.0"\n', "", "summary", "'release' is missing"),
    "another release": (
        'release = "v1.0.0"',
        'release = "v1.0.1"',
        "release",
        "release 'v1.0.1' in a file named v1.0.0.toml",
    ),
    "a package that is none": (
        "[packages.vllm_gaudi]",
        "[packages.vllm-gaudi]",
        "[packages.vllm-gaudi]",
        "'vllm-gaudi' is no name of a Python package",
    ),
    "a fix written inline": (
        '[[fix]]\nid = "one"\n\n[[fix]]',
        '[[ fix ]]\nid = "one"\n\n[[fix]]',
        "[[ fix ]]",
        "write every such table as [[fix]] on a line of its own",
    ),
    "a package written inline": (
        '[packages.vllm]\ndistribution = "vllm"\nversion = "1.0.0"\ncommit = "1111111"',
        '[packages]\nvllm = {distribution = "vllm", version = "1.0.0", commit = "1111111"}',
        "[packages]",
        "write every such table as [packages.vllm]",
    ),
}


@pytest.mark.parametrize(("old", "new", "mark", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_profile_is_refused_at_its_line(
    path: Path, old: str, new: str, mark: str, message: str
) -> None:
    assert old in VALID
    text = VALID.replace(old, new, 1)
    line, said = refused(path, text)
    assert message in said
    assert line == line_of(text, mark)


def test_a_longer_cycle_is_refused(path: Path) -> None:
    text = VALID.replace('id = "one"', 'id = "one"\nafter = ["three"]').replace(
        'conflicts = ["two"]', 'requires = ["two"]'
    )
    line, said = refused(path, text)
    assert "must be listed above" in said
    assert line == line_of(text, 'after = ["three"]')


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("release", 1),
        ('release = "v1.0.0"\nsummary = a release\n', 2),
        ('release = "v1.0.0"\nrelease = "v1.0.0"\n', 2),
        (VALID[: VALID.index('id = "three"')], line_of(VALID, '[[fix]]\nid = "three"')),
        (VALID[: VALID.index('",\n]')], 22),  # half-written: in the middle of a word
        (VALID[: VALID.index("[[fix]]")], 1),  # half-written: no fixes yet
        ("", 1),
        ("release = " + "[" * 50_000, 1),
    ],
)
def test_what_is_no_profile_is_refused_at_its_line(path: Path, text: str, line: int) -> None:
    assert refused(path, text)[0] == line


@pytest.mark.parametrize("cut", range(0, len(VALID), 7))
def test_a_half_written_profile_is_never_an_internal_error(path: Path, cut: int) -> None:
    path.write_text(VALID[:cut])
    message, found = "", 0
    try:
        found = len(load_profile(path).entries)
    except UsageError as error:
        message = str(error)
    assert message.startswith(f"{path}:") or found == VALID[:cut].count("[[fix]]")


def test_lines_are_counted_like_an_editor_does(path: Path) -> None:
    text = VALID.replace("comment", "\u2028 \x85 \u2029").replace('"three"', '"Three"')
    assert refused(path, text)[0] == line_of(text, '"Three"')


def test_a_profile_in_another_encoding_is_refused(path: Path) -> None:
    path.write_bytes(VALID.replace("a release", "\u00e4").encode("latin-1"))
    with pytest.raises(UsageError, match="cannot be read"):
        load_profile(path)


def test_a_profile_without_packages_is_refused(path: Path) -> None:
    text = 'release = "v1.0.0"\nfix = []\n[packages]\n'
    assert refused(path, text) == (3, "'packages' names no package")


def test_a_profile_error_is_exit_2_and_changes_nothing(world: World) -> None:
    profile = world.pack / "profiles" / "v1.0.0.toml"
    text = profile.read_text().replace('after = ["alpha"]', 'after = ["gamma"]')
    profile.write_text(text)
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert ran.code == 2
    assert f"{profile}:{line_of(text, 'after')}: beta after gamma" in ran.err
    assert world.snapshot(times=True, state=True) == before


def test_unwritten_fixes_stand_in_a_file_of_the_same_strictness(world: World) -> None:
    unwritten = world.pack / "profiles" / "unwritten.toml"
    unwritten.write_text('fixes = ["epsilon"]\nother = 1\n')
    ran = world.run()
    assert ran.code == 2
    assert f"{unwritten}:2: unknown key 'other'" in ran.err


def test_the_pack_s_own_profiles_are_valid() -> None:
    pack = Pack(Path(profiles.__file__).parents[2])
    assert pack.profile_names == ["v0.26.0", "v0.30.0"]
    for name in pack.profile_names:
        ids = {entry.id for entry in pack.profile(name).entries}
        assert ids
        assert set(pack.profile(name).packages) == {"vllm", "vllm_gaudi"}


# Locks --------------------------------------------------------------------------------------------

SITE: dict[str, Any] = {
    "file": "vllm/engine.py",
    "definition": "Engine.step",
    "sha256": "a" * 64,
    "newlines": "lf",
    "commit": "1111111",
    "evidence": "the sdist",
}


def lock_text(**changes: object) -> str:
    """A lock with one site, some fields of it replaced."""
    site = {key: value for key, value in {**SITE, **changes}.items() if value is not None}
    return json.dumps({"schema": 1, "profile": "v1.0.0", "fixes": {"one": [site]}})


def test_a_lock_is_read_with_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "v1.0.0.lock"
    path.write_text(lock_text())
    assert load_lock(path).sites == {"one": (LockedSite(**SITE, shape="", rewritten=True),)}


def test_the_fast_path_knows_the_defaults_of_a_lock() -> None:
    read = LockedSite(**SITE)
    assert {key: getattr(read, key) for key in fast._UNSAID} == fast._UNSAID


@pytest.mark.parametrize("extra", [{}, {"shape": "inline"}, {"rewritten": False}])
def test_a_lock_reads_back_as_it_was_dumped(tmp_path: Path, extra: dict[str, Any]) -> None:
    lock = profiles.Lock("v1.0.0", {"one": (LockedSite(**SITE, **extra),), "two": ()})
    path = tmp_path / "v1.0.0.lock"
    path.write_text(lock.dump())
    assert load_lock(path) == lock


WRONG_LOCKS: dict[str, str | Callable[[], str]] = {
    "empty": "",
    "no JSON": "{",
    "half-written": lock_text()[:-20],
    "a list": "[]",
    "a deep list": "[" * 100_000,
    "another schema": lock_text().replace('"schema": 1', '"schema": 2'),
    "another profile": lock_text().replace("v1.0.0", "v2.0.0"),
    "no fixes": '{"schema": 1, "profile": "v1.0.0"}',
    "fixes in a list": '{"schema": 1, "profile": "v1.0.0", "fixes": []}',
    "a site that is text": '{"schema": 1, "profile": "v1.0.0", "fixes": {"one": ["x"]}}',
    "a file outside": lock_text(file="../vllm/engine.py"),
    "a file outside, later": lock_text(file="vllm/../../engine.py"),
    "a file that stays, in a roundabout way": lock_text(file="vllm/./engine.py"),
    "an absolute file": lock_text(file="/vllm/engine.py"),
    "a file with a drive": lock_text(file="c:/engine.py"),
    "a file with backslashes": lock_text(file="vllm\\..\\engine.py"),
    "a file with a null": lock_text(file="vllm/engine.py\0"),
    "a file without a package": lock_text(file="engine.py"),
    "a folder": lock_text(file="vllm/"),
    "an empty file": lock_text(file=""),
    "a short hash": lock_text(sha256="a" * 63),
    "a hash in capitals": lock_text(sha256="A" * 64),
    "a hash and a line": lock_text(sha256="a" * 64 + "\n"),
    "a hash that is a number": lock_text(sha256=1),
    "an extra field": lock_text(mode="0644"),
    "a missing field": lock_text(commit=None),
    "a number for a definition": lock_text(definition=1),
    "a text for rewritten": lock_text(rewritten="yes"),
}


@pytest.mark.parametrize("text", WRONG_LOCKS.values(), ids=WRONG_LOCKS)
def test_a_wrong_lock_is_refused_and_says_who_writes_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "v1.0.0.lock"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"not a usable lock.*dev\.py record") as caught:
        load_lock(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_bytes_that_are_no_text_are_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "v1.0.0.lock"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a usable lock"):
        load_lock(path)


@pytest.mark.parametrize("text", [None, "", "{}", lock_text(file="../x/y.py")])
def test_a_lock_error_is_exit_2_and_changes_nothing(world: World, text: str | None) -> None:
    lock = world.pack / "profiles" / "v1.0.0.lock"
    if text is None:
        lock.unlink()
    else:
        lock.write_text(text)
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert (ran.code, ran.out) == (2, "")
    assert str(lock) in ran.err
    assert world.snapshot(times=True, state=True) == before


@pytest.mark.parametrize("change", ["drop the fix", "drop a site", "rename a site", "relies on"])
def test_a_lock_that_tells_another_story_than_the_fix_is_exit_2(world: World, change: str) -> None:
    path = world.pack / "profiles" / "v1.0.0.lock"
    document = json.loads(path.read_text())
    if change == "drop the fix":
        del document["fixes"]["beta"]
    elif change == "drop a site":
        del document["fixes"]["beta"][0]
    elif change == "rename a site":
        document["fixes"]["beta"][0]["definition"] = "Engine.last"
    else:
        document["fixes"]["alpha"] = document["fixes"]["alpha"][:1]
    path.write_text(json.dumps(document))
    ran = world.run()
    assert ran.code == 2
    assert "record the lock again" in ran.err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 reads TOML with tomli, if it is there")
def test_profiles_need_no_library(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr("fixes.applier.provision.require", lambda name: pytest.fail(name))
    path.write_text(VALID)
    assert load_profile(path).name == "v1.0.0"
