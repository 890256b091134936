"""A pytest plugin: prints what the two-sided plugin makes of the tests of fixes, one JSON list."""

from __future__ import annotations

import json

import pytest

from tests.support.trees import STOCK
from tests.support.twosided import TwoSidedItem


def pytest_collection_finish(session: pytest.Session) -> None:
    """Each test of a fix on each release, and whether it is red there with any parameters."""
    found: dict[tuple[str, ...], bool] = {}
    for item in session.items:
        if isinstance(item, TwoSidedItem) and item.group.state == STOCK:
            name = item.name.partition("[")[0]
            key = (item.fix, item.path.name, name, item.level, item.group.release)
            found[key] = found.get(key, False) or item.red is not None
    print("COLLECTED " + json.dumps(sorted((*key, red) for key, red in found.items())))
