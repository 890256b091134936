#!/usr/bin/env python3
"""Repair the installed packages: ``python3 fixes/apply_all.py --profile v0.30.0 [FIX ...]``."""

import gc
import os
import sys

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
