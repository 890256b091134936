#!/usr/bin/env python3
"""Tools for authors of fixes: ``python3 fixes/dev.py sources|record|check|port|new|docs``."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The interpreter put this folder first on the path; its modules are imported from the one above.
sys.path[:] = [
    ROOT,
    *(p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(__file__)),
]

from fixes.authoring.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(ROOT))
