"""The Python interpreters at hand, for tests that must hold under each of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

VERSIONS = ("3.10", "3.11", "3.12", "3.13")


@cache
def find(version: str) -> str | None:
    """The executable of a Python version such as ``3.12``, where there is one that starts."""
    candidates = [str(p) for p in Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    on_path = shutil.which(f"python{version}")
    own = sys.executable if sys.version_info[:2] == tuple(map(int, version.split("."))) else None
    for candidate in [*sorted(candidates), on_path, own]:
        if candidate and _version_of(candidate) == version:
            return candidate
    return None


def _version_of(executable: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def need(version: str) -> str:
    """The executable of a Python version; the test is skipped where there is none."""
    found = find(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    return found
