"""The runs that are broken: a state of a world, the words of a run, and what it makes of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fixes.applier import overlay
from tests.applier.faults import in_child
from tests.applier.world import Ran, World
from tests.faults.calls import Call, Calls

STATE = "vllm/.gaudi-fix-pack"
Snapshot = Mapping[str, tuple[object, ...]]


@dataclass(frozen=True)
class Kind:
    """``before`` has been applied when the run with ``words`` begins, or was killed there.

    ``killed`` is a run that died before this one, and the file after whose renaming it did.
    """

    before: tuple[str, ...] | None
    words: tuple[str, ...]
    killed: tuple[tuple[str, ...], str] | None = None


KINDS = {
    "apply": Kind(None, ("delta",)),
    "change of set": Kind(("delta",), ("--without", "alpha")),
    "revert": Kind(("delta",), ("--revert",)),
    "overlay": Kind(None, ("delta", "--overlay", "OVERLAYS")),
    "rolling a change back": Kind(("delta",), ("--status",), (("--without", "alpha"), "runner.py")),
    "finishing an apply": Kind(None, ("--status",), (("delta",), "manifest.json")),
    "applying over a dead run": Kind(None, ("delta",), (("--without", "alpha"), "engine.py")),
}


class Scenario:
    """A world before a run, to be laid out as often as one likes, always at the same place.

    ``owner`` has one of the files that are rewritten.
    """

    def __init__(self, name: str, home: World, folder: Path, owner: int | None = None) -> None:
        self.owner = owner
        self.kind = KINDS[name]
        self.world = home
        self.overlays = home.site.with_name("overlays")
        self.roots = [home.site, self.overlays]
        self.words = tuple(w.replace("OVERLAYS", str(self.overlays)) for w in self.kind.words)
        shutil.rmtree(self.overlays, ignore_errors=True)
        self._image = folder / "image"
        if not self._image.exists():
            shutil.copytree(home.site, self._image, symlinks=True)
        self._start = Path(tempfile.mkdtemp(dir=folder)) / "start"
        self._lay(self._image)
        if self.kind.before is not None:
            assert self._go(self.kind.before).code == 0
        before = self.look()
        if self.kind.killed is not None:
            words, place = self.kind.killed
            self._kill(words, place)
        shutil.copytree(home.site, self._start, symlinks=True)
        self.start, self.start_state = self.look(), home.snapshot(state=True)
        calls = Calls(self.roots)
        with calls.watched():
            assert self.run().code == 0
        self.calls: Sequence[Call] = calls.log
        self.end = self.look()
        # What a file may hold at any moment: what it held before all, or what a run made of it.
        self.contents = [before, self.end, self.start]

    def _kill(self, words: tuple[str, ...], place: str) -> None:
        def die(call: Call, args: object, result: object) -> None:
            if call.name == "replace" and os.path.basename(call.path) == place:
                os.kill(os.getpid(), signal.SIGKILL)

        def until_then() -> None:
            with Calls(self.roots, observe=die).watched():
                self._go(words)

        assert in_child(until_then) == -signal.SIGKILL

    def _lay(self, tree: Path) -> None:
        shutil.rmtree(self.world.site)
        shutil.copytree(tree, self.world.site, symlinks=True)
        if self.owner is not None:
            os.chown(self.world.site / "vllm" / "engine.py", self.owner, self.owner)

    def lay_out(self) -> None:
        """Put the world as it is before the run."""
        self._lay(self._start)
        shutil.rmtree(self.overlays, ignore_errors=True)

    def _go(self, words: Sequence[str]) -> Ran:
        other = {"--status", "--revert"} & set(words)
        return self.world.run(*words, "--lock-timeout", "1", profile=None if other else "v1.0.0")

    def run(self) -> Ran:
        """The run, unbroken."""
        return self._go(self.words)

    def look(self) -> Snapshot:
        """The packages' files and the overlay that is current, without times: those of rewritten
        files are the run's own."""
        found = self.world.snapshot()
        current = self.overlays / "current"
        for path in current.rglob("*") if current.exists() else ():
            if path.name == overlay.NAME:
                continue  # it holds what differs from run to run
            content = (
                os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
            )
            found[f"overlay/{path.relative_to(current)}"] = (content,)
        return found

    def touched(self) -> bool:
        """Is anything another than before the run, in the packages, the state or the overlays?

        The empty folder of a run whose locking failed is nothing: another may hold that lock.
        """
        now = self.world.snapshot(state=True)
        more = set(now) - set(self.start_state)
        if more == {STATE, f"{STATE}/lock"}:
            now = {name: facts for name, facts in now.items() if name not in more}
        return now != self.start_state or self.overlays.exists()

    def wrong_files(self) -> Iterator[str]:
        """Files that are neither as they were nor as they become."""
        now = self.look()
        for name in {*now, *self.start, *self.end}:
            allowed = [content.get(name) for content in self.contents]
            if now.get(name) not in allowed and not name.endswith("~"):
                yield f"{name} is neither as before nor as after"

    def untidy(self) -> Iterator[str]:
        """Temporary files, and a lock that somebody holds."""
        half_built = list(self.overlays.glob(".*"))
        if half_built:  # another pod may be building it: it goes when it is old, with a next build
            for path in half_built:
                os.utime(path, (0, 0), follow_symlinks=False)
            self._go([*self.words, "--without", "beta"])
        for path in [*self.world.site.rglob("*~"), *self.overlays.glob(".*")]:
            yield f"{path} was left"
        lock = self.world.site / "vllm" / ".gaudi-fix-pack" / "lock"
        if lock.exists():
            with lock.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield "the lock is held"
