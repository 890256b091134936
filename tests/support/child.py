"""The pytest plugin of a child process: which packages it tests, and a report for the parent.

The parent (``twosided.py``) says in one variable what this process is for.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "GAUDI_FIX_PACK_CHILD"
PACKAGES = ("vllm", "vllm_gaudi")


class Absent:
    """Skips whatever imports a package that this machine has no copy of."""

    def __init__(self, reasons: dict[str, str]) -> None:
        self.reasons = reasons

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Nothing to add to the search for any other module."""
        if name in self.reasons:
            pytest.skip(self.reasons[name], allow_module_level=True)
        return None


class Reporter:
    """Writes a line of JSON as each test starts and ends, so that a crash can be placed."""

    def __init__(self, side: dict[str, Any]) -> None:
        self.tree = Path(side["tree"])
        self.absences = set(side["missing"].values())
        self.file = open(side["report"], "w", encoding="utf-8")  # noqa: SIM115
        self.result: dict[str, Any] = {}

    def write(self, **fields: Any) -> None:
        """One line."""
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.result = {"outcome": "passed", "duration": 0.0}
        self.write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended: the first that did not pass decides."""
        result = self.result
        result["duration"] += report.duration
        if result["outcome"] != "passed" or (report.passed and not hasattr(report, "wasxfail")):
            return
        if hasattr(report, "wasxfail"):
            result.update(outcome="failed", text="", longrepr="xfail: use red, or no mark")
        elif report.skipped:
            reason = _skip_reason(report.longrepr)
            result.update(outcome="skipped", reason=reason, excused=reason in self.absences)
        else:
            result.update(
                outcome="failed",
                phase=report.when,
                text=_messages(report.longrepr),
                longrepr="\n".join([f"({report.when})", report.longreprtext]),
                output="\n".join(f"--- {name} ---\n{text}" for name, text in report.sections),
            )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self.write(finished=nodeid, packages=self.packages(), **self.result)

    def pytest_sessionfinish(self) -> None:
        """The report is whole."""
        self.write(complete=True)

    def packages(self) -> dict[str, str]:
        """The target packages imported so far: "" for one from the tree, else where it is from."""
        found = {}
        for name in PACKAGES:
            file = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(file, str):
                found[name] = "" if self.tree in Path(file).parents else file
        return found


def _messages(longrepr: Any) -> str:
    """The messages of the exception and of its causes, without the source lines around them."""
    chain: Sequence[Any] = getattr(longrepr, "chain", ())
    crashes = [crash for _, crash, _ in chain] or [getattr(longrepr, "reprcrash", None)]
    messages = [crash.message for crash in crashes if crash] or [str(longrepr)]
    # pytest leaves out the type of a failed assert statement.
    return "\n".join(re.sub(r"^assert ", "AssertionError: assert ", each) for each in messages)


def _skip_reason(longrepr: Any) -> str:
    text = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
    return text.removeprefix("Skipped: ")


def side() -> dict[str, Any]:
    """What this child process is for."""
    return dict(json.loads(os.environ[VARIABLE]))


def die_with(parent: int) -> None:
    """End this process group when the parent is gone, even if that was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def pytest_configure(config: pytest.Config) -> None:
    """Take the report in hand."""
    threading.Thread(target=die_with, args=(side()["parent"],), daemon=True).start()
    config.pluginmanager.register(Reporter(side()))
    if missing := side()["missing"]:
        sys.meta_path.insert(0, Absent(missing))


@pytest.fixture(scope="session")
def tree() -> Path:
    """The site-packages folder under test."""
    return Path(side()["tree"])


@pytest.fixture(scope="session")
def release() -> str:
    """The release under test."""
    return str(side()["release"])


@pytest.fixture(scope="session")
def state() -> str:
    """``stock`` or ``fixed``."""
    return str(side()["state"])
