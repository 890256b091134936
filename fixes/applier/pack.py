"""The pack on disk: its fix modules, profiles and locks."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from fixes.applier.errors import UsageError
from fixes.applier.fix import LoadedFix
from fixes.applier.profiles import Lock, Profile, load_lock, load_profile, load_unwritten
from fixes.applier.selection import nearest

_NO_FIXES = {"applier", "apply-all", "authoring", "dev", "fixes"}


@dataclass(frozen=True)
class Pack:
    """A checkout of the pack. Tests make small ones of their own."""

    root: Path

    @cached_property
    def profile_names(self) -> list[str]:
        """The profiles there are, oldest release first."""
        found = [path.name.removesuffix(".toml") for path in self._profile_files]
        return sorted(found, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])

    @property
    def _profile_files(self) -> list[Path]:
        return sorted((self.root / "profiles").glob("v*.toml"))

    def profile(self, name: str) -> Profile:
        """A profile by name; :class:`UsageError` that lists them when there is none."""
        if name not in self.profile_names:
            known = ", ".join(self.profile_names)
            raise UsageError(
                f"there is no profile {name!r}{nearest(name, self.profile_names)};"
                f" profiles: {known}"
            )
        return load_profile(self.root / "profiles" / f"{name}.toml")

    def lock(self, name: str) -> Lock:
        """The lock of a profile."""
        return load_lock(self.root / "profiles" / f"{name}.lock")

    @cached_property
    def unwritten(self) -> frozenset[str]:
        """Fixes that are planned: the one place that says so is ``profiles/unwritten.toml``."""
        return load_unwritten(self.root / "profiles" / "unwritten.toml")

    def fix(self, fix_id: str) -> LoadedFix:
        """Import a fix's module. Raises :class:`UsageError` when it is missing or not whole."""
        name = fix_id.replace("-", "_")
        folder = self.root / "fixes"
        candidates = [folder / f"{name}.py", folder / name / "__init__.py"]
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            listed = [
                name for name in self.profile_names if self.profile(name).entry(fix_id) is not None
            ]
            where = f" (listed in {', '.join(f'{name}.toml' for name in listed)})" if listed else ""
            raise UsageError(
                f"{fix_id}{where}: there is no {candidates[0]}"
                + (nearest(fix_id, self._modules) or "; the pack's checkout is not complete")
            )
        return LoadedFix.of(fix_id, _imported(f"fixes.{name}", path))

    @property
    def _modules(self) -> list[str]:
        """The ids of what could be fixes, by the names of the files."""
        files = [*self.root.glob("fixes/*.py"), *self.root.glob("fixes/*/__init__.py")]
        names = (file.parent.name if file.stem == "__init__" else file.stem for file in files)
        return sorted({name.replace("_", "-") for name in names} - _NO_FIXES)

    def fixes(self, fix_ids: Sequence[str]) -> list[LoadedFix]:
        """Several fixes, in the order given."""
        return [self.fix(fix_id) for fix_id in fix_ids]


def _imported(name: str, path: Path) -> ModuleType:
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"{path}: {type(error).__name__}: {error}") from error
    return module
