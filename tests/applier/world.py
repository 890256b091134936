"""A small installation and a small pack of our own writing, for the tests of the applier.

The packages raise when they are imported: the applier must never do that.
"""

from __future__ import annotations

import hashlib
import io
import os
import py_compile
import shutil
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from fixes.applier import cli
from fixes.applier.pack import Pack
from fixes.authoring.locks import Origin, record
from fixes.authoring.trees import Tree

ENGINE = '''\
"""The engine."""
import os

LIMIT = 3


def double(value):
    return value * 2


class Engine:
    """Runs steps."""

    size = 1

    def __init__(self):
        self.done = []

    def step(self, request):
        """One step.

    A line of text that is indented less than the code.
        """
        # stock comment
        value = double(request)  # twice
        limit = LIMIT
        self.done.append(value)
        return value

    @property
    def last(self):
        return self.done[-1]
'''

RUNNER = '''\
"""The runner."""


def collate(rows):
    assert rows
    order = sorted(rows, key=len)
    return pad(order, size=max(rows), fill=0)


def pad(rows, size, fill):
    return [row + [fill] * (size - len(row)) for row in rows]
'''

FIXES = {
    "alpha": '''
        """alpha: step is off by one."""
        from fixes.applier.fix import Fix, site

        FIX = Fix(summary="step is off by one", symptom="wrong values", references=("#1",),
                  drop_when="never", relies_on=("vllm/engine.py::double",))

        @site("vllm/engine.py", "Engine.step")
        def step(code):
            code.replace_statement("value = double(request)", "value = double(request) + 1")
    ''',
    "beta": '''
        """beta: limits were ignored and collate looked at rows, not at their lengths."""
        from fixes.applier.fix import Fix, site

        FIX = Fix(summary="limits", symptom="too many", references=("#2",), drop_when="never")

        @site("vllm/engine.py", "Engine.step")
        def step(code):
            code.insert_after("limit = LIMIT", "value = min(value, limit)")

        @site("vllm_gaudi/runner.py", "collate")
        def collate(code):
            code.replace_keyword("size", "max(rows)", "max(map(len, rows))")
    ''',
    "gamma": '''
        """gamma: only takes code away."""
        from fixes.applier.fix import Fix, site

        FIX = Fix(summary="no assert", symptom="empty batches fail", references=("#3",),
                  drop_when="never")

        @site("vllm_gaudi/runner.py", "collate")
        def collate(code):
            code.remove("assert rows")
    ''',
    "delta": '''
        """delta: brings a module of its own."""
        from fixes.applier.fix import Fix, site

        FIX = Fix(summary="helper", symptom="no helper", references=("#4",), drop_when="never",
                  support={"vllm_gaudi/_fix_delta.py": "delta_support.txt"})

        @site("vllm_gaudi/runner.py", "pad")
        def pad(code):
            code.insert_first("from vllm_gaudi import _fix_delta")
    ''',
}

PROFILE = """\
release = "{name}"
summary = "a release"

[packages.vllm]
distribution = "vllm"
version = "{version}"
commit = "{commit}"

[packages.vllm_gaudi]
distribution = "vllm-gaudi"
version = "{version}"
commit = "{commit}"

[[fix]]
id = "alpha"

[[fix]]
id = "beta"
after = ["alpha"]

[[fix]]
id = "gamma"

[[fix]]
id = "delta"
opt-in = true
requires = ["gamma"]

[[fix]]
id = "epsilon"
"""


@dataclass(frozen=True)
class Ran:
    """What a run returned and printed."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line on standard output."""
        return self.out.rstrip("\n").rpartition("\n")[2]


class World:
    """A folder with a pack in ``pack`` and an installation in ``site``."""

    def __init__(self, root: Path) -> None:
        self.pack = root / "pack"
        self.site = root / "site"

    def build(self) -> None:
        """Write pack and installation, and record the locks."""
        self.install(self.site, "1.0.0")
        (self.pack / "fixes").mkdir(parents=True)
        (self.pack / "profiles").mkdir()
        for name, text in FIXES.items():
            self.write_fix(name, text)
        (self.pack / "fixes" / "delta_support.txt").write_text("VALUE = 4\n")
        (self.pack / "profiles" / "unwritten.toml").write_text('fixes = ["epsilon"]\n')
        for number in ("1", "2"):
            name = f"v{number}.0.0"
            text = PROFILE.format(name=name, version=f"{number}.0.0", commit=number * 40)
            (self.pack / "profiles" / f"{name}.toml").write_text(text)
        self.record("v1.0.0", self.site)
        other = self.site.with_name("other")
        self.install(other, "2.0.0")
        engine = other / "vllm" / "engine.py"
        engine.write_text(engine.read_text().replace("request)  # twice", "request)  # 2 x"))
        self.record("v2.0.0", other)

    def write_fix(self, name: str, text: str) -> None:
        """Write a fix module of the small pack, as a new process would see it."""
        sys.modules.pop(f"fixes.{name}", None)
        shutil.rmtree(self.pack / "fixes" / "__pycache__", ignore_errors=True)
        (self.pack / "fixes" / f"{name}.py").write_text(textwrap.dedent(text).strip() + "\n")

    def record(self, profile: str, site: Path) -> None:
        """Write a lock."""
        origin = Origin(profile[1] * 40, "written by this test")
        lock = record(Pack(self.pack), profile, Tree(site), {"vllm": origin, "vllm_gaudi": origin})
        (self.pack / "profiles" / f"{profile}.lock").write_text(lock.dump())

    @staticmethod
    def install(site: Path, version: str) -> None:
        """Lay the two packages out, with metadata and bytecode."""
        for package, module, text in (
            ("vllm", "engine", ENGINE),
            ("vllm_gaudi", "runner", RUNNER),
        ):
            folder = site / package
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
            (folder / f"{module}.py").write_text(text)
            os.utime(folder / f"{module}.py", (1_700_000_000, 1_700_000_000))
            py_compile.compile(str(folder / f"{module}.py"))
            info = site / f"{package}-{version}.dist-info"
            info.mkdir()
            name = package.replace("_", "-")
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )

    def run(self, *argv: str, profile: str | None = "v1.0.0", site: bool = True) -> Ran:
        """Run the command in this process."""
        words = ["--profile", profile] if profile else []
        words += ["--site-packages", str(self.site)] if site else []
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                code = cli.main(str(self.pack), [*words, *argv])
            except SystemExit as stop:
                code = int(stop.code or 0)
        return Ran(code, out.getvalue(), err.getvalue())

    def clean(self) -> None:
        """Remove it all."""
        shutil.rmtree(self.pack.parent)

    def snapshot(
        self, *, times: bool = False, state: bool = False
    ) -> dict[str, tuple[object, ...]]:
        """Every file of the installation: content, mode, owner and, if asked, time."""
        found: dict[str, tuple[object, ...]] = {}
        for path in sorted(self.site.rglob("*")):
            name = path.relative_to(self.site).as_posix()
            if ".gaudi-fix-pack" in name and not state:
                continue
            if path.is_symlink():
                found[name] = ("link", os.readlink(path))
            elif path.is_file():
                stat = path.stat()
                facts = (stat.st_mode, stat.st_uid, stat.st_gid)
                large = stat.st_size > 1 << 30  # and hostile: a test made it
                digest = "" if large else hashlib.sha256(path.read_bytes()).hexdigest()
                found[name] = (digest, *facts, *([stat.st_mtime_ns] if times else []))
            else:
                found[name] = ("folder",)
        return found
