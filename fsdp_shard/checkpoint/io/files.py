"""Reads and writes byte ranges of files, and keeps the files of a checkpoint open."""

import fcntl
import mmap
import os
import resource
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

import xxhash

from fsdp_shard.checkpoint.io.members import member
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import open_regular, read_range

_LARGE_BYTES = 64 << 10  # less than what malloc maps on its own
_MAX_READ = 1 << 30  # one preadv moves at most 2 GiB - 4 KiB on Linux
_WRITE_BYTES = 512 << 10  # for larger writes, Linux uses larger pages, which can cost a multiple
_FICLONERANGE = 0x4020940D  # of <linux/fs.h>; architectures with another number reject this one


def page_aligned(num_bytes: int) -> memoryview:
    """Return zeroed memory for reading a file, page-aligned if it is large.

    A large bytearray or numpy array begins 16 bytes after a page boundary, and the kernel's copy of whole pages to such
    an address takes seven times as long on AMD's processors
    (docs/benchmarks.md#behind-the-decisions).
    """
    return memoryview(mmap.mmap(-1, num_bytes) if num_bytes >= _LARGE_BYTES else bytearray(num_bytes))


def pread_into(descriptor: int, offset: int, out: memoryview) -> int:
    """Fill `out` from `offset`; return the number of bytes read, which is smaller only at the end of the file."""
    done, total = 0, len(out)
    while done < total:
        count = os.preadv(descriptor, [out[done : done + _MAX_READ]], offset + done)
        if not count:
            break
        done += count
    return done


def pwrite_all(descriptor: int, offset: int, data: memoryview) -> None:
    """Write all of `data` at `offset`."""
    for start, stop in split_aligned(offset, offset + len(data), _WRITE_BYTES):
        while start < stop:
            start += os.pwrite(descriptor, data[start - offset : stop - offset], start)


def split_aligned(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Split [start, stop) at the multiples of `size`.

    Linux makes a file's pages as large as the alignment of writes allows; few large pages are fast.
    """
    while start < stop:
        end = min(start - start % size + size, stop)
        yield start, end
        start = end


class _ReplacedError(CheckpointError):
    """Another file has the name of one that was read earlier."""


class FilePool:
    """Open files by name, at most `MAX_FILES` and at most a quarter of the process's limit (`ulimit -n`).

    Each tensor of a thousand ranks is read file after file. If the files cannot all stay open, the most recently used
    one is closed: least-recently-used would close each file just before it is read again. If no more can be opened, all
    pools of this process close their idle files. Thread-safe.
    """

    MAX_FILES = 16_384
    _all: ClassVar[WeakSet["FilePool"]] = WeakSet()
    _all_lock: ClassVar = threading.Lock()

    def __init__(self, open_file: Callable[[str], int]) -> None:
        self._open = open_file
        self._handles: dict[str, int] = {}  # the most recently used one last
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_files = self.MAX_FILES if allowed < 0 else max(min(self.MAX_FILES, allowed // 4), 1)
        with self._all_lock:
            self._all.add(self)

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """Yield the descriptor of file `name`, which stays open within the block."""
        with self._lock:
            handle = self._handles.pop(name, None)
            if handle is None:
                self._close_idle(self._max_files - 1)
                try:
                    handle = self._open(name)
                except _ReplacedError:
                    raise
                except (CheckpointError, OSError):  # this process may have reached its limit of open files
                    with self._all_lock:
                        others = [each for each in self._all if each is not self]
                    if not sum([self._close_idle(0), *(each._give_up() for each in others)]):
                        raise
                    handle = self._open(name)
            self._handles[name] = handle
            self._users[name] += 1
        try:
            yield handle
        finally:
            with self._lock:
                self._users[name] -= 1

    def _close_idle(self, num_kept: int) -> int:
        """Close idle files until at most `num_kept` are open; return how many were closed."""
        idle = [name for name in reversed(self._handles) if not self._users[name]]
        closed = idle[: max(len(self._handles) - num_kept, 0)]
        for name in closed:
            os.close(self._handles.pop(name))
        return len(closed)

    def _give_up(self) -> int:
        """Close idle files; return how many were closed.

        0 while a thread opens a file here, as it may wait for the caller's lock, and the caller for this one.
        """
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            return self._close_idle(0)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close all files; later uses open them again."""
        with self._lock:
            while self._handles:
                os.close(self._handles.popitem()[1])

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class FileHeader:
    """An index's record of a file: bytes of file and header, and the digest (hex) of the header."""

    num_bytes: int
    header_bytes: int
    digest: str


def _compare_header(descriptor: int, path: Path, expected: FileHeader) -> None:
    size = os.fstat(descriptor).st_size
    if size != expected.num_bytes:
        raise CheckpointError(
            f"{path} has {size} bytes, but {expected.num_bytes} according to the index of its directory: it is "
            f"truncated, or of another save."
        )
    header = read_range(descriptor, 0, expected.header_bytes, f"the header of {path}", "metadata_bytes")
    if xxhash.xxh3_128_hexdigest(header) != expected.digest:
        raise CheckpointError(
            f"the header of {path} is not the one that the index of its directory was made of: the file was changed, "
            f"renamed, or is of another save."
        )


class Files:
    """Reads ranges of the files of one checkpoint. Thread-safe.

    A reopened file must be the one that was opened first. It is identified by size and modification time: network file
    systems may change the inode number of a closed file.

    Args:
        root: The directory of the files.
        headers: The headers that an index records for some of the files; each is compared once, when its file is first
            opened.
    """

    def __init__(self, root: Path, headers: Mapping[str, FileHeader] | None = None) -> None:
        self._root, self._headers = root, headers or {}
        self._known: dict[str, tuple[int, int]] = {}  # size and modification time
        self._pool = FilePool(self.open)

    def open(self, name: str) -> int:
        """Open a file for reading, compare it with its record, and return the descriptor.

        Raises:
            CheckpointError: The file is missing, has another header, or was replaced since it was first opened.
        """
        path = member(self._root, name)
        descriptor = open_regular(path)
        try:
            found = os.fstat(descriptor)
            state = found.st_size, found.st_mtime_ns
            if name not in self._known and name in self._headers:
                _compare_header(descriptor, path, self._headers[name])
            if self._known.setdefault(name, state) != state:
                raise _ReplacedError(
                    f"{path} was replaced or written to while the checkpoint was read, so the rest of it is of another "
                    f"save; read it again from the start, as by loading the model again."
                )
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def remember(self, name: str) -> None:
        """Record a file that was not opened yet as the one to read, as if it had been opened."""
        if name not in self._known:
            os.close(self.open(name))

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of file `name` from `offset`; raise CheckpointError if the file is too short."""
        try:
            with self._pool.use(name) as handle:
                count = pread_into(handle, offset, out)
        except OSError as error:
            raise CheckpointError(f"{self._root / name} cannot be read: {error.strerror}.") from None
        if count != len(out):
            raise CheckpointError(
                f"{self._root / name} ends at byte {offset + count}, but a tensor in it ends at byte "
                f"{offset + len(out)}: the file is truncated."
            )

    def clone(self, name: str, offset: int, num_bytes: int, target: int, at: int) -> bool:
        """Make the descriptor `target`, from byte `at`, share the blocks of a range of file `name` until written to.

        Returns:
            Whether the file system supports that for these files.
        """
        with self._pool.use(name) as handle:
            try:  # ioctl_ficlonerange(2); XFS, btrfs
                fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", handle, offset, num_bytes, at))
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Close all files."""
        self._pool.close()
