"""Opening the files of a checkpoint without being led out of it, and reading byte ranges of them.

Every name that comes out of an index, a manifest or a header passes through `member`. Knows nothing of formats.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import stat
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from fsdp_shard.errors import CheckpointError

_LARGE_BYTES = 64 << 10  # less than what malloc maps on its own
_MAX_READ = 1 << 30  # one preadv moves at most 2 GiB - 4 KiB on Linux
_WRITE_BYTES = 512 << 10  # of more, Linux makes larger pages, which can cost a multiple (docs/decisions.md)
_FICLONERANGE = 0x4020940D  # of <linux/fs.h>; architectures with another number refuse this one


def member(root: Path, name: object) -> Path:
    """The path of file `name` of the checkpoint in `root`, if it stays inside.

    Refused: absolute names, `..`, symbolic links that leave `root`, and whatever is no regular file. Links of a
    Hugging Face hub cache (`models--*/snapshots/REVISION/FILE -> ../../blobs/HASH`) may go as far as `models--*`.
    """
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or not _is_text(name):
        raise CheckpointError(f"{root} names {name!r} as a file, which is no file name.")
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise CheckpointError(f"{root} names the file {name}, which would lie outside the directory; it is not read.")
    path, base = root / pure, root.resolve()
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError):
        raise CheckpointError(f"{path} is missing: the checkpoint names it, but there is no such file.") from None
    if not real.is_relative_to(base) and not real.is_relative_to(_hub_base(base) or base):
        raise CheckpointError(
            f"{path} is a link to {real}, outside the directory; it is not followed. Copy the file in its place."
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a regular file, so it is not read.")
    return path


def _is_text(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _hub_base(root: Path) -> Path | None:
    is_snapshot = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    return root.parent.parent if is_snapshot else None


def has_file(root: Path, name: str) -> bool:
    """Whether `root` has an entry `name` that is a regular file, or a link to one (`member` judges where it leads)."""
    try:
        return stat.S_ISREG((root / name).stat().st_mode)
    except OSError:
        return False


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file; never blocks, also where the path turns out to be a FIFO."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file, so it is not read.")
    return descriptor


def page_aligned(num_bytes: int) -> memoryview:
    """Memory to read a file into; what is large begins at a page.

    A large bytearray or numpy array begins 16 bytes after a page, and there the kernel's copy out of whole pages takes
    seven times as long on AMD's processors (docs/decisions.md).
    """
    return memoryview(mmap.mmap(-1, num_bytes) if num_bytes >= _LARGE_BYTES else bytearray(num_bytes))


def pread_into(descriptor: int, offset: int, out: memoryview) -> int:
    """Fill `out` from `offset` on; returns the bytes read, fewer than asked only at the end of the file."""
    done, total = 0, len(out)
    while done < total:
        count = os.preadv(descriptor, [out[done : done + _MAX_READ]], offset + done)
        if not count:
            break
        done += count
    return done


def pwrite_all(descriptor: int, offset: int, data: memoryview) -> None:
    """Write all of `data` at `offset`."""
    for start, stop in aligned(offset, offset + len(data), _WRITE_BYTES):
        while start < stop:
            start += os.pwrite(descriptor, data[start - offset : stop - offset], start)


def aligned(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in parts that end at multiples of `size`.

    Pages of a file are made as large as what is written to them begins and ends: written so, they are few and large.
    """
    while start < stop:
        end = min(start - start % size + size, stop)
        yield start, end
        start = end


def clone_range(source: int, offset: int, target: int, at: int, num_bytes: int) -> bool:
    """Have a range of one file share the blocks of another's (ioctl_ficlonerange(2); XFS, btrfs), if that can be.

    Whichever file is written to later gets blocks of its own then.
    """
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, offset, num_bytes, at))
    except OSError:
        return False
    return True


def read_json(path: Path, max_bytes: int = 1 << 30) -> Any:
    """The JSON document in a regular file; duplicate keys are refused, since readers disagree on which one counts."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > max_bytes:
            raise CheckpointError(f"{path} is larger than {max_bytes} bytes, so it is not read as JSON.")
        return parse_json(file.read(), str(path))


def parse_json(data: bytes, where: str) -> Any:
    """`json.loads` with one error for all that can be wrong; `where` names the file."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply to be the JSON of a checkpoint.") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    "".join(found).encode()  # half a surrogate pair is no text: a UnicodeEncodeError is a ValueError
    return found


class Handles:
    """Open files by name, at most `MAX_HANDLES` of them: those that nobody uses and that were used longest ago close.

    A checkpoint of thousands of ranks has more files than a process may have open. Safe to use from several threads.
    """

    MAX_HANDLES = 256

    def __init__(self, open_file: Callable[[str], int]) -> None:
        self._open = open_file
        self._handles: dict[str, int] = {}  # the one used last is the last
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """The descriptor of file `name`, which stays open as long as the block runs."""
        with self._lock:
            handle = self._handles.pop(name, None)
            if handle is None:
                self._make_room()
                handle = self._open(name)
            self._handles[name] = handle
            self._users[name] += 1
        try:
            yield handle
        finally:
            with self._lock:
                self._users[name] -= 1

    def _make_room(self) -> None:
        idle = [name for name in self._handles if not self._users[name]]
        for name in idle[: max(len(self._handles) - self.MAX_HANDLES + 1, 0)]:
            os.close(self._handles.pop(name))

    def close(self) -> None:
        with self._lock:
            while self._handles:
                os.close(self._handles.popitem()[1])

    def __del__(self) -> None:
        self.close()


class Files:
    """The files of one checkpoint, to read ranges of. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._handles = Handles(lambda name: open_regular(member(root, name)))

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of file `name` from `offset` on; a short file is a CheckpointError."""
        try:
            with self._handles.use(name) as handle:
                count = pread_into(handle, offset, out)
        except OSError as error:
            raise CheckpointError(f"{self._root / name} cannot be read: {error.strerror}.") from None
        if count != len(out):
            raise CheckpointError(
                f"{self._root / name} ends at byte {offset + count}, but a tensor of it reaches to byte "
                f"{offset + len(out)}: the file was cut short."
            )

    def clone(self, name: str, offset: int, num_bytes: int, target: int, at: int) -> bool:
        """Have a range of the descriptor `target`, from byte `at` on, share the blocks of one of file `name`.

        Whether that was done: not where the file system has no such thing, or the two files are on different ones.
        """
        with self._handles.use(name) as handle:
            return clone_range(handle, offset, target, at, num_bytes)

    def close(self) -> None:
        self._handles.close()
