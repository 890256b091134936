#!/usr/bin/env python3
"""The same program as ``fixes/apply_all.py``, for people who stand in the repository root."""

import os
import runpy

runpy.run_path(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixes", "apply_all.py"),
    run_name="__main__",
)
