"""Profiles (what a release gets, in which order) and locks (the fingerprints a profile accepts).

A profile is written by hand, so its errors name file and line. A lock is written by
``dev.py record`` alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fixes.applier.errors import UsageError
from fixes.applier.provision import load_toml

LOCK_SCHEMA = 1

_FIX_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
_PACKAGE = re.compile(r"[a-z_][a-z0-9_]*\Z")


@dataclass(frozen=True)
class PackagePin:
    """The package of a release as the image has it, and where its source can be had."""

    name: str
    distribution: str
    version: str
    commit: str
    sdist_sha256: str = ""
    repository: str = ""
    branch: str = ""


@dataclass(frozen=True)
class Entry:
    """One fix in a profile."""

    id: str
    opt_in: bool = False
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """A release's packages and its fixes in the pack's order."""

    name: str
    summary: str
    packages: Mapping[str, PackagePin]
    entries: tuple[Entry, ...]

    def entry(self, fix_id: str) -> Entry | None:
        """The entry of a fix, if the profile has it."""
        return next((entry for entry in self.entries if entry.id == fix_id), None)


@dataclass(frozen=True)
class LockedSite:
    """A definition as a fix was written for: where it is, what it looked like, who says so."""

    file: str
    definition: str
    sha256: str
    newlines: str
    commit: str
    evidence: str
    shape: str = ""
    rewritten: bool = True

    @property
    def label(self) -> str:
        """``file::definition``."""
        return f"{self.file}::{self.definition}"


@dataclass(frozen=True)
class Lock:
    """All locked sites of a profile, by fix.

    ``files`` has the SHA-256 of the whole files around them, where it is known: what is different
    outside of every site is accepted, and said.
    """

    profile: str
    sites: Mapping[str, tuple[LockedSite, ...]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> str:
        """The lock as it stands in its file: stable, one site after the other."""
        fixes = {
            fix_id: [
                {key: value for key, value in asdict(site).items() if value not in ("", True)}
                for site in sites
            ]
            for fix_id, sites in self.sites.items()
        }
        document = {
            "schema": LOCK_SCHEMA,
            "profile": self.profile,
            "fixes": fixes,
            "files": dict(sorted(self.files.items())),
        }
        return json.dumps(document, indent=1) + "\n"


class _TomlFile:
    """A TOML document whose schema errors name the line: the parser keeps no line numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from None
        self.document = load_toml(self.text, str(path))

    def error(self, message: str, *search: str, nth: int = 0) -> UsageError:
        """An error at the line found by following the regular expressions downwards.

        The first one is looked for ``nth`` more times; the line is where the last one matched.
        """
        lines = self.text.split("\n")
        at = -1
        for number, pattern in enumerate(search):
            hits = [i for i in range(at + 1, len(lines)) if re.match(pattern, lines[i])]
            skip = nth if number == 0 else 0
            if len(hits) <= skip:
                break
            at = hits[skip]
        return UsageError(f"{self.path}:{max(at, 0) + 1}: {message}")

    def need_headers(self, header: str, count: int, *search: str) -> None:
        """Insist on one way to write tables: errors and the fast path go by these lines."""
        found = sum(line.split("#")[0].strip() == header for line in self.text.split("\n"))
        if found != count:
            raise self.error(f"write every such table as {header} on a line of its own", *search)

    def check_keys(
        self,
        table: object,
        allowed: Mapping[str, type],
        required: set[str],
        *search: str,
        nth: int = 0,
    ) -> dict[str, Any]:
        """The table, when it has exactly the keys and types it may have."""
        if not isinstance(table, dict):
            raise self.error("expected a table here", *search, nth=nth)
        for key, value in table.items():
            line = rf"\s*\[*\"?([\w.-]+\.)?{re.escape(key)}(?![\w-])"
            if key not in allowed:
                known = ", ".join(sorted(allowed))
                raise self.error(
                    f"unknown key {key!r}; known here: {known}", *search, line, nth=nth
                )
            if not isinstance(value, allowed[key]):
                kind = {str: "a string", bool: "true or false", list: "a list", dict: "a table"}
                raise self.error(f"{key!r} must be {kind[allowed[key]]}", *search, line, nth=nth)
            if isinstance(value, list) and key != "fix":
                if not all(isinstance(item, str) for item in value):
                    raise self.error(f"{key!r} must hold strings", *search, line, nth=nth)
                if len(set(value)) != len(value):
                    raise self.error(f"{key!r} names something twice", *search, line, nth=nth)
        for key in sorted(required - set(table)):
            raise self.error(f"{key!r} is missing", *search, nth=nth)
        return table


def load_profile(path: Path) -> Profile:
    """Read and check a profile. Every error is a :class:`UsageError` with file and line."""
    toml = _TomlFile(path)
    top = toml.check_keys(
        toml.document,
        {"release": str, "summary": str, "packages": dict, "fix": list},
        {"release", "packages", "fix"},
    )
    name = path.name.removesuffix(".toml")
    if top["release"] != name:
        raise toml.error(f"release {top['release']!r} in a file named {path.name}", r"release\b")
    if not top["packages"]:
        raise toml.error("'packages' names no package", r"\s*\[?packages\b")
    toml.need_headers("[[fix]]", len(top["fix"]), r"\s*(fix\b|\[\[\s*.?fix)")
    for key in top["packages"]:
        toml.need_headers(f"[packages.{key}]", 1, r"\s*(\[\s*)?packages\b")
    packages = {key: _pin(toml, key, table) for key, table in top["packages"].items()}
    entries = tuple(_entry(toml, number, table) for number, table in enumerate(top["fix"]))
    _check_order(toml, entries)
    return Profile(name, top.get("summary", ""), packages, entries)


def _pin(toml: _TomlFile, name: str, table: object) -> PackagePin:
    header = rf"\[packages\.{re.escape(name)}\]"
    keys = {"distribution", "version", "commit", "sdist-sha256", "repository", "branch"}
    found = toml.check_keys(
        table, dict.fromkeys(keys, str), {"distribution", "version", "commit"}, header
    )
    if not _PACKAGE.match(name):
        raise toml.error(f"{name!r} is no name of a Python package", header)
    return PackagePin(name, **{key.replace("-", "_"): value for key, value in found.items()})


def _entry(toml: _TomlFile, number: int, table: object) -> Entry:
    header = r"\s*\[\[fix\]\]"
    found = toml.check_keys(
        table,
        {"id": str, "opt-in": bool, "requires": list, "conflicts": list, "after": list},
        {"id"},
        header,
        nth=number,
    )
    if not _FIX_ID.match(found["id"]):
        raise toml.error(f"{found['id']!r} is no fix id", header, r"\s*id\b", nth=number)
    return Entry(
        found["id"],
        found.get("opt-in", False),
        *(tuple(found.get(key, ())) for key in ("requires", "conflicts", "after")),
    )


def _check_order(toml: _TomlFile, entries: tuple[Entry, ...]) -> None:
    """No fix twice, and whatever an entry names stands above it (so there is no cycle)."""
    ids = [entry.id for entry in entries]
    for number, entry in enumerate(entries):
        here = (r"\s*\[\[fix\]\]",)
        if entry.id in ids[:number]:
            raise toml.error(f"{entry.id!r} is listed twice", *here, r"\s*id\b", nth=number)
        for key in ("requires", "after", "conflicts"):
            line = (*here, rf"\s*{key}\b")
            for other in getattr(entry, key):
                if other not in ids:
                    raise toml.error(
                        f"{entry.id} {key} {other!r}, which this profile does not list",
                        *line,
                        nth=number,
                    )
                if other == entry.id:
                    raise toml.error(f"{entry.id} {key} itself", *line, nth=number)
                if key != "conflicts" and other not in ids[:number]:
                    both = entry.id in getattr(entries[ids.index(other)], key)
                    what = (
                        f"{entry.id} and {other} each come after the other: a cycle"
                        if both
                        else f"{entry.id} {key} {other}, so {other} must be listed above it"
                    )
                    raise toml.error(what, *line, nth=number)


def load_unwritten(path: Path) -> frozenset[str]:
    """The ids of fixes that profiles list but nobody has written yet."""
    toml = _TomlFile(path)
    return frozenset(toml.check_keys(toml.document, {"fixes": list}, {"fixes"})["fixes"])


def load_lock(path: Path) -> Lock:
    """Read a lock; :class:`UsageError` when it is not one that ``record`` wrote."""
    hint = "it is written by `python3 fixes/dev.py record`: restore it or record it again"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != LOCK_SCHEMA or document["profile"] != path.name[: -len(".lock")]:
            raise ValueError("another schema or profile")
        sites = {
            str(fix_id): tuple(_locked_site(entry) for entry in entries)
            for fix_id, entries in document["fixes"].items()
        }
        files = {str(path): _sha256(found) for path, found in document.get("files", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: not a usable lock ({error}); {hint}") from None
    return Lock(str(document["profile"]), sites, files)


def _locked_site(entry: dict[str, Any]) -> LockedSite:
    site = LockedSite(**entry)
    texts = (site.file, site.definition, site.newlines, site.commit, site.evidence, site.shape)
    if not all(isinstance(text, str) for text in texts) or not isinstance(site.rewritten, bool):
        raise ValueError("a field of the wrong type")
    _sha256(site.sha256)
    check_path(site.file)
    return site


def _sha256(found: object) -> str:
    if not isinstance(found, str) or not re.fullmatch(r"[0-9a-f]{64}", found):
        raise ValueError(f"no fingerprint: {found!r}")
    return found


def check_path(path: str) -> None:
    """Refuse a path that does not stay inside a package folder."""
    parts = path.split("/")
    if len(parts) < 2 or any(part in ("", ".", "..") for part in parts) or "\\" in path:
        raise ValueError(f"a path that leaves the package folders: {path!r}")
    if not _PACKAGE.match(parts[0]) or "\0" in path:
        raise ValueError(f"not a path inside a package: {path!r}")
