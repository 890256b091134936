"""Puts the emulated device into this process and its children."""

import importlib
import os
import sys
from pathlib import Path

SITE = Path(__file__).with_name("site")


def install() -> None:
    """Make ``habana_frameworks`` importable and ``hpu`` a device, here and in every child process.

    With SITE on PYTHONPATH from the start (as the two-sided harness has it) torch loads the
    device by itself; this is for processes that were started without.
    """
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
        inherited = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (inherited, str(SITE))))
    importlib.import_module("habana_frameworks.torch")
