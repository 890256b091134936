"""Which interpreter runs a test that needs torch, or the whole engine."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

HEAVY = frozenset({"torch", "engine"})
ADVICE = "run `bash .ci/run` once, or name one in GAUDI_FIX_PACK_ENGINE_PYTHON"


class NoInterpreter(Exception):
    """No interpreter at hand has what a test needs."""


def interpreter(needs: frozenset[str], release: str, cache: Path) -> str:
    """The interpreter for tests with these needs on this release."""
    if not needs & HEAVY:
        return sys.executable
    for python in _candidates(release, cache):
        if absent := _absent(python):
            raise NoInterpreter(f"{python} has no {' and no '.join(absent)}")
        return python
    if importlib.util.find_spec("torch"):
        return sys.executable
    raise NoInterpreter(f"no interpreter with torch: {ADVICE}")


def engine_venv(release: str, cache: Path) -> Path:
    """Where the heavy environment of a release is made."""
    return cache / f"engine-venv-{release}"


def _candidates(release: str, cache: Path) -> list[str]:
    own = "GAUDI_FIX_PACK_ENGINE_PYTHON"
    named = [os.environ.get(f"{own}_{re.sub(r'[^A-Z0-9]', '_', release.upper())}")]
    named.append(os.environ.get(own))
    folders = [engine_venv(release, cache), cache / "engine-venv"]
    found = [str(folder / "bin" / "python") for folder in folders]
    return [path for path in named if path] + [path for path in found if Path(path).exists()]


@lru_cache
def _absent(python: str) -> tuple[str, ...]:
    """Which of the two modules that every child process needs an interpreter lacks."""
    code = (
        "import importlib.util as u; print(*(n for n in ('torch', 'pytest') if not u.find_spec(n)))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoInterpreter(f"{python} cannot be started: {error}") from None
    return tuple(done.stdout.split()) if done.returncode == 0 else ("working interpreter",)
