"""What a fix module declares: its metadata and its sites."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from fixes.applier.errors import UsageError
from fixes.applier.profiles import check_path

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
        stripped = sys.flags.optimize > 1  # python -OO: no module has a docstring
        if not isinstance(fix, Fix) or not sites or not (module.__doc__ or stripped):
            raise UsageError(
                f"{module.__file__}: a fix needs a docstring, FIX = Fix(...) and at least one @site"
            )
        loaded = cls(
            fix_id, fix, sites, module.__doc__ or "", os.path.dirname(module.__file__ or "")
        )
        for fault in loaded._faults():
            raise UsageError(f"{module.__file__}: {fault}")
        return loaded

    def _faults(self) -> Iterator[str]:
        """What is wrong with it, as far as it shows without the packages."""
        fix = self.fix
        for name in ("summary", "symptom", "drop_when"):
            if not _is_line(getattr(fix, name)):
                yield f"Fix.{name} must be one line of text"
        for name in ("references", "relies_on"):
            if not isinstance(getattr(fix, name), tuple):
                yield f"Fix.{name} must be a tuple"
        for label in fix.relies_on:
            if not isinstance(label, str) or label.count("::") != 1:
                yield f"Fix.relies_on has {label!r}; a definition is named file::qualified.name"
        if not isinstance(fix.environment, Mapping) or not isinstance(fix.support, Mapping):
            yield "Fix.environment and Fix.support must be dictionaries"
        for path, beside in fix.support.items():
            try:
                check_path(path)
            except ValueError as error:
                yield f"Fix.support: {error}"
            if not path.endswith(".py"):
                yield f"Fix.support has {path!r}; what a fix adds are Python modules, named .py"
            if not os.path.isfile(os.path.join(self.folder, beside)):
                yield f"Fix.support has {beside!r}, and there is no such file beside the fix"
        known = [(site.label, site.shape) for site in self.sites]
        for label, shape in known:
            if known.count((label, shape)) > 1:
                yield f"two codemods for {label}; do all of it in one, or name two shapes"


def _is_line(text: object) -> bool:
    return isinstance(text, str) and bool(text.strip()) and "\n" not in text
