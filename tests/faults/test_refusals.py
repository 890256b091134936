"""Code that is not the recorded one: every site of every fix on every release is refused.

All sites of a file are changed at once where they do not overlap, because every mismatch is
reported on its own; one of each kind goes through the command.
"""

from __future__ import annotations

import ast
import random
import re
import shutil
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping
from io import StringIO

import pytest

from fixes.applier.definitions import Source, Span, fingerprint
from fixes.applier.plan import Mismatch, Mismatches, make_plan
from fixes.applier.profiles import LockedSite
from tests.faults.conftest import tally
from tests.faults.images import Image
from tests.support import absence

# How a definition can be another one --------------------------------------------------------------


def indent_of(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def on_its_own(text: str) -> str:
    """A definition as a file that parses: an indented one below an `if`."""
    return f"if 1:\n{text}" if indent_of(text) else text


def parses(text: str) -> bool:
    try:
        ast.parse(on_its_own(text))
    except SyntaxError:
        return False
    return True


def one_byte(text: str, name: str) -> str | None:
    """One letter of a name or a comment somewhere inside."""
    lines = text.splitlines(keepends=True)
    above = len(on_its_own(text).splitlines()) - len(lines)
    words = [
        token
        for token in tokenize.generate_tokens(StringIO(on_its_own(text)).readline)
        if token.type in (tokenize.NAME, tokenize.COMMENT)
        and token.string[-1].isalpha()
        and token.start[0] > above
    ]
    random.Random(text).shuffle(words)
    for word in words:
        row, at = word.end[0] - above - 1, word.end[1] - 1
        line = lines[row]
        new = line[:at] + line[at].swapcase() + line[at + 1 :]
        changed = "".join([*lines[:row], new, *lines[row + 1 :]])
        if new != line and parses(changed):
            return changed
    return None


def renamed(text: str, name: str) -> str | None:
    last = name.rpartition(".")[2]
    return re.sub(
        rf"(?m)^(\s*(?:async def |def |class )?){re.escape(last)}\b", rf"\1{last}_", text, count=1
    )


def twice(text: str, name: str) -> str | None:
    end = "" if text.endswith("\n") else "\n"
    return f"{text}{end}{text}"


def decorated(text: str, name: str) -> str | None:
    if not re.match(r"\s*(@|async def|def|class)", text):
        return None  # an assignment has no decorators
    return f"{indent_of(text)}@staticmethod\n{text}"


def moved(text: str, name: str) -> str | None:
    """Gone from its place; `mutated` puts it in a class at the end of the file."""
    return f"{indent_of(text)}pass\n"


KINDS: Mapping[str, tuple[Callable[[str, str], str | None], str]] = {
    "one byte changed": (one_byte, "its code is not the code this fix was written for"),
    "renamed": (renamed, "there is no such definition in the file"),
    "moved to another class": (moved, "there is no such definition in the file"),
    "defined twice": (twice, "the file defines it 2 times"),
    "decorated": (decorated, "its code is not the code this fix was written for"),
}


def mutated(source: Source, sites: Mapping[str, Span], kind: str) -> tuple[bytes, list[str]]:
    """The file with these definitions changed, and the names of those that could be."""
    texts = {}
    tail = ""
    for name, span in sites.items():
        old = source.text(span)
        new = KINDS[kind][0](old, name)
        if new is None:
            assert kind == "decorated", f"{name} was not changed"
            continue
        assert new != old
        texts[span] = new
        if kind == "moved to another class":
            body = old if indent_of(old) else textwrap.indent(old, "    ")
            tail += f"\n\nclass Elsewhere{span.start}:\n{body}"
    done = [name for name, span in sites.items() if span in texts]
    return source.replaced(texts) + tail.encode(source.encoding), done


# What is refused ----------------------------------------------------------------------------------


def layers(spans: Mapping[str, Span]) -> Iterator[dict[str, Span]]:
    """The definitions in groups that do not overlap."""
    left = dict(spans)
    while left:
        layer: dict[str, Span] = {}
        for name, span in left.items():
            if all(span.stop <= s.start or s.stop <= span.start for s in layer.values()):
                layer[name] = span
        yield layer
        left = {name: span for name, span in left.items() if name not in layer}


def spans_of(image: Image, path: str) -> tuple[Source, dict[str, Span]]:
    """The definitions of a file that any fix rewrites or relies on."""
    source = Source(path, image.read(path) or b"")
    names = [s.definition for e in image.entries for s in image.sites(e.id) if s.file == path]
    return source, {
        name: source.definitions[name][0] for name in names if name in source.definitions
    }


def refused(image: Image, path: str, data: bytes | None) -> dict[tuple[str, str], Mismatch]:
    """The mismatches of all fixes that look at the file, by fix and definition."""
    fixes = [e.id for e in image.entries if any(s.file == path for s in image.sites(e.id))]
    with pytest.raises(Mismatches) as raised:
        make_plan(
            [image.fix(fix) for fix in fixes],
            image.lock,
            lambda name: data if name == path else image.read(name),
        )
    assert raised.value.exit_code == 3
    return {(found.fix, found.definition): found for found in raised.value.found}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_site_that_is_another(image: Image, kind: str) -> None:
    wrong = []
    count = 0
    for path in image.files:
        source, spans = spans_of(image, path)
        for layer in layers(spans):
            data, done = mutated(source, layer, kind)
            if not done:
                continue
            found = refused(image, path, data)
            for entry in image.entries:
                for site in image.sites(entry.id):
                    if site.file != path or site.definition not in done:
                        continue
                    count += 1
                    mismatch = found.get((entry.id, site.definition))
                    where = f"{entry.id}, {site.label}"
                    if mismatch is None:
                        wrong.append(f"{where}: accepted")
                    elif not mismatch.reason.startswith(KINDS[kind][1]):
                        wrong.append(f"{where}: {mismatch}")
                    elif f"{entry.id}: {site.label}: " not in str(mismatch):
                        wrong.append(f"{where} is not named: {mismatch}")
    tally(f"sites refused: {kind}", count, wrong)


def test_a_site_that_upstream_has_repaired_the_same_way(image: Image) -> None:
    wrong = []
    count = 0
    for entry in image.entries:
        for file in image.planned(image.closed([entry.id])):
            if file.pristine is None:
                continue
            lines = file.rewritten.splitlines(keepends=True)
            data = b"".join(line for line in lines if not line.strip().startswith(b"# fix: "))
            found = refused(image, file.path, data)
            for site in image.sites(entry.id):
                if site.file == file.path and site.rewritten:
                    count += 1
                    if (entry.id, site.definition) not in found:
                        wrong.append(f"{entry.id}, {site.label}: accepted")
    tally("sites refused: repaired by upstream", count, wrong)


@pytest.mark.parametrize("content", [None, b"def broken(:\n", b"\xff\xfe\x00", b""])
def test_a_file_that_is_gone_or_no_python(image: Image, content: bytes | None) -> None:
    wrong = []
    count = 0
    for path in image.files:
        found = refused(image, path, content)
        for entry in image.entries:
            for site in image.sites(entry.id):
                if site.file == path:
                    count += 1
                    if (entry.id, site.definition) not in found:
                        wrong.append(f"{entry.id}, {site.label}: accepted")
    tally("sites refused: no such file, or no Python", count, wrong)


def test_no_release_is_left_out(images: dict[str, Image]) -> None:
    """What cannot be tried here is said."""
    reasons = [
        f"{release}: {', '.join(image.left_out)} ({'; '.join(image.missing.values())})"
        for release, image in images.items()
        if image.left_out
    ]
    if reasons:
        absence.skip("; ".join(reasons), *(r for r, image in images.items() if image.left_out))
    assert all(image.entries for image in images.values())


# Through the command ------------------------------------------------------------------------------

WHAT_TO_DO = "leave the fix out with --without"


def is_refused(image: Image, *more: str) -> str:
    """The message of a run that ends with exit code 3 and has written nothing."""
    before = image.snapshot(times=True, state=True)
    ran = image.run(*image.only, *more, profile=image.release)
    assert ran.code == 3, ran.out + ran.err
    assert "applied" not in ran.out + ran.err
    assert image.snapshot(times=True, state=True) == before
    return ran.err


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_command_names_site_fix_and_what_to_do(image: Image, kind: str) -> None:
    chance = random.Random(kind)
    entry = chance.choice([e for e in image.entries if not e.opt_in])
    site = chance.choice([s for s in image.sites(entry.id) if s.rewritten])
    source, spans = spans_of(image, site.file)
    data, done = mutated(source, {site.definition: spans[site.definition]}, kind)
    if not done:
        pytest.skip(f"{site.label} is an assignment")
    image.lay_out()
    (image.site / site.file).write_bytes(data)
    said = is_refused(image)
    assert f"{entry.id}: {site.file}::{site.definition}: {KINDS[kind][1]}" in said
    assert WHAT_TO_DO in said


def test_packages_swapped_between_releases(images: dict[str, Image]) -> None:
    """Refused unless every site in it is the same in both releases, and then the run says so."""
    names = list(images)
    count = 0
    for release, other in zip(names, names[::-1], strict=True):
        image = images[release]
        for package in image.profile.packages:
            if package in image.missing or package in images[other].missing:
                continue
            image.lay_out()
            images[other].lay_out()
            shutil.rmtree(image.site / package)
            shutil.copytree(images[other].site / package, image.site / package)
            differs = [site for site in sites_in(image, package) if not fits(image, site)]
            for metadata in ("as it is", "0.0.0"):
                if metadata == "0.0.0":
                    unreadable(image)
                count += 1
                if differs:
                    said = is_refused(image)
                    assert all(f"{site.file}::{site.definition}: " in said for site in differs)
                    assert WHAT_TO_DO in said or "are those of --profile" in said
                else:
                    ran = image.run(*image.only, "--dry-run", profile=release)
                    assert ran.code == 0, ran.err
                    assert "different only outside of the definitions" in ran.err
    if not count:
        pytest.skip("fewer than two releases of one package are at hand")
    tally("packages swapped between releases", count, [])


def sites_in(image: Image, package: str) -> list[LockedSite]:
    """The sites of all default fixes in a package."""
    return [
        site
        for entry in image.entries
        if not entry.opt_in
        for site in image.sites(entry.id)
        if site.file.startswith(f"{package}/")
    ]


def fits(image: Image, site: LockedSite) -> bool:
    """Is the definition on disk any of those that the lock has for it?"""
    full = image.site / site.file
    source = Source(site.file, full.read_bytes() if full.exists() else b"")
    found = [fingerprint(source.text(span)) for span in source.definitions.get(site.definition, [])]
    known = {
        s.sha256 for sites in image.lock.sites.values() for s in sites if s.label == site.label
    }
    return len(found) == 1 and found[0] in known


def unreadable(image: Image) -> None:
    """Installed from a checkout without tags: both packages call themselves 0.0.0."""
    for info in list(image.site.glob("*.dist-info")):
        name = info.name.split("-")[0]
        shutil.rmtree(info)
        info = image.site / f"{name}-0.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.0\n")


def test_versions_that_cannot_be_read_leave_it_to_the_fingerprints(image: Image) -> None:
    image.lay_out()
    unreadable(image)
    ran = image.run(*image.only, "--dry-run", profile=image.release)
    assert ran.code == 0, ran.err


def test_a_package_that_is_missing(image: Image) -> None:
    if image.missing:
        pytest.skip("a package of this release is not at hand, so none can be taken away")
    for package in image.profile.packages:
        image.lay_out()
        shutil.rmtree(image.site / package)
        said = is_refused(image)
        assert f"{package} is not installed in {image.site}" in said
        assert "--package" in said


def test_what_is_changed_outside_of_every_site_is_accepted_and_said(image: Image) -> None:
    image.lay_out()
    for path in image.files:
        full = image.site / path
        data = full.read_bytes()
        full.write_bytes(data + b"\n\n# a line at the end\nANOTHER = 1\n")
    ran = image.run(*image.only, "--dry-run", profile=image.release)
    assert ran.code == 0, ran.err
    rewritten = {
        site.file
        for entry in image.entries
        if not entry.opt_in
        for site in image.sites(entry.id)
        if site.rewritten and site.file in image.lock.files
    }
    said = {
        line.partition(": not the file of")[0].rpartition(" ")[2]
        for line in ran.err.splitlines()
        if "different only outside of the definitions" in line
    }
    assert rewritten <= {path.removeprefix(f"{image.site}/") for path in said}
    assert rewritten
