"""All checks and tests, on a machine with nothing but python3, pip and git.

    bash .ci/run                      everything
    bash .ci/run tests/applier -x     the checks, then pytest with these arguments

Makes two environments under the cache folder (or --venvs DIR) and uses them again as long as their
requirements stay the same: a small one for the checks and most tests, and one with torch and what
else vLLM's engine imports. Where the second cannot be made, the tests that need it are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fixes.authoring.fetching import cache_folder, locked  # noqa: E402

LIGHT = [ROOT / "tests" / "requirements.txt"]
ENGINE = [
    ROOT / "tests" / "emulation" / "requirements.txt",
    ROOT / "tests" / "emulation" / "requirements-nodeps.txt",
]
OWN_ENGINE = "GAUDI_FIX_PACK_ENGINE_PYTHON"
NO_ENGINE = "GAUDI_FIX_PACK_NO_ENGINE"
LIMIT = 85 * 60  # seconds for all; a run that hangs must end with a message


class CannotMake(Exception):
    """An environment cannot be made here."""


def say(line: str) -> None:
    """Progress."""
    print(f"== {line}", flush=True)


def environment(folder: Path, python: str, requirements: list[Path]) -> Path:
    """The interpreter of a virtual environment with these requirements, made when need be."""
    texts = [path.read_text(encoding="utf-8") for path in requirements]
    version = subprocess.run([python, "-VV"], capture_output=True, text=True).stdout
    key = hashlib.sha256("\0".join([*texts, version]).encode()).hexdigest()
    stamp, interpreter = folder / "requirements.sha256", folder / "bin" / "python"
    with locked(folder.with_name(folder.name + ".lock")):
        if not stamp.exists() or stamp.read_text() != key:
            say(f"making {folder} with Python {version.split()[1]}")
            shutil.rmtree(folder, ignore_errors=True)
            install = _make_venv(folder, python)
            _install(install, requirements, texts)
            stamp.write_text(key)
    return interpreter


def _make_venv(folder: Path, python: str) -> list[str]:
    """A virtual environment; returns the pip command that installs into it."""
    interpreter = str(folder / "bin" / "python")
    if _run([python, "-m", "venv", str(folder)], quiet=True):
        return [interpreter, "-m", "pip"]
    # Debian's python3 without python3-venv: the pip of the system serves, and nothing else of it.
    if not _run([python, "-m", "venv", "--clear", "--without-pip", str(folder)]):
        raise CannotMake(f"{python} -m venv failed")
    where = "import pip; print(next(iter(pip.__path__)))"
    pip = subprocess.run([python, "-c", where], capture_output=True, text=True).stdout.strip()
    if not pip:
        raise CannotMake(f"{python} has no pip")
    (folder / "pip").mkdir()
    (folder / "pip" / "pip").symlink_to(pip)
    return [interpreter, str(folder / "pip" / "pip")]


def _install(pip: list[str], requirements: list[Path], texts: list[str]) -> None:
    install = [*pip, "install", "--quiet", "--disable-pip-version-check"]
    if torch := re.search(r"(?m)^torch==[\d.]+", texts[0]):
        # The plain wheel brings gigabytes of CUDA: take the one for CPUs where pip can get it.
        _run([*install, f"{torch.group()}+cpu"], quiet=True)
    for path in requirements:
        alone = ["--no-deps"] if path.stem.endswith("nodeps") else []
        command = [*install, *alone, "-r", str(path)]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = (errors or ["no reason given"])[0][:300]
            raise CannotMake(f"pip could not install {path.relative_to(ROOT)}: {reason}")


def engine_environment(folder: Path) -> dict[str, str]:
    """Variables that tell the tests of the engine's interpreter, or why there is none."""
    if OWN_ENGINE in os.environ:
        return {}
    try:
        return {OWN_ENGINE: str(environment(folder, _engine_python(), ENGINE))}
    except (CannotMake, OSError) as error:
        reason = f"the engine's environment could not be made: {error}"
        say(f"{reason}; the tests that need it are skipped")
        return {NO_ENGINE: reason}


def _engine_python() -> str:
    """Python 3.11 where there is one (the images have it), else any that the packages allow."""
    for name in ("python3.11", sys.executable, "python3.12", "python3.13"):
        code = "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))"
        if shutil.which(name) and _run([name, "-c", code], quiet=True):
            return name
    raise CannotMake("no Python from 3.11 to 3.13")


def _run(command: Iterable[str], quiet: bool = False, **variables: str) -> bool:
    output = subprocess.DEVNULL if quiet else None
    return (
        subprocess.run(
            list(command), cwd=ROOT, env=os.environ | variables, stdout=output, stderr=output
        ).returncode
        == 0
    )


def main() -> int:
    """Run everything; 0 when all is well."""
    parser = argparse.ArgumentParser(prog=".ci/run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venvs", type=Path, default=cache_folder(), metavar="DIR")
    parser.add_argument("--no-engine", action="store_true", help="do without torch")
    options, for_pytest = parser.parse_known_args()
    begun = time.monotonic()
    try:
        python = str(environment(options.venvs / "test-venv", sys.executable, LIGHT))
    except CannotMake as error:
        say(f"the environment for the checks could not be made: {error}")
        return 1
    results: dict[str, str] = {}
    for name, command in {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy"],
    }.items():
        say(name)
        results[name] = "ok" if _run([python, "-m", *command]) else "FAILED"
    engine = {NO_ENGINE: "left out with --no-engine"}
    if not options.no_engine:
        engine = engine_environment(options.venvs / "engine-venv")
    say("pytest")
    results["tests"] = _pytest(python, for_pytest, engine, LIMIT - (time.monotonic() - begun))
    minutes = (time.monotonic() - begun) / 60
    say(
        ", ".join(f"{name}: {result}" for name, result in results.items()) + f" ({minutes:.1f} min)"
    )
    return 0 if set(results.values()) == {"ok"} else 1


def _pytest(python: str, arguments: list[str], variables: dict[str, str], limit: float) -> str:
    with tempfile.TemporaryDirectory(prefix="gaudi-fix-pack-") as scratch:
        command = [python, "-m", "pytest", f"--basetemp={scratch}/pytest", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return f"FAILED: not done after {LIMIT // 60} minutes"
        except KeyboardInterrupt:
            process.wait()
            raise
    return "ok" if code == 0 else "FAILED"


if __name__ == "__main__":
    sys.exit(main())
