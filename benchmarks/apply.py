#!/usr/bin/env python3
"""What a run of the applier costs, side by side with other ways, in ratios of one and the same run.

    python3 benchmarks/apply.py [RELEASE] [--rounds 5] [--site-packages DIR]

The complete profile with every opt-in fix, then how the cost grows: the first 1, 5, 10, ... fixes
of the profile, and one fix on a file that is 1, 5, 10 and 20 times as long. Measured in processes
of their own, round by round in turn, CPU seconds (user and system) and peak memory of each; the
median of the rounds is shown. All bytecode is compiled before, that of the pack too.

Needs libcst. With --site-packages the release's packages are taken from a folder that `dev.py
sources` made; else they are laid out first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNNER = "vllm_gaudi/v1/worker/hpu_model_runner.py"
APPLY = str(ROOT / "fixes" / "apply_all.py")
DECODER, DECODER_FIX = "vllm/v1/engine/logprobs.py", "logprobs-decode-guard"
IMPORTS = "import json, argparse"
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
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="gaudi-fix-pack-") as folder:
        site = Path(folder) / "site-packages"
        if options.site_packages:
            shutil.copytree(options.site_packages, site, symlinks=True)
        else:
            into = ["--into", str(site), "--no-bytecode"]
            command = [sys.executable, str(ROOT / "fixes" / "dev.py"), "sources"]
            subprocess.run([*command, options.release, *into], check=True)
        ways = _ways(options.release, site, Path(folder))
        measured = {name: Measured() for name in ways}
        for number in range(options.rounds + 1):
            for name, way in ways.items():
                way(measured[name] if number else Measured())  # round 0 only warms up
    print(f"{options.release}, {options.rounds} rounds, median CPU; Python", sys.version.split()[0])
    medians = {name: statistics.median(found.seconds) for name, found in measured.items()}
    yardstick = next(found for name, found in medians.items() if name.startswith("(a)"))
    for name, seconds in medians.items():
        memory = max(measured[name].memory)
        print(f"{name:57} {seconds:7.3f} s {memory:6.1f} MB {seconds / yardstick:7.3f} of (a)")
    nothing = next(found for name, found in medians.items() if name.startswith("the same again"))
    print(f"nothing to do: {nothing / medians[_imports()]:.2f} of {_imports()}")


def _imports() -> str:
    return f"python3 -c '{IMPORTS}'"


def _ways(release: str, site: Path, scratch: Path) -> dict[str, Callable[[Measured], None]]:
    """All that is measured, in the order of a round, which leaves the packages as it found them."""
    command = [sys.executable, APPLY, "--site-packages", str(site)]
    listed = subprocess.run(
        [sys.executable, APPLY, "--profile", release, "--list", "--json"],
        check=True,
        capture_output=True,
    )
    fixes = [(fix["id"], fix["kind"]) for fix in json.loads(listed.stdout)["fixes"]]

    def first(number: int) -> list[str]:
        named = [fix for fix, kind in fixes[:number] if kind == "opt-in"]
        without = [fix for fix, kind in fixes[number:] if kind != "opt-in"]
        return [*command, "--profile", release, *named, *(f"--without={fix}" for fix in without)]

    everything = first(len(fixes))
    revert = [*command, "--revert"]
    overlays = scratch / "overlays"
    overlay = [*everything, "--overlay", str(overlays)]
    diff = scratch / "all.patch"
    diff.write_bytes(
        subprocess.run([*everything, "--diff"], check=True, capture_output=True).stdout
    )
    patch = ["patch", "-p1", "--silent", "--force", "-d", str(site)]
    python = [sys.executable, "-c"]
    decoder = (site / DECODER).read_bytes()

    def build_overlay(measured: Measured) -> None:
        shutil.rmtree(overlays, ignore_errors=True)
        measured.run(overlay)

    def patched(measured: Measured) -> None:
        measured.run(patch, diff)
        subprocess.run([*patch, "-R"], input=diff.read_bytes(), check=True)

    def codemod(measured: Measured) -> None:
        tool = [sys.executable, "-m", "libcst.tool", "codemod", "-j1", "--no-format"]
        fix = ["-x", "fixes.authoring.codemod.FixCommand", "--fix", DECODER_FIX]
        measured.run([*tool, *fix, str(site / DECODER)])
        assert (site / DECODER).read_bytes() != decoder, "the codemod did nothing"
        (site / DECODER).write_bytes(decoder)

    def and_back(words: list[str]) -> Callable[[Measured], None]:
        def way(measured: Measured) -> None:
            measured.run(words)
            Measured().run(revert)

        return way

    def copies(number: int) -> Callable[[Measured], None]:
        inside = textwrap.indent(decoder.decode().replace("from __future__", "# "), "    ")
        more = "".join(f"\n\nclass _Copy{copy}:\n{inside}" for copy in range(1, number))
        others = [
            f"--without={fix}" for fix, kind in fixes if kind != "opt-in" and fix != DECODER_FIX
        ]

        def way(measured: Measured) -> None:
            (site / DECODER).write_bytes(decoder + more.encode())
            measured.run([*command, "--profile", release, *others])
            Measured().run(revert)
            (site / DECODER).write_bytes(decoder)

        return way

    sizes = [number for number in (1, 5, 10, 15, 20) if number < len(fixes)] + [len(fixes)]
    return {
        f"apply, all {len(fixes)} fixes": lambda m: m.run(everything),
        "the same again: nothing to do": lambda m: m.run(everything),
        "revert": lambda m: m.run(revert),
        "(a) libcst parse and print of hpu_model_runner.py": lambda m: m.run(
            [*python, PARSE, str(site / RUNNER)]
        ),
        "(b) GNU patch, the same edits": patched,
        f"(c) libcst codemod tool, {DECODER_FIX} alone": codemod,
        _imports(): lambda m: m.run([*python, IMPORTS]),
        "overlay, built": build_overlay,
        "overlay, found": lambda m: m.run(overlay),
        **{f"apply, {number} fixes of the profile": and_back(first(number)) for number in sizes},
        **{f"apply, {DECODER_FIX}, file x {number}": copies(number) for number in (1, 5, 10, 20)},
    }


if __name__ == "__main__":
    main()
