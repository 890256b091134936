"""What is not at hand: tests that need it are skipped, but not those of releases that must run.

``GAUDI_FIX_PACK_MUST_RUN`` names releases. Where it does, a skip of one of their tests is a
failure, so that a machine of CI that cannot reach an index is not green for ever.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NoReturn

import pytest

VARIABLE = "GAUDI_FIX_PACK_MUST_RUN"


def must_run() -> frozenset[str]:
    """The releases whose tests must not be skipped."""
    return frozenset(os.environ.get(VARIABLE, "").replace(",", " ").split())


def check(releases: Iterable[str]) -> None:
    """A release that there is none of would be skipped in silence."""
    if unknown := must_run() - set(releases):
        known = ", ".join(releases)
        raise pytest.UsageError(f"{VARIABLE}: no release {', '.join(unknown)}; releases: {known}")


def refusal(reason: str, *releases: str) -> str:
    """Why a test of these releases must not be skipped; empty where it may be."""
    named = " and ".join(sorted(must_run() & set(releases)))
    return f"{named} must run here ({VARIABLE}), and could not: {reason}" if named else ""


def skip(reason: str, *releases: str) -> NoReturn:
    """Skip a test for want of what these releases need, or fail where they must run."""
    if message := refusal(reason, *releases):
        pytest.fail(message, pytrace=False)
    pytest.skip(reason)
