"""Writing and reading files past the page cache, in whole blocks: the disk moves them, and no core copies them.

That is what a save behind the training wants, whose cores have better things to do. Whoever waits for the disk is done
sooner through the page cache, where more is under way at once. Knows files, no tensors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from fsdp_shard.checkpoint.atomic import naming, start_writeback
from fsdp_shard.checkpoint.files import Handles, copy_bytes, large_pages, pwrite_all

_BLOCK_BYTES = 4096  # offsets and addresses are multiples of it: the largest block of common disks and file systems
_STAGE_BYTES = 4 << 20


Observe = Callable[[memoryview], object]


def ignore(content: memoryview) -> None:
    """Nobody wants to see it."""


class Stage:
    """Memory in which what follows each other in a file is brought together, and out of which it is written.

    It is as far into its block as what it holds is in the file: only so can blocks be written directly.
    """

    def __init__(self) -> None:
        self._memory = large_pages(_STAGE_BYTES)
        self._file: DirectFile | None = None
        self._low = self._end = 0  # of the file: what is held, and not yet written

    def put(self, file: DirectFile, offset: int, content: memoryview, observe: Observe = ignore) -> None:
        """Take over what is to be written at `offset`; whatever else is held is written first, and what is full too.

        `observe` sees it where it then lies: in a cache of this core.
        """
        if file is not self._file or offset != self._end:
            self.write()
            self._file, self._low, self._end = file, offset, offset
        while content:
            room = self._held(self._end, self._low - self._low % _BLOCK_BYTES + _STAGE_BYTES)
            part = content[: len(room)]
            copy_bytes(room[: len(part)], part)
            observe(room[: len(part)])
            self._end, content = self._end + len(part), content[len(part) :]
            if len(part) == len(room):
                self.write()

    def write(self) -> None:
        """Have all that is held in its file."""
        if self._file is not None:
            self._file.write(self._low, self._held(self._low, self._end))
            self._low = self._end

    def _held(self, start: int, stop: int) -> memoryview:
        base = self._low - self._low % _BLOCK_BYTES
        return self._memory[start - base : stop - base]


class DirectFile:
    """A file that is there, at its full size; written as others where it cannot be, or shall not be, past the cache."""

    def __init__(self, path: Path, *, past_cache: bool) -> None:
        self._path = path
        self._cached = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._direct = _open_direct(path, os.O_WRONLY) if past_cache else None

    def write(self, offset: int, content: memoryview) -> None:
        """Whole blocks of what a Stage holds are written directly, what is before and after them through the cache."""
        stop = offset + len(content)
        low = min(offset + -offset % _BLOCK_BYTES, stop)
        high = max(stop - stop % _BLOCK_BYTES, low)
        with naming(self._path):
            self._write_blocks(low, content[low - offset : high - offset])
            pwrite_all(self._cached, offset, content[: low - offset])
            pwrite_all(self._cached, high, content[high - offset :])
        if self._direct is None:
            start_writeback(self._cached, offset, len(content))

    def _write_blocks(self, offset: int, blocks: memoryview) -> None:
        try:
            while blocks and self._direct is not None:
                count = os.pwrite(self._direct, blocks, offset)
                offset, blocks = offset + count, blocks[count:]
        except OSError as error:
            if error.errno != errno.EINVAL:  # blocks are larger here, or memory has to be aligned otherwise
                raise
            self._close_direct()
        pwrite_all(self._cached, offset, blocks)

    def sync(self) -> None:
        """Have all that was written on the disk."""
        with naming(self._path):
            os.fsync(self._cached)

    def close(self) -> None:
        os.close(self._cached)
        self._close_direct()

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


class BlockReader:
    """Reads files of `directory`, at most `max_bytes` at a time; as others do where it cannot, or shall not, do so past
    the cache.
    """

    def __init__(self, directory: Path, max_bytes: int, *, past_cache: bool) -> None:
        self._directory, self._past_cache = directory, past_cache
        self._memory = large_pages(max_bytes + 2 * _BLOCK_BYTES)
        self._handles = Handles(self._open)

    def read(self, name: str, offset: int, num_bytes: int) -> memoryview:
        """Good until the next call. An OSError names the file, also where that ends too early."""
        path, first = self._directory / name, offset % _BLOCK_BYTES
        with naming(path):
            try:
                found = self._read_blocks(name, offset - first, first + num_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._past_cache:  # as in `DirectFile`
                    raise
                self.close()
                self._past_cache = False
                found = self._read_blocks(name, offset - first, first + num_bytes)
            if found < first + num_bytes:
                raise OSError(errno.EIO, f"ends {first + num_bytes - found} bytes before what was written there")
        return self._memory[first : first + num_bytes]

    def _read_blocks(self, name: str, offset: int, num_bytes: int) -> int:
        blocks, found = self._memory[: num_bytes + -num_bytes % _BLOCK_BYTES], 0
        with self._handles.use(name) as handle:
            while found < num_bytes and (count := os.preadv(handle, [blocks[found:]], offset + found)):
                found += count
        return found

    def _open(self, name: str) -> int:
        path = self._directory / name
        direct = _open_direct(path, os.O_RDONLY) if self._past_cache else None
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if direct is None else direct

    def close(self) -> None:
        self._handles.close()


def _open_direct(path: Path, mode: int) -> int | None:
    """None where the system or the file system has no such thing."""
    if (flag := getattr(os, "O_DIRECT", None)) is None:
        return None
    try:
        return os.open(path, mode | os.O_CLOEXEC | flag)
    except OSError:
        return None
