"""The real command, in an interpreter of its own, on the small pack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.applier.world import Ran, World

ROOT = Path(__file__).parents[2]

# Writes the names of all modules at the end, so that a test can see what was imported.
_SITECUSTOMIZE = """\
import atexit, os, sys
def tell(path=os.environ["MODULES_FILE"]):
    with open(path, "w") as file:
        file.write("\\n".join(sys.modules))
atexit.register(tell)
"""


def install_command(world: World) -> Path:
    """Put the program into the small pack, so that this is a whole checkout; its entry point."""
    shutil.copy(ROOT / "apply_all.py", world.pack)
    for name in ("__init__.py", "apply_all.py"):
        shutil.copy(ROOT / "fixes" / name, world.pack / "fixes")
    shutil.copytree(
        ROOT / "fixes" / "applier",
        world.pack / "fixes" / "applier",
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    return world.pack / "fixes" / "apply_all.py"


def run_command(
    world: World,
    *argv: str,
    python: str = sys.executable,
    script: Path | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    path: Sequence[Path] = (),
) -> tuple[Ran, set[str]]:
    """Run the command; what it returned and printed, and the modules it had in the end."""
    program = script or install_command(world)
    extra = world.pack.parent / "sitecustomize"
    extra.mkdir(exist_ok=True)
    (extra / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    modules = extra / "modules"
    modules.unlink(missing_ok=True)
    done = subprocess.run(
        [python, str(program), *argv],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [extra, *path])),
            "MODULES_FILE": str(modules),
            **(environment or {}),
        },
        cwd=cwd or world.pack.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    ran = Ran(done.returncode, done.stdout, done.stderr)
    return ran, set(modules.read_text().split("\n"))
