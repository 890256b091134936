"""The pack's version and the digest of all that a result can depend on; light to import."""

from __future__ import annotations

import hashlib
import os

VERSION = "0.1.0"

# Beside the package's own modules; what a run without libcst and TOML has to know.
STATE_FOLDER = ".gaudi-fix-pack"


def digest(root: str) -> str:
    """SHA-256 over the code, profiles and locks below ``root``, the pack's checkout."""
    total = hashlib.sha256()
    for folder in ("fixes", "profiles"):
        for path, folders, names in os.walk(os.path.join(root, folder)):
            folders.sort()
            for name in sorted(names):
                if name.endswith((".py", ".toml", ".lock")):
                    full = os.path.join(path, name)
                    with open(full, "rb") as file:
                        content = hashlib.sha256(file.read()).hexdigest()
                    total.update(f"{os.path.relpath(full, root)}\0{content}\n".encode())
    return total.hexdigest()
