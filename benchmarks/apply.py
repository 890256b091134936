#!/usr/bin/env python3
"""What a run of the applier costs, side by side with other ways, in ratios of one and the same run.

    python3 benchmarks/apply.py [RELEASE] [--rounds 5] [--site-packages DIR]

Measured in processes of their own, round by round in turn, CPU seconds (user and system) and peak
memory of each; the median of the rounds is shown. With --site-packages the release's packages are
taken from a folder that `dev.py sources` made; else they are laid out first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNNER = "vllm_gaudi/v1/worker/hpu_model_runner.py"
APPLY = str(ROOT / "fixes" / "apply_all.py")
PARSE = "import sys, libcst; libcst.parse_module(open(sys.argv[1], 'rb').read()).bytes"


@dataclass
class Measured:
    """CPU seconds and peak memory (MB) of one command, a number a round."""

    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def run(self, command: list[str], stdin: Path | None = None) -> None:
        """Run it once; its own code must be 0."""
        with (stdin or Path(os.devnull)).open("rb") as given:
            process = subprocess.Popen(
                command, stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            assert process.stderr is not None
            said = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(command)}: exit {process.returncode}\n{said.decode()}")
        self.seconds.append(usage.ru_utime + usage.ru_stime)
        self.memory.append(usage.ru_maxrss / 1024)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("release", nargs="?", default="v0.26.0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--site-packages", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gaudi-fix-pack-") as folder:
        site = Path(folder) / "site-packages"
        if options.site_packages:
            shutil.copytree(options.site_packages, site, symlinks=True)
        else:
            into = ["--into", str(site), "--no-bytecode"]
            command = [sys.executable, str(ROOT / "fixes" / "dev.py"), "sources"]
            subprocess.run([*command, options.release, *into], check=True)
        measure(options.release, options.rounds, site, Path(folder))


def measure(release: str, rounds: int, site: Path, scratch: Path) -> None:
    """All ways in turn, then the table."""
    ours = [sys.executable, APPLY, "--site-packages", str(site), "--profile", release]
    revert = [sys.executable, APPLY, "--site-packages", str(site), "--revert"]
    diff = scratch / "all.patch"
    shown = subprocess.run([*ours, "--diff"], check=True, capture_output=True)
    diff.write_bytes(shown.stdout)
    patch = ["patch", "-p1", "--silent", "--force", "-d", str(site)]
    one_fix = "bad-words-index"
    touched = site / "vllm_gaudi" / "v1" / "worker" / "hpu_input_batch.py"
    codemod = [sys.executable, "-m", "libcst.tool", "codemod", "-j1", "--no-format"]
    codemod += ["-x", "fixes.authoring.codemod.FixCommand", "--fix", one_fix]
    os.environ["PYTHONPATH"] = str(ROOT)
    ways: dict[str, Callable[[Measured], None]] = {
        "apply, all written fixes": lambda m: m.run(ours),
        "the same again: nothing to do": lambda m: m.run(ours),
        "revert": lambda m: m.run(revert),
        "(a) libcst parse and print of hpu_model_runner.py": lambda m: m.run(
            [sys.executable, "-c", PARSE, str(site / RUNNER)]
        ),
        "(b) GNU patch, the same edits": lambda m: m.run(patch, diff),
        f"(c) libcst codemod tool, {one_fix} on its one file": lambda m: m.run(
            [*codemod, str(touched)]
        ),
        "python3 -c 'import json, argparse'": lambda m: m.run(
            [sys.executable, "-c", "import json, argparse"]
        ),
    }
    measured = {name: Measured() for name in ways}
    for _ in range(rounds):
        pristine = touched.read_bytes()
        for name, way in ways.items():
            way(measured[name])
            if name.startswith("(b)"):
                subprocess.run([*patch, "-R"], input=shown.stdout, check=True)
            if name.startswith("(c)"):
                assert touched.read_bytes() != pristine, "the codemod did nothing"
                touched.write_bytes(pristine)
    print(f"{release}, {rounds} rounds, median CPU seconds; Python {sys.version.split()[0]}")
    yardstick = next(found for name, found in measured.items() if name.startswith("(a)"))
    for name, found in measured.items():
        seconds = statistics.median(found.seconds)
        ratio = seconds / statistics.median(yardstick.seconds)
        print(f"{name:57} {seconds:7.3f} s {max(found.memory):6.1f} MB {ratio:7.3f} of (a)")


if __name__ == "__main__":
    main()
