"""Which interpreter runs a test that needs torch, or the whole engine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

HEAVY = frozenset({"torch", "engine"})
ADVICE = "run `bash .ci/run` once, or name one in GAUDI_FIX_PACK_ENGINE_PYTHON"


class NoInterpreter(Exception):
    """No interpreter at hand has what a test needs."""


def interpreter(needs: frozenset[str], cache: Path) -> str:
    """The interpreter for tests with these needs."""
    if not needs & HEAVY:
        return sys.executable
    if reason := os.environ.get("GAUDI_FIX_PACK_NO_ENGINE"):
        raise NoInterpreter(reason)
    # The stamp is there when the environment is complete.
    made = cache / "engine-venv"
    found = made / "bin" / "python" if (made / "requirements.sha256").exists() else None
    if python := os.environ.get("GAUDI_FIX_PACK_ENGINE_PYTHON") or found:
        if absent := _absent(str(python)):
            raise NoInterpreter(f"{python} has no {' and no '.join(absent)}")
        return str(python)
    if importlib.util.find_spec("torch"):
        return sys.executable
    raise NoInterpreter(f"no interpreter with torch: {ADVICE}")


@lru_cache
def _absent(python: str) -> tuple[str, ...]:
    """Which of the two modules that every child process needs an interpreter lacks."""
    code = "from importlib.util import find_spec as f; print(*(n for n in NAMES if not f(n)))"
    code = code.replace("NAMES", "('torch', 'pytest')")
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoInterpreter(f"{python} cannot be started: {error}") from None
    return tuple(done.stdout.split()) if done.returncode == 0 else ("working interpreter",)
