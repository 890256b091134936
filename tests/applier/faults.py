"""Make the n-th system call of a run fail, or die in its place."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# What a run calls to change the disk. Reading calls cannot leave anything half done.
WRITING = """
    chmod fchmod fchown fsync link mkdir open rename replace rmdir symlink unlink utime write
"""

_OPEN = os.open


class Counter:
    """Counts the calls, and acts in the place of the n-th (0: only counts)."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self.number = number
        self.act = act
        self.calls = 0
        self.thread = threading.get_ident()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            # Other threads, those that run child processes of the suite, are none of our business.
            looks = function is _OPEN and not args[1] & (os.O_WRONLY | os.O_RDWR)
            if threading.get_ident() == self.thread and not looks:
                self.calls += 1
                if self.calls == self.number:
                    self.act()
            return function(*args, **kwargs)

        return counted


@contextlib.contextmanager
def at_call(number: int, act: Callable[[], None]) -> Iterator[Counter]:
    """Act in the place of the n-th writing call made in the block."""
    counter = Counter(number, act)
    with contextlib.ExitStack() as stack:
        for name in WRITING.split():
            stack.enter_context(mock.patch.object(os, name, counter.wrap(getattr(os, name))))
        yield counter


def die() -> None:
    """What a kernel does to a process that is out of luck."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(run: Callable[[], object]) -> int:
    """Run in a forked process; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def killed_after_placing(name: str, run: Callable[[], object]) -> None:
    """Run in a forked process that is killed as soon as a file of this name is in place."""
    replace = os.replace

    def placed(old: Any, new: Any) -> None:
        replace(old, new)
        if os.path.basename(new) == name:
            die()

    def until_then() -> None:
        os.replace = placed  # type: ignore[assignment]
        run()

    assert in_child(until_then) == -signal.SIGKILL
