"""What a fix must have beside its codemods: `check` says what is missing, and so do tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fixes.applier.pack import Pack
from fixes.authoring import proofs
from fixes.authoring.scaffold import PLACEHOLDER


def missing(pack: Pack, fix_id: str) -> Iterator[str]:
    """What a fix has not got yet, apart from tests that are red on its releases."""
    loaded = pack.fix(fix_id)
    if not loaded.doc.startswith(f"{fix_id}: "):
        yield f"its docstring does not begin with `{fix_id}: `"
    for words in ("Reference:", "Other places with the pattern"):
        if words not in loaded.doc:
            yield f"its docstring does not have `{words}`"
    changelog = pack.root / "CHANGELOG.md"
    if not changelog.is_file() or f"`{fix_id}`" not in changelog.read_text(encoding="utf-8"):
        yield f"CHANGELOG.md has no line about `{fix_id}`"
    test = pack.root / "tests" / "fixes" / f"test_{fix_id.replace('-', '_')}.py"
    if not test.is_file():
        yield f"there is no {test.relative_to(pack.root)}"
    for path in (*_modules(pack, fix_id), test):
        if path.is_file():
            yield from _placeholders(path.relative_to(pack.root), path.read_text(encoding="utf-8"))


def without_red_test(pack: Pack) -> list[tuple[str, str]]:
    """The fixes and releases that no test is red on when its stock packages run."""
    shown = {(proof.fix, release) for proof in proofs.collect(pack) for release in proof.red_on}
    listed = {
        (entry.id, name)
        for name in pack.profile_names
        for entry in pack.profile(name).entries
        if entry.id not in pack.unwritten
    }
    return sorted(listed - shown)


def _modules(pack: Pack, fix_id: str) -> list[Path]:
    stem = pack.root / "fixes" / fix_id.replace("-", "_")
    return sorted(stem.glob("*.py")) if stem.is_dir() else [stem.with_suffix(".py")]


def _placeholders(name: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := PLACEHOLDER.search(line):
            yield f"{name}:{number} still has `{found.group()}`"
