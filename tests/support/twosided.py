"""Runs a fix's tests on stock packages, where they must fail, and on fixed ones: pass.

A test of ``tests/fixes/test_<fix>.py`` becomes ``test_x[v0.26.0-stock]``, ``test_x[v0.26.0-fixed]``
and so on. Each (file, release, state) is one child process of pytest with that tree of packages
first on the path, and all files' engine tests are one; this process only judges what the child
reports. See ``docs/testing.md``.

Marks (``marks.py``; one that says anything else is an error)
    red(pattern, release=..., output=False)  must fail on stock with a matching message, pass fixed
    needs("torch")                           torch, and no plugin of vLLM is loaded
    needs("engine")                          torch, and vllm_gaudi on the emulated device
    needs("vllm_gaudi")                      skip where that package is not at hand
    only("v0.26.0", ...)                     the releases a test is for
    level("text")                            the level of proof, where it is not the usual one
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import absence, child, marks
from tests.support.environments import NoInterpreter, interpreter
from tests.support.trees import FIXED, STOCK, Tree, TreeError, Trees

TAIL_LINES = 60
TIMEOUT = 3000
# The stand-in for the closed habana_frameworks package. Where it is on the path, torch loads it.
EMULATION = Path("tests", "emulation", "site")
# The name of the child process that all tests with these needs share.
ENGINE, ENGINE_CHILD = frozenset({"engine"}), Path("engine")
# What the child's interpreter decides, not this one.
_CHILD_MARKS = {"skip", "skipif", "xfail", "usefixtures", "parametrize", "filterwarnings"}
# The last words of a test that looks for a module which the fix adds (`Fix.support`).
_LACKS_OWN_MODULE = re.compile(
    r"(No module named|cannot import name|has no attribute) '([\w.]+\.)?gaudi_fix_\w+'"
)

trees_key = pytest.StashKey[Trees]()
plugin_key = pytest.StashKey["TwoSided"]()


class Verdict(Exception):
    """A test's result is not the one that its side asks for."""


# -- collection ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The tests of one child process."""

    file: Path
    release: str
    state: str
    needs: frozenset[str]


class TwoSidedItem(pytest.Item):
    """One test on one side. It runs nothing itself."""

    def __init__(self, *, origin: pytest.Item, group: Group, fix: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.origin = origin
        self.group = group
        self.fix = fix
        self.result: dict[str, Any] = {}
        self.own_markers = [m for m in origin.iter_markers() if m.name not in _CHILD_MARKS]
        self.keywords.update({mark.name: mark for mark in self.own_markers})

    @property
    def red(self) -> pytest.Mark | None:
        """The mark that says how this test must fail on stock packages of its release."""
        for mark in self.origin.iter_markers("red"):
            if mark.kwargs.get("release", self.group.release) == self.group.release:
                return mark
        return None

    @property
    def level(self) -> str:
        """The level of proof."""
        if mark := self.get_closest_marker("level"):
            return str(mark.args[0])
        return "engine" if "engine" in self.group.needs else "class"

    def runtest(self) -> None:
        """Wait for the child process and judge."""
        self.result = self.config.stash[plugin_key].result_of(self)
        judge(self.result, self.group.state, self.red)
        if self.result["outcome"] == "skipped":
            absence.skip(self.result["reason"], self.group.release)

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None
    ) -> str | Any:
        """A verdict is its own explanation."""
        if isinstance(excinfo.value, Verdict):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Where the test stands."""
        path, line, _ = self.origin.reportinfo()
        return path, line, self.name


class TwoSidedModule(pytest.Module):
    """A test module; those of its tests that need packages become items for child processes."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        """Each test once a release and state, in the order of the child processes."""
        trees = self.config.stash[trees_key]
        try:
            fix = self.fix
        except TreeError as error:
            raise self.CollectError(str(error)) from error
        collected = self._collected(fix)
        functions = list(_functions(collected))
        releases = trees.releases_of(fix) if fix else trees.releases
        faults = (fault for item in functions for fault in marks.faults(item, fix, releases))
        if found := list(dict.fromkeys(faults)):
            raise self.CollectError("\n".join(found))
        sides = {item: self._sides(item, fix, releases) for item in functions}
        if all(groups is None for groups in sides.values()):
            yield from collected
            return
        self.own_markers = [m for m in self.own_markers if m.name not in _CHILD_MARKS]
        yield from (item for item in functions if sides[item] is None)
        groups: dict[Group, list[pytest.Item]] = defaultdict(list)
        for item in functions:
            for group in sides[item] or ():
                groups[group].append(item)
        for group in sorted(groups, key=lambda g: trees.releases.index(g.release)):
            for item in groups[group]:
                yield self._item(item, group)

    @property
    def fix(self) -> str:
        """The fix this module is about; empty for another module."""
        inside = self.path.parent == self.config.rootpath / "tests" / "fixes"
        return self.config.stash[trees_key].fix_of(self.path) if inside else ""

    def _collected(self, fix: str) -> list[pytest.Item | pytest.Collector]:
        try:
            return list(super().collect())
        except pytest.skip.Exception as error:
            if not fix:
                raise
            raise self.CollectError(
                f"a test file of a fix must not skip as a whole: {error.msg}; import in the tests,"
                " mark what they need with needs(...), or install tests/requirements.txt"
            ) from error

    def _sides(self, item: pytest.Item, fix: str, releases: Iterable[str]) -> list[Group] | None:
        """A fix's test has two sides a release, another that needs something one, others none."""
        needs = frozenset(n for mark in item.iter_markers("needs") for n in mark.args)
        if not fix and not needs:
            return None
        if mark := item.get_closest_marker("only"):
            releases = [name for name in releases if name in mark.args]
        states = (STOCK, FIXED) if fix else (STOCK,)
        # Importing vLLM takes long: all engine tests of a side share a process.
        file, needs = (ENGINE_CHILD, ENGINE) if "engine" in needs else (self.path, needs)
        return [Group(file, name, state, needs) for name in releases for state in states]

    def _item(self, origin: pytest.Item, group: Group) -> TwoSidedItem:
        name = origin.nodeid.partition("::")[2].replace("::", ".")
        base, bracket, rest = name.partition("[")
        side = f"{group.release}-{group.state}"
        name = f"{base}[{side}-{rest}" if bracket else f"{base}[{side}]"
        item: TwoSidedItem = TwoSidedItem.from_parent(
            self, name=name, origin=origin, group=group, fix=self.fix
        )
        return item


def _functions(nodes: Iterable[pytest.Item | pytest.Collector]) -> Iterator[pytest.Item]:
    for node in nodes:
        if isinstance(node, pytest.Item):
            yield node
        else:
            yield from _functions(node.collect())


# -- judgement -------------------------------------------------------------------------------------


def judge(result: dict[str, Any], state: str, red: pytest.Mark | None) -> None:
    """Raise unless a test's result is right for the side it ran on."""
    outcome = result["outcome"]
    for package, place in result.get("packages", {}).items():
        if place:
            raise Verdict(f"{package} is not the one under test: it was imported from {place}")
    if outcome == "skipped":
        if red is not None and not result.get("excused"):
            raise Verdict(
                f"skips ({result['reason']}): a red test that skips shows nothing; let it run,"
                " mark what it needs with needs(...), its releases with only(...)"
            )
        return
    must_fail = red is not None and state == STOCK
    if outcome == "passed" and must_fail:
        raise Verdict("passes on the stock packages: it does not show the defect")
    if outcome == "passed":
        return
    if result.get("crashed"):
        raise Verdict(_details(result))
    if red is None or not must_fail:
        raise Verdict(f"must pass on the {state} packages\n{_details(result)}")
    phase = result.get("phase", "call")
    if phase != "call":
        raise Verdict(
            f"fails on the stock packages in its {phase}, not in the test itself: move what shows"
            f" the defect from the fixture into the test\n{_details(result)}"
        )
    text = result["text"] + ("\n" + result["output"] if red.kwargs.get("output") else "")
    if not re.search(red.args[0], text):
        raise Verdict(
            f"fails on the stock packages, but not with {red.args[0]!r}\n"
            f"the messages are:\n{text}\n\n{_details(result)}"
        )
    if _LACKS_OWN_MODULE.search(text):
        raise Verdict(
            "fails on the stock packages because it looks for the fix's own gaudi_fix_ module,"
            f" which cannot be there: show the defect\n{_details(result)}"
        )


def _details(result: dict[str, Any]) -> str:
    return "\n".join(result.get(key, "") for key in ("longrepr", "output")).rstrip()


# -- child processes -------------------------------------------------------------------------------


@dataclass(eq=False)  # pytest keeps plugins in sets
class TwoSided:
    """Starts the child processes and hands out their results."""

    config: pytest.Config
    trees: Trees
    futures: dict[Group, Future[dict[str, dict[str, Any]]]] = field(default_factory=dict)
    done: list[dict[str, Any]] = field(default_factory=list)
    ordinary: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    _running: set[int] = field(default_factory=set)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _pool: ThreadPoolExecutor | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Start on all the groups that were selected, a few at a time."""
        option = session.config.option
        broken = session.testsfailed and not option.continue_on_collection_errors
        if option.collectonly or broken:
            return
        groups: dict[Group, list[str]] = defaultdict(list)
        for item in session.items:
            if isinstance(item, TwoSidedItem):
                groups[item.group].append(item.origin.nodeid)
        self.jobs = int(os.environ.get("GAUDI_FIX_PACK_JOBS") or min(2, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="child")
        for group, nodeids in groups.items():
            self.futures[group] = self._pool.submit(self._run, group, nodeids)

    def pytest_sessionfinish(self) -> None:
        """Leave no process behind, whatever ended the session, and write down the results."""
        self._stopping.set()
        for pid in list(self._running):
            _kill_group(pid)
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        if self.done:
            path = Path(self.config.getoption("--results") or self.build / "test-results.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            document = {"schema_version": 1, "tests": self.done}
            path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @property
    def build(self) -> Path:
        """Where results and the output of the child processes go."""
        return self.config.rootpath / "build"

    def result_of(self, item: TwoSidedItem) -> dict[str, Any]:
        """What the child process said of a test; waits for it."""
        return self.futures[item.group].result()[item.origin.nodeid]

    def _run(self, group: Group, nodeids: list[str]) -> dict[str, dict[str, Any]]:
        if self._stopping.is_set():
            return _excused(nodeids, "the run was stopped")
        try:
            tree = self.trees.get(group.release, group.state)
            lacking = {"vllm_gaudi"} if group.needs & {"engine", "vllm_gaudi"} else set()
            for package in lacking & tree.missing.keys():
                return _excused(nodeids, _absence(tree, package))
            python = interpreter(group.needs, self.trees.cache)
        except NoInterpreter as error:
            return _excused(nodeids, str(error))
        except TreeError as error:
            return _all(nodeids, outcome="failed", crashed=True, longrepr=str(error))
        return self._run_child(group, nodeids, tree, python)

    def _run_child(
        self, group: Group, nodeids: list[str], tree: Tree, python: str
    ) -> dict[str, dict[str, Any]]:
        log = self.build / "children" / f"{group.file.stem}-{group.release}-{group.state}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        root = self.config.rootpath
        command = [python, "-m", "pytest", "-p", "tests.support.child", "-p", "no:cacheprovider"]
        # Very verbose, so that pytest cuts no message that a pattern has to match.
        command += ["--rootdir", str(root), "-vv", *nodeids]
        limit = float(os.environ.get("GAUDI_FIX_PACK_CHILD_TIMEOUT") or TIMEOUT)
        with tempfile.TemporaryDirectory(prefix="gaudi-fix-pack-") as scratch:
            report = Path(scratch, "report.jsonl")
            environment = self._environment(group, tree, Path(scratch), report)
            with log.open("w", encoding="utf-8") as output:
                ending = self._wait(command, environment, output, limit)
            results, ended, last = _read_report(report)
        if ending is None and ended:
            return {**_all(nodeids, outcome="failed", text="", longrepr="not reported"), **results}
        tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-TAIL_LINES:])
        what = f"the child process {ending or 'ended without a report'}"
        where = f" in {last}" if last else " before any test"
        story = f"{what}{where}; the end of its output ({log}):\n{tail}"
        return _all(nodeids, outcome="failed", crashed=True, longrepr=story)

    def _wait(
        self, command: list[str], environment: dict[str, str], output: Any, limit: float
    ) -> str | None:
        """Run a child process to its end; says what was wrong with that end, if anything."""
        process = subprocess.Popen(
            command,
            cwd=self.config.rootpath,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._running.add(process.pid)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"took longer than {limit:.0f} s and was killed"
        finally:
            _kill_group(process.pid)
            process.wait()
            self._running.discard(process.pid)
            _await_group(process.pid)
        return None if code in (0, 1) else f"ended with exit code {code}"

    def _environment(self, group: Group, tree: Tree, scratch: Path, report: Path) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        path = [tree.path]
        plugins: dict[str, str] = {}
        if "engine" in group.needs:
            path.append(self.config.rootpath / EMULATION)
        else:
            path.append(Path(__file__).with_name("site"))
            # Without a device vllm_gaudi cannot be loaded: vLLM must not try in its own processes.
            plugins["VLLM_PLUGINS"] = ""
        path += [self.config.rootpath, Path(child.__file__).parents[2]]
        cached = self.trees.cache / "vllm-cache" / f"{group.release}-{group.state}"
        side = {
            "release": group.release,
            "state": group.state,
            "tree": str(tree.path),
            "report": str(report),
            "parent": os.getpid(),
            "missing": {name: _absence(tree, name) for name in tree.missing},
        }
        return kept | {
            child.VARIABLE: json.dumps(side),
            "PYTHONPATH": os.pathsep.join(str(each) for each in dict.fromkeys(path)),
            "PYTHONPYCACHEPREFIX": str(self.trees.bytecode),
            "PYTHONNOUSERSITE": "1",
            # vllm-gaudi brings a pytest plugin: it would patch vllm before any test of ours, and
            # pytest would rewrite the assert statements of the package under test.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.jobs)),
            "TMPDIR": str(scratch),
            "VLLM_CONFIG_ROOT": str(scratch / "config"),
            # What a model class can do is kept here by the hash of its file: seconds each time.
            "VLLM_CACHE_ROOT": str(cached),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **plugins,
        }

    # -- reporting ---------------------------------------------------------------------------------

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Keep what the summary and the table of proof are made of."""
        outcome = yield
        report: pytest.TestReport = outcome.get_result()
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.when != "call":
            return
        if not isinstance(item, TwoSidedItem):
            if not report.skipped and "trees" in getattr(item, "fixturenames", ()):
                self.ordinary["vllm"] += 1
                self.ordinary["vllm_gaudi"] += not self._without_gaudi(item)
            return
        report.duration = item.result.get("duration", report.duration)
        self.done.append(
            {
                "test": item.nodeid,
                "fix": item.fix,
                "release": item.group.release,
                "state": item.group.state,
                "level": item.level,
                "needs": sorted(item.group.needs),
                "red": item.red is not None,
                "outcome": report.outcome,
                "reason": item.result.get("reason", ""),
                "packages": sorted(item.result.get("packages", ())),
                "duration": round(report.duration, 3),
            }
        )

    def _without_gaudi(self, item: pytest.Item) -> bool:
        given = getattr(getattr(item, "callspec", None), "params", {}).values()
        return any(
            "vllm_gaudi" in self.trees.stock(value).missing
            for value in given
            if isinstance(value, str) and value in self.trees.releases
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """How much ran on what, and what did not run."""
        if not self.done and not self.ordinary and not self.skipped:
            return
        ran = [test for test in self.done if test["outcome"] != "skipped"]
        real = Counter(name for test in ran for name in test["packages"]) + self.ordinary
        # A test of the stand-in alone needs the engine's environment, and no engine.
        engine = sum("engine" in t["needs"] and "vllm_gaudi" in t["packages"] for t in ran)
        terminalreporter.section("real packages")
        terminalreporter.line(
            f"ran on real vllm: {real['vllm']}, on real vllm-gaudi: {real['vllm_gaudi']}, "
            f"of these on the emulated engine: {engine}"
        )
        terminalreporter.line(f"skipped: {sum(self.skipped.values())}")
        for reason, count in self.skipped.most_common():
            terminalreporter.line(f"  {count:4} {reason}")


def _absence(tree: Tree, package: str) -> str:
    return f"{package} of {tree.release} is not at hand: {tree.missing[package]}"


def _all(nodeids: Iterable[str], **result: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(nodeids, result)


def _excused(nodeids: Iterable[str], reason: str) -> dict[str, dict[str, Any]]:
    """Tests that this machine cannot run: a red one may skip for that, and for nothing else."""
    return _all(nodeids, outcome="skipped", reason=reason, excused=True)


def _read_report(path: Path) -> tuple[dict[str, dict[str, Any]], bool, str]:
    """Results by test, whether the report is whole, and the test that was running at its end."""
    results: dict[str, dict[str, Any]] = {}
    ended, last = False, ""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by the crash
            break
        last = entry.get("started", "" if "finished" in entry else last)
        ended = ended or "complete" in entry
        if "finished" in entry:
            results[entry.pop("finished")] = entry
    return results, ended, last


def _kill_group(pid: int) -> None:
    """Kill a child process and the workers it may have left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _await_group(pid: int) -> None:
    """Give killed workers the time to let go of their files."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        for _ in range(50):
            os.killpg(pid, 0)
            time.sleep(0.1)


# -- the plugin ------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the results go."""
    group = parser.getgroup("two-sided tests")
    group.addoption("--results", metavar="FILE", help="results as JSON (build/test-results.json)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks; in a child process that is all."""
    for line in marks.USAGE.values():
        config.addinivalue_line("markers", line)
    if child.VARIABLE not in os.environ:
        trees = config.stash[trees_key] = Trees(config.rootpath)
        absence.check(trees.releases)
        plugin = config.stash[plugin_key] = TwoSided(config, trees)
        config.pluginmanager.register(plugin)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Our own kind of module, except in a child process."""
    if child.VARIABLE in os.environ:
        return None
    return TwoSidedModule.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def trees(pytestconfig: pytest.Config) -> Trees:
    """Real packages to test on. A test that uses this fixture counts as one on real packages."""
    return pytestconfig.stash[trees_key]
