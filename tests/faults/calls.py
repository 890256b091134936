"""Every operating-system call that a run makes on some folders: counted, and one of them failing.

The functions of :mod:`os`, `flock` and the files that `open` gives are replaced by counting ones.
What the interpreter does for itself (imports, finding packages) is not part of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

LOOKING = "access fstat getxattr listdir listxattr lstat readlink scandir stat"
CHANGING = """
    chmod fchmod fchown fsync link mkdir rename replace rmdir setxattr symlink truncate unlink utime
    write
"""
_FUNCTIONS = f"{LOOKING} {CHANGING} close open read".split()
_TWO_PATHS = ("link", "rename", "replace")


@dataclass(frozen=True)
class Call:
    """One call: its function and what it is about, a path or the path behind a descriptor."""

    name: str
    path: str
    changes: bool

    def __str__(self) -> str:
        return f"{self.name}({self.path})"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at one call; ``at`` says which calls it can happen to."""

    name: str
    at: Callable[[Call], bool]


def _takes_space(call: Call) -> bool:
    return call.changes and call.name not in ("unlink", "rmdir", "fchmod", "chmod", "utime")


def _by_path(call: Call) -> bool:
    # That a file may not be given away is no fault: the run goes on and says so.
    return call.name not in ("read", "write", "fsync", "fstat", "close", "flock", "fchown")


def _may_wait(call: Call) -> bool:
    return call.name in ("open", "read", "write", "fsync", "flock", "close")


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("EIO", lambda call: True),
        Fault("ENOSPC", _takes_space),
        Fault("EACCES", _by_path),
        Fault("EROFS", lambda call: call.changes and _by_path(call)),
        Fault("EINTR", _may_wait),
        Fault("memory", lambda call: call.changes or call.name in ("read", "listdir", "scandir")),
        Fault("short", lambda call: call.name in ("read", "write")),
        Fault("killed before", lambda call: call.changes),
        Fault("killed after", lambda call: call.changes),
    )
}


class Calls:
    """Counts the calls below some folders; at the ``number``-th, counted from 1, ``fault`` happens.

    ``observe`` is told each call that succeeded, with its arguments and its result.
    """

    def __init__(
        self,
        roots: list[Path],
        number: int = 0,
        fault: str = "",
        observe: Callable[[Call, tuple[Any, ...], Any], None] | None = None,
    ) -> None:
        self.roots = tuple(f"{root}/" for root in roots)
        self.number = number
        self.fault = fault
        self.observe = observe
        self.log: list[Call] = []
        self.open: dict[int, str] = {}
        self._thread = threading.get_ident()
        self._inside = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[Calls]:
        """Watch what is called in the block, by this thread."""
        with contextlib.ExitStack() as stack:

            def put(module: Any, name: str, by: Callable[..., Any]) -> None:
                stack.enter_context(mock.patch.object(module, name, by))

            real_open = io.open
            for name in _FUNCTIONS:
                put(os, name, self._counting(name, getattr(os, name)))
            put(fcntl, "flock", self._counting("flock", fcntl.flock))

            def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
                return self._opened(real_open, file, mode, *args, **more)

            put(io, "open", opened)
            stack.enter_context(mock.patch("builtins.open", opened))
            yield self

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            about = self._about(name, args, kwargs)
            if about is None:
                return function(*args, **kwargs)
            return self.call(name, about, function, args, kwargs)

        return counted

    def _about(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The path that a call is about, if it is one of those that are counted."""
        if threading.get_ident() != self._thread or self._inside or not args:
            return None
        if isinstance(args[0], int):
            return self.open.get(args[0])
        path = os.fsdecode(args[1] if name in ("symlink", *_TWO_PATHS) else args[0])
        folder = kwargs.get("dir_fd")
        if folder is not None:
            path = f"{self.open.get(folder, '')}/{path}"
        return path if path.startswith(self.roots) else None

    def call(
        self,
        name: str,
        path: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make a call, or what happens in its place."""
        changes = name in CHANGING.split() or (name == "open" and bool(args[1] & _WRITES))
        call = Call(name, path, changes)
        self.log.append(call)
        now = len(self.log) == self.number
        if now and self.fault == "killed before":
            os.kill(os.getpid(), signal.SIGKILL)
        if now and self.fault == "short":
            args = (args[0], _half(name, args[1]))
        elif now and self.fault != "killed after":
            if name == "close":
                function(*args)  # a close that fails has closed the file all the same
                self.open.pop(args[0], None)
            if self.fault == "memory":
                raise MemoryError
            code = getattr(errno, self.fault)
            raise OSError(code, os.strerror(code), path)
        self._inside = True
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside = False
            if now and self.fault == "killed after":
                os.kill(os.getpid(), signal.SIGKILL)
        if name == "open":
            self.open[result] = path
        if name == "close":
            self.open.pop(args[0], None)
        if self.observe is not None:
            self.observe(call, args, result)
        return result

    def _opened(self, real: Any, file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        """What `open` gives, its calls counted. Of its ways only those that the applier uses."""
        if isinstance(file, int):
            descriptor = file if file in self.open else None
        elif self._about("open", (os.fspath(file),), {}) is None:
            descriptor = None
        else:
            writes = "w" in mode or "x" in mode
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if writes else os.O_RDONLY
            descriptor = os.open(file, flags | os.O_CLOEXEC, 0o666)
        if descriptor is None:
            return real(file, mode, *args, **more)
        raw = _File(descriptor, "rb" if "r" in mode else "wb")
        buffered = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = {key: value for key, value in more.items() if key in ("encoding", "errors")}
        return io.TextIOWrapper(buffered, **text)


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _half(name: str, argument: Any) -> Any:
    return max(1, argument // 2) if name == "read" else argument[: max(1, len(argument) // 2)]


class _File(io.FileIO):
    """A file whose reading, writing and closing go through `os`, where they are counted."""

    def __init__(self, descriptor: int, mode: str) -> None:
        try:
            super().__init__(descriptor, mode, closefd=False)
        except OSError:  # a folder
            os.close(descriptor)
            raise

    def readall(self) -> bytes:
        parts = []
        while part := os.read(self.fileno(), 1 << 20):
            parts.append(part)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        data = os.read(self.fileno(), len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def close(self) -> None:
        if not self.closed:
            descriptor = self.fileno()
            super().close()
            os.close(descriptor)
