#!/usr/bin/env python3
"""Repair the installed packages: ``python3 fixes/apply_all.py --profile v0.30.0 [FIX ...]``."""

import gc
import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036  RHEL's own python3 is 3.9
    found = f"this is Python {sys.version.split()[0]} ({sys.executable})"
    advice = "run the pack with the interpreter that runs vllm, 3.10 or newer"
    sys.stderr.write(f"gaudi-fix-pack: error: {found}; {advice}\n")
    sys.exit(2)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The interpreter put this folder first on the path; its modules are imported from the one above.
sys.path[:] = [
    ROOT,
    *(p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(__file__)),
]

from fixes.applier.cli import main  # noqa: E402

if __name__ == "__main__":
    gc.disable()  # a run ends within seconds; looking for cycles takes a tenth of them
    sys.exit(main(ROOT))
