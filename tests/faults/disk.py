"""What a disk may hold after a power loss: of what was not synced, any part may be missing.

A file or a folder is worth what it was at its last ``fsync``, or at any moment since. Names belong
to the folder, so a renamed file is in place only when its folder says so, and holds only what was
synced of itself.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.calls import Call


@dataclass(frozen=True)
class File:
    """What a file is at one moment."""

    data: bytes = b""
    mode: int = 0o600
    mtime_ns: int = 0


# A folder at one moment is its names, a link its text.
Value = File | dict[str, "Node"] | str


@dataclass
class Node:
    """A file, folder or link: its values with the moments from which they hold, and its syncs."""

    values: list[tuple[int, Any]]
    synced: list[int] = field(default_factory=list)

    @property
    def now(self) -> Any:
        """The newest value."""
        return self.values[-1][1]

    def at(self, moment: int) -> Any:
        """The value that held at a moment."""
        return next(value for since, value in reversed(self.values) if since <= moment)

    def last_sync(self, moment: int) -> int:
        """When it was last safe."""
        return max((at for at in self.synced if at <= moment), default=self.values[0][0])


# Which moment survives of a node, of which all since the first might, up to the second.
Choice = Callable[[Node, int, int], int]


def nothing_unsynced(node: Node, safe: int, moment: int) -> int:
    """Everything after the last sync is lost."""
    return safe


def names_without_content(node: Node, safe: int, moment: int) -> int:
    """What file systems without ordered data do: the name is there, the content is not."""
    return moment if isinstance(node.now, dict) else safe


def any_part(seed: object) -> Choice:
    """A part of it, by chance."""
    chance = random.Random(repr(seed))
    return lambda node, safe, moment: chance.randint(safe, moment)


class Disk:
    """The folders below a root, as the calls of a run change them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.moment = 0
        self.top = self._load(root)
        self.open: dict[int, Node] = {}

    def _load(self, path: Path) -> Node:
        if path.is_symlink():
            return Node([(0, os.readlink(path))], [0])
        if path.is_dir():
            return Node([(0, {p.name: self._load(p) for p in path.iterdir()})], [0])
        stat = path.stat()
        return Node([(0, File(path.read_bytes(), stat.st_mode & 0o7777, stat.st_mtime_ns))], [0])

    def _node(self, path: str) -> Node:
        node = self.top
        for part in Path(path).relative_to(self.root).parts:
            node = node.now[part]
        return node

    def _set(self, node: Node, value: Any) -> None:
        node.values.append((self.moment, value))

    def _name(self, path: str, node: Node | None) -> None:
        folder, name = os.path.split(path)
        parent = self._node(folder)
        names = {key: value for key, value in parent.now.items() if key != name}
        self._set(parent, {**names, name: node} if node else names)

    def _has(self, path: str) -> bool:
        folder, name = os.path.split(path)
        return name in self._node(folder).now

    def saw(self, call: Call, args: tuple[Any, ...], result: Any) -> None:
        """One call that succeeded."""
        self.moment += call.changes
        name, path = call.name, call.path
        if name == "open":
            if call.changes and not self._has(path):
                self._name(path, Node([(self.moment, File())]))
            self.open[result] = self._node(path)
        elif name == "close":
            del self.open[args[0]]
        elif name == "write":
            node = self.open[args[0]]
            old: File = node.now
            self._set(node, File(old.data + bytes(args[1])[:result], old.mode, old.mtime_ns))
        elif name in ("fchmod", "chmod", "utime"):
            node = self.open[args[0]] if isinstance(args[0], int) else self._node(path)
            if isinstance(node.now, File):
                mode = node.now.mode if name == "utime" else args[1]
                self._set(node, File(node.now.data, mode, node.now.mtime_ns))
        elif name == "fsync":
            self.open[args[0]].synced.append(self.moment)
        elif name in ("rename", "replace"):
            node = self._node(os.fspath(args[0]))
            self._name(os.fspath(args[0]), None)
            self._name(path, node)
        elif name in ("unlink", "rmdir"):
            self._name(path, None)
        elif name == "mkdir":
            self._name(path, Node([(self.moment, {})]))
        elif name == "symlink":
            self._name(path, Node([(self.moment, os.fspath(args[0]))]))
        elif call.changes:
            raise NotImplementedError(f"the model does not know {call}")

    def write_out(self, moment: int, choice: Choice) -> None:
        """Put what survived of a power loss at a moment in the root's place."""
        shutil.rmtree(self.root)
        self._write(self.root, self.top, moment, choice)

    def _write(self, path: Path, node: Node, moment: int, choice: Choice) -> None:
        value = node.at(choice(node, node.last_sync(moment), moment))
        if isinstance(value, str):
            path.symlink_to(value)
        elif isinstance(value, File):
            path.write_bytes(value.data)
            path.chmod(value.mode)
            os.utime(path, ns=(value.mtime_ns, value.mtime_ns))
        else:
            path.mkdir()
            for name, inner in value.items():
                self._write(path / name, inner, moment, choice)
