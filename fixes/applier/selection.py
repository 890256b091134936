"""From the words on the command line to the list of fixes, in the profile's order."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fixes.applier.errors import UsageError
from fixes.applier.profiles import Entry, Profile


@dataclass(frozen=True)
class Selection:
    """The fixes of a run, in order, and the default ones that cannot be had yet."""

    profile: Profile
    chosen: tuple[str, ...]
    unwritten: tuple[str, ...]


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean a or b?`` for a misspelt word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def select(
    profile: Profile,
    named: Sequence[str],
    without: Sequence[str],
    unwritten: frozenset[str],
    profiles_of: Mapping[str, Sequence[str]],
) -> Selection:
    """The profile's default fixes and the named opt-in ones, less those left out.

    ``profiles_of`` says which profiles list a fix, for the message about one that this does not.
    Raises :class:`UsageError` for whatever cannot be satisfied, and says what would satisfy it.
    """
    ids = [entry.id for entry in profile.entries]
    for fix_id in (*named, *without):
        if fix_id not in ids:
            others = profiles_of.get(fix_id, ())
            hint = f"; it is in {', '.join(others)} only" if others else nearest(fix_id, ids)
            raise UsageError(f"profile {profile.name} has no fix {fix_id!r}{hint}")
    for fix_id in named:
        if fix_id in without:
            raise UsageError(f"{fix_id} is both named and left out with --without")
        if fix_id in unwritten:
            raise UsageError(
                f"{fix_id} is planned for {profile.name} but not written yet (--list shows which"
                " fixes are); leave it out, and with it the options of `vllm serve` that need it"
            )

    def wanted(entry: Entry) -> bool:
        return entry.id not in without and (not entry.opt_in or entry.id in named)

    for fix_id in without:
        entry = profile.entry(fix_id)
        if entry is not None and entry.opt_in:
            raise UsageError(f"--without {fix_id}: it is opt-in, so it is left out unless named")
    entries = [entry for entry in profile.entries if wanted(entry)]
    chosen = [entry.id for entry in entries if entry.id not in unwritten]
    for entry in entries:
        if entry.id not in unwritten:
            _check_needs(entry, chosen, without, unwritten)
    return Selection(
        profile, tuple(chosen), tuple(entry.id for entry in entries if entry.id in unwritten)
    )


def _check_needs(
    entry: Entry, chosen: Sequence[str], without: Sequence[str], unwritten: frozenset[str]
) -> None:
    for other in entry.requires:
        if other in unwritten:
            raise UsageError(f"{entry.id} requires {other}, which is not written yet")
        if other in without:
            raise UsageError(
                f"{entry.id} requires {other}, which --without leaves out; keep {other}"
                f" or leave out {entry.id} as well"
            )
        if other not in chosen:
            raise UsageError(f"{entry.id} requires {other}; name it as well: {entry.id} {other}")
    for other in entry.conflicts:
        if other in chosen:
            raise UsageError(f"{entry.id} conflicts with {other}; leave out one of them")
