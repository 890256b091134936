"""The real packages of a release, as far as the pack looks at them, with every fix there is."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from fixes.applier.fix import LoadedFix
from fixes.applier.pack import Pack
from fixes.applier.plan import PlannedFile, make_plan
from fixes.applier.profiles import Entry, LockedSite
from tests.applier.world import World
from tests.support.trees import Trees

ROOT = Path(__file__).resolve().parents[2]
PACK = Pack(ROOT)


class Image(World):
    """A small copy of a release's packages, ours to write into, and the real pack."""

    def __init__(self, trees: Trees, release: str, folder: Path) -> None:
        stock = trees.stock(release)
        self.release = release
        self.tree = stock.path
        self.missing = stock.missing
        self.pack = ROOT
        self.site = folder / release
        self.profile = PACK.profile(release)
        self.lock = PACK.lock(release)
        self._known: dict[str, bytes | None] = {}

    @cached_property
    def entries(self) -> list[Entry]:
        """The written fixes of the release all of whose files are at hand, in the pack's order."""
        return [
            entry
            for entry in self.profile.entries
            if entry.id not in PACK.unwritten
            and all(
                site.file.split("/")[0] not in self.missing for site in self.lock.sites[entry.id]
            )
        ]

    @cached_property
    def left_out(self) -> list[str]:
        """Written fixes that cannot be tried, because a package of the release is not at hand."""
        at_hand = [entry.id for entry in self.entries]
        written = [e.id for e in self.profile.entries if e.id not in PACK.unwritten]
        return [fix for fix in written if fix not in at_hand]

    @property
    def only(self) -> list[str]:
        """Words that limit a run to the packages that are at hand."""
        names = [name for name in self.profile.packages if name not in self.missing]
        return [word for name in names if self.missing for word in ("--package", name)]

    def fix(self, fix_id: str) -> LoadedFix:
        """A fix."""
        return PACK.fix(fix_id)

    def closed(self, wanted: Iterable[str]) -> list[str]:
        """The fixes with all that they require, less what conflicts, in the pack's order."""
        chosen: set[str] = set()
        for fix in wanted:
            with_it = {fix}
            for entry in reversed(self.profile.entries):
                if entry.id in with_it:
                    with_it |= set(entry.requires)
            both = chosen | with_it
            if not any(set(e.conflicts) & both for e in self.entries if e.id in both):
                chosen = both
        return [entry.id for entry in self.entries if entry.id in chosen]

    def sites(self, fix_id: str) -> list[LockedSite]:
        """What the lock says of a fix: of alternative shapes, the one that this release has."""
        return list(self.lock.sites[fix_id])

    @cached_property
    def files(self) -> list[str]:
        """The files that any fix looks at."""
        return sorted({site.file for e in self.entries for site in self.sites(e.id)})

    def read(self, path: str) -> bytes | None:
        """A file of the release."""
        if path not in self._known:
            full = self.tree / path
            self._known[path] = full.read_bytes() if full.is_file() else None
        return self._known[path]

    def planned(self, fix_ids: Sequence[str]) -> list[PlannedFile]:
        """What becomes of the files, from the release's own."""
        return make_plan([self.fix(fix_id) for fix_id in fix_ids], self.lock, self.read)

    def lay_out(self) -> None:
        """The packages again, with what the pack looks at and nothing else."""
        shutil.rmtree(self.site, ignore_errors=True)
        names = [
            f"{name}/__init__.py" for name in self.profile.packages if name not in self.missing
        ]
        for path in {*self.files, *names}:
            full = self.site / path
            full.parent.mkdir(parents=True, exist_ok=True)
            full.write_bytes(self.read(path) or b"")
        for info in self.tree.glob("*.dist-info"):
            shutil.copytree(info, self.site / info.name)
