"""Try what is to be locked: can every set of fixes that a user may ask for be applied?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fixes.applier.definitions import fingerprint
from fixes.applier.edits import Definition, rewrite
from fixes.applier.errors import SiteMismatch, UsageError
from fixes.applier.fix import LoadedFix
from fixes.applier.plan import make_plan
from fixes.applier.profiles import Lock, Profile
from fixes.applier.selection import select
from fixes.authoring.trees import Tree

_Codemods = dict[str, Callable[[Definition], None]]  # by fix, in the profile's order


def check_selections(profile: Profile, unwritten: frozenset[str]) -> None:
    """Refuse a profile that cannot run: its default fixes, and each opt-in one with its needs."""
    optional = {entry.id for entry in profile.entries if entry.opt_in}
    names: list[list[str]] = [[]]
    for fix_id in sorted(optional - unwritten):
        names.append([one for one in needed_by(profile, fix_id) if one in optional])
    for named in names:
        try:
            select(profile, named, (), unwritten, {})
        except UsageError as error:
            what = f"with {' and '.join(named)}" if named else "with its default fixes"
            raise UsageError(f"{profile.name} {what} cannot run: {error}") from None


def needed_by(profile: Profile, fix_id: str) -> list[str]:
    """A fix and all that it requires, in the profile's order."""
    found = {fix_id}
    for entry in reversed(profile.entries):  # what an entry requires stands above it
        if entry.id in found:
            found.update(entry.requires)
    return [entry.id for entry in profile.entries if entry.id in found]


def try_sets(profile: Profile, fixes: Sequence[LoadedFix], lock: Lock, tree: Tree) -> None:
    """Rewrite what the tree has with each fix and its needs alone, and with all of them.

    A fix of which a file is not at hand is left out of the latter.
    """
    for label, codemods in _by_definition(fixes, lock).items():
        text = tree.text(*label.split("::"))
        for fix_id in codemods if text is not None else ():
            _try_alone(profile, fix_id, text or "", label, codemods)
    seen = [
        fix for fix in fixes if all(tree.read(site.file) is not None for site in lock.sites[fix.id])
    ]
    make_plan(_together(profile, seen), lock, tree.read, read_back=True)


def untried(lock: Lock, tree: Tree) -> str:
    """What of a lock the tree could not show, in a line; empty where there is no such thing."""
    left: dict[str, int] = {}
    for fix_id, sites in lock.sites.items():
        for site in sites:
            text = tree.text(site.file, site.definition)
            if text is None or fingerprint(text) != site.sha256:
                left[fix_id] = left.get(fix_id, 0) + 1
    if not left:
        return ""
    return (
        f"{sum(left.values())} locked definitions of {', '.join(left)} are not in the packages at"
        " hand: they were not tried, and their codemods are untested here"
    )


def _by_definition(fixes: Sequence[LoadedFix], lock: Lock) -> dict[str, _Codemods]:
    found: dict[str, _Codemods] = {}
    for fix in fixes:
        locked = {(site.label, site.shape) for site in lock.sites[fix.id] if site.rewritten}
        for site in fix.sites:
            if (site.label, site.shape) in locked:
                found.setdefault(site.label, {})[fix.id] = site.rewrite
    return found


def _try_alone(profile: Profile, fix_id: str, text: str, label: str, codemods: _Codemods) -> None:
    def attempt(more: Sequence[str]) -> None:
        wanted = {other for one in (fix_id, *more) for other in needed_by(profile, one)}
        chosen = [(one, rewrites) for one, rewrites in codemods.items() if one in wanted]
        rewrite(text, label, chosen, read_back=True)

    try:
        attempt(())
    except SiteMismatch:
        others = list(codemods)[: list(codemods).index(fix_id)]
        for more in [*([other] for other in others), others]:
            try:
                attempt(more)
            except SiteMismatch:
                continue
            names = " and ".join(more)
            raise UsageError(
                f"{fix_id}: {label}: the codemod works only after {names}: say in"
                f" {profile.name}.toml that it requires {names}, or edit what {names} leaves alone"
            ) from None
        raise


def _together(profile: Profile, fixes: Sequence[LoadedFix]) -> list[LoadedFix]:
    """As many fixes as go together: the later one of two that conflict is left out."""
    chosen: list[LoadedFix] = []
    for fix in fixes:
        needed = needed_by(profile, fix.id)[:-1]
        others = [other.id for other in chosen]
        if set(needed) <= set(others) and not any(
            _conflict(profile, fix.id, other) for other in others
        ):
            chosen.append(fix)
    return chosen


def _conflict(profile: Profile, one: str, other: str) -> bool:
    entries = (profile.entry(one), profile.entry(other))
    return any({one, other} & set(entry.conflicts) for entry in entries if entry)
