"""A folder of pristine packages: to record a lock from, or to compare with."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from fixes.applier.definitions import Source
from fixes.applier.errors import ImageMismatch, UsageError
from fixes.applier.plan import _found, _Sources
from fixes.applier.profiles import LockedSite
from fixes.authoring.sources import read_summary


class Tree:
    """A folder of pristine packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sources: dict[str, Source | None] = {}

    def read(self, path: str) -> bytes | None:
        """A file's bytes, or None where the tree has no such file."""
        try:
            return (self.folder / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def has(self, path: str) -> bool:
        """Is the package of this path in the tree at all?"""
        return (self.folder / path.split("/")[0]).is_dir()

    def source(self, path: str) -> Source | None:
        """A file, parsed once."""
        if path not in self._sources:
            data = self.read(path)
            self._sources[path] = None if data is None else Source(path, data)
        return self._sources[path]

    def text(self, path: str, definition: str) -> str | None:
        """The text of a definition that the file has exactly once."""
        source = self.source(path)
        spans = source.definitions.get(definition, []) if source else []
        return source.text(spans[0]) if source and len(spans) == 1 else None

    def why_no_text(self, path: str, definition: str) -> str:
        """Why :meth:`text` has none, in the words of the applier."""
        if not self.has(path):
            return f"{self.folder} has no package {path.split('/')[0]}"
        wanted = LockedSite(path, definition, "", "", "", "")
        reason = _found(wanted, _Sources(self.read))[2]
        source = self.source(path)
        if source and definition in source.definitions:
            reason += (
                "; one that a file has more than once cannot be addressed: take the class or the"
                " function around it, or another place"
            )
        return reason

    def need_packages(self, names: Sequence[str], release: str) -> None:
        """Refuse a folder that is not one of these packages.

        One that ``sources`` could not bring may be missing; its sites are then known by what the
        lock and the published fingerprints say of them.
        """
        lacking = [name for name in names if not self.has(name)]
        known = read_summary(self.folder).get("missing", {})
        if lacking == list(names) or not set(lacking) <= set(known):
            parent = self.folder.resolve().parent
            hint = (
                f"give the folder around it, {parent}"
                if self.folder.resolve().name in names
                else f"`python3 fixes/dev.py sources {release} --into DIR` makes one that has"
            )
            raise UsageError(f"{self.folder} has no package {' and no '.join(lacking)}: {hint}")

    def refuse_edited(self, path: str) -> None:
        """Refuse a file that is not what the installer of its package wrote down."""
        data = self.read(path)
        known = self._installed.get(path)
        if data is not None and known is not None and known != _record_digest(data):
            raise edited(path, self.folder, "its package was installed with another text")

    @cached_property
    def _installed(self) -> dict[str, str]:
        """The digests in the RECORD files of the packages."""
        found: dict[str, str] = {}
        for record in sorted(self.folder.glob("*.dist-info/RECORD")):
            with record.open(encoding="utf-8", newline="") as file:
                rows = (row for row in csv.reader(file) if len(row) == 3)
                found.update((path, digest) for path, digest, _size in rows if digest)
        return found


def edited(path: str, folder: Path, why: str) -> ImageMismatch:
    """The error of a tree that is not what its evidence says."""
    return ImageMismatch(f"{path}: edited in {folder} ({why}): lay the sources out anew")


def _record_digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
