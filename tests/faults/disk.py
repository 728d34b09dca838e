"""A layer over the functions by which Python changes a disk: it writes down what they do, or makes one of them fail.

`Disk` replays such a trace and shows what a power cut may leave after any part of it: what was not synced is there, or
not, or is zeros; a name that was given or taken since its directory was last synced is there or not; each on its own.
"""

from __future__ import annotations

import builtins
import fcntl
import functools
import io
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Operation = tuple[int, str, tuple[Any, ...]]  # time, name, arguments
Fail = Callable[[str, str], int | None]  # (operation, path) -> errno


@contextmanager
def layer(root: Path, trace: list[Operation] | None = None, fail: Fail = lambda name, path: None) -> Iterator[None]:
    """Write down what happens below `root` in this process, and raise an OSError where `fail` gives an errno."""
    below = os.path.realpath(root)
    real = {name: getattr(os, name) for name in ("open", "pwrite", "truncate", "fsync", "rename", "replace", "mkdir")}
    real |= {"unlink": os.unlink, "rmdir": os.rmdir, "write": os.write}
    real_open = builtins.open
    turns = real["open"](f"{below}.turns", os.O_CREAT | os.O_RDWR) if trace is not None else None
    turn = threading.Lock()

    def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
        """One operation of one process at a time: what is noted then has the order in which it happened."""

        @functools.wraps(function)
        def taking_turns(*arguments: Any, **named: Any) -> Any:
            if turns is None:
                return function(*arguments, **named)
            with turn:
                fcntl.flock(turns, fcntl.LOCK_EX)
                try:
                    return function(*arguments, **named)
                finally:
                    fcntl.flock(turns, fcntl.LOCK_UN)

        return taking_turns

    def place(path: Any, dir_fd: int | None = None) -> str:
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
        return os.path.join(base, os.fspath(path))

    def note(name: str, path: str, *arguments: Any) -> None:
        if trace is not None and path.startswith(below):
            trace.append((time.monotonic_ns(), name, (path, *arguments)))

    def check(name: str, path: str) -> None:
        if path.startswith(below) and (number := fail(name, path)) is not None:
            raise OSError(number, os.strerror(number), None if name in ("pwrite", "fsync", "truncate") else path)

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = place(path, dir_fd)
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(where)
        if is_new:
            check("create", where)
        descriptor: int = real["open"](path, flags, mode, dir_fd=dir_fd)
        if is_new:
            note("create", where)
        return descriptor

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        where = place(descriptor)
        check("pwrite", where)
        done: int = real["pwrite"](descriptor, data, offset)
        note("pwrite", where, offset, bytes(memoryview(data).cast("B")[:done]))
        return done

    def truncate(path: Any, length: int) -> None:
        where = place(path)
        check("truncate", where)
        real["truncate"](path, length)
        note("truncate", where, length)

    def fsync(descriptor: int) -> None:
        where = place(descriptor)
        check("fsync", where)
        real["fsync"](descriptor)
        note("fsync", where)

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        where = place(path, dir_fd)
        check("mkdir", where)
        real["mkdir"](path, mode, dir_fd=dir_fd)
        note("mkdir", where)

    def moving(name: str) -> Callable[[Any, Any], None]:
        def move(source: Any, target: Any) -> None:
            one, other = place(source), place(target)
            check("rename", one)
            real[name](source, target)
            note("rename", one, other)

        return move

    def removing(name: str) -> Callable[..., None]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            where = place(path, dir_fd)
            check("remove", where)
            real[name](path, dir_fd=dir_fd)
            note("remove", where)

        return remove

    class Raw(io.FileIO):
        """A file that Python's own `open` writes through."""

        def write(self, data: Any) -> int:
            return pwrite_here(self, bytes(data))

    def pwrite_here(file: io.FileIO, data: bytes) -> int:
        offset = file.tell()
        done: int = os.pwrite(file.fileno(), data, offset)
        file.seek(offset + done)
        return done

    def open_file(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if isinstance(file, int) or set(mode) & {"r", "a", "+"}:
            return real_open(file, mode, *arguments, **named)
        where = place(file)
        check("create", where)
        is_new = not os.path.lexists(where)
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        note("create" if is_new else "truncate", where, *(() if is_new else (0,)))
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=named.get("encoding"))

    fake: dict[str, Callable[..., Any]] = {
        "open": open_,
        "pwrite": pwrite,
        "truncate": truncate,
        "fsync": fsync,
        "mkdir": mkdir,
    }
    fake |= {"rename": moving("rename"), "replace": moving("replace")}
    fake |= {"unlink": removing("unlink"), "rmdir": removing("rmdir")}
    for name, function in fake.items():
        setattr(os, name, in_turn(function))
    builtins.open = io.open = in_turn(open_file)
    try:
        yield
    finally:
        for name in fake:
            setattr(os, name, real[name])
        builtins.open = io.open = real_open
        if turns is not None:
            os.close(turns)


class _File:
    def __init__(self) -> None:
        self.now = bytearray()
        self.synced = b""
        self.unsynced: list[tuple[int, int]] = []

    def content(self, choice: str) -> bytes:
        if choice == "dropped":
            return self.synced
        content = bytearray(self.now)
        if choice == "zeroed":
            for start, end in self.unsynced:
                content[start:end] = bytes(len(content[start:end]))
        return bytes(content)


class _Directory:
    def __init__(self) -> None:
        self.now: dict[str, _File | _Directory] = {}
        self.synced: dict[str, _File | _Directory] = {}


class Disk:
    """The disk below `root` while a trace is replayed."""

    def __init__(self, root: Path) -> None:
        self._root, self._top = os.path.realpath(root), _Directory()

    def apply(self, operation: Operation) -> None:
        _, name, (path, *arguments) = operation
        parent, leaf = self._find(path)
        node = parent.now.get(leaf) if leaf else self._top
        if name == "create":
            parent.now[leaf] = _File()
        elif name == "mkdir":
            parent.now[leaf] = _Directory()
        elif name == "remove":
            del parent.now[leaf]
        elif name == "rename":
            other, new = self._find(arguments[0])
            other.now[new] = parent.now.pop(leaf)
        elif name == "fsync" and isinstance(node, _File):
            node.synced, node.unsynced = bytes(node.now), []
        elif name == "fsync" and isinstance(node, _Directory):
            node.synced = dict(node.now)
        elif name == "truncate":
            assert isinstance(node, _File)
            length = arguments[0]
            node.unsynced.append((min(len(node.now), length), length))
            node.now = node.now[:length].ljust(length, b"\0")
        else:
            assert name == "pwrite", name
            assert isinstance(node, _File)
            offset, data = arguments
            node.now = node.now.ljust(offset + len(data), b"\0")
            node.now[offset : offset + len(data)] = data
            node.unsynced.append((offset, offset + len(data)))

    def leave(self, target: Path, names: str, data: str, chance: random.Random) -> None:
        """Make `target` what a power cut now may leave; `names` is now or synced, `data` now, dropped or zeroed.

        For either, "any" chooses for each directory or file.
        """
        self._leave(self._top, target, names, data, chance)

    def _leave(self, node: _Directory, target: Path, names: str, data: str, chance: random.Random) -> None:
        target.mkdir()
        which = chance.choice(("now", "synced")) if names == "any" else names
        for name, child in (node.now if which == "now" else node.synced).items():
            if isinstance(child, _Directory):
                self._leave(child, target / name, names, data, chance)
            else:
                choice = chance.choice(("now", "dropped", "zeroed")) if data == "any" else data
                (target / name).write_bytes(child.content(choice))

    def _find(self, path: str) -> tuple[_Directory, str]:
        parts = [part for part in path[len(self._root) :].split("/") if part]
        node = self._top
        for part in parts[:-1]:
            child = node.now[part]
            assert isinstance(child, _Directory)
            node = child
        return node, parts[-1] if parts else ""
