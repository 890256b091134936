"""What a fix module declares: its metadata and its sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from fixes.applier.errors import UsageError

if TYPE_CHECKING:
    from fixes.applier.edits import Definition

Rewrite = Callable[["Definition"], None]


@dataclass(frozen=True)
class Fix:
    """Metadata of one repair. The id is the module's name with dashes for underscores.

    ``relies_on`` names definitions as ``file::qualified.name`` that the fix needs as they are but
    does not rewrite; they are fingerprinted like sites. ``support`` maps the path of a new module
    in a target package to the file beside the fix that it is a copy of.
    """

    summary: str
    symptom: str
    references: tuple[str, ...]
    drop_when: str
    environment: Mapping[str, str] = field(default_factory=dict)
    relies_on: tuple[str, ...] = ()
    support: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """One definition that a fix rewrites, with the codemod that does it.

    ``file`` is relative to the folder that holds the package (``vllm/tokenizers/x.py``). Sites of a
    fix that name a ``shape`` are alternatives: the lock says which shape a release has.
    """

    file: str
    definition: str
    rewrite: Rewrite
    shape: str = ""

    @property
    def label(self) -> str:
        """``file::definition``, as in messages and locks."""
        return f"{self.file}::{self.definition}"


def site(file: str, definition: str, *, shape: str = "") -> Callable[[Rewrite], Site]:
    """Make a codemod function the :class:`Site` it rewrites."""
    return lambda rewrite: Site(file, definition, rewrite, shape)


@dataclass(frozen=True)
class LoadedFix:
    """A fix module that has been imported and looked over."""

    id: str
    fix: Fix
    sites: tuple[Site, ...]
    doc: str
    folder: str

    @classmethod
    def of(cls, fix_id: str, module: ModuleType) -> LoadedFix:
        """Read a fix from its module; :class:`UsageError` when it is not a whole one."""
        fix = getattr(module, "FIX", None)
        sites = tuple(value for value in vars(module).values() if isinstance(value, Site))
        if not isinstance(fix, Fix) or not sites or not module.__doc__:
            raise UsageError(
                f"{module.__file__}: a fix needs a docstring, FIX = Fix(...) and at least one @site"
            )
        if not all(path.endswith(".py") for path in fix.support):
            raise UsageError(f"{module.__file__}: what a fix adds are Python modules, named .py")
        folder = (module.__file__ or "").rpartition("/")[0]
        return cls(fix_id, fix, sites, module.__doc__, folder)
