"""A pytest plugin: prints what the two-sided plugin makes of the tests of fixes, one JSON list."""

from __future__ import annotations

import json

import pytest

from tests.support.trees import STOCK
from tests.support.twosided import TwoSidedItem


def pytest_collection_finish(session: pytest.Session) -> None:
    """Each test of a fix on each release, and whether it is red there."""
    found = {
        (
            item.fix,
            item.path.name,
            item.name.partition("[")[0],
            item.level,
            item.group.release,
            item.red is not None,
        )
        for item in session.items
        if isinstance(item, TwoSidedItem) and item.group.state == STOCK
    }
    print("COLLECTED " + json.dumps(sorted(found)))
