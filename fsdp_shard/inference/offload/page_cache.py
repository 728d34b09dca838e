"""Populates pages of mapped files ahead of their reader, and drops them after use.

Populating is left to the kernel (`MADV_POPULATE_READ`, Linux 5.14), which fills the page cache and this process's page
table at once and needs little processor time; two threads keep the disk busy (docs/decisions.md). On older kernels the
files are read into a small buffer that is discarded.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from fsdp_shard.checkpoint import pread_into

PART_BYTES = 4 << 20
_NUM_THREADS = 2
_POPULATE_READ = 22

_local = threading.local()

# Functions of the C library for mapped memory, with the types of their arguments.
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


@dataclass(frozen=True)
class FilePages:
    """The bytes [start, stop) of a file's mapping; `owner` keeps mapping and descriptor, `address` points to byte 0."""

    owner: object
    descriptor: int
    address: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def parts(self) -> "list[FilePages]":
        """Divide the range into parts of a few MB."""
        starts = range(self.start, self.stop, PART_BYTES)
        return [replace(self, start=start, stop=min(start + PART_BYTES, self.stop)) for start in starts]

    def is_resident(self) -> bool:
        """Whether a part is in the page cache, judged by its middle page, because the others come and go with it.

        Checking all pages would take a tenth of a block's compute time.
        """
        middle = _down((self.start + self.stop) // 2)
        found = ctypes.c_ubyte()
        if libc.mincore(self.address + middle, 1, ctypes.byref(found)) != 0:
            return True  # unknown; a page fault reads it if not
        return bool(found.value & 1)

    def advise_huge(self) -> None:
        """Request huge pages for the mapping, whose page tables are fast to create and to look up."""
        self._advise(mmap.MADV_HUGEPAGE, _down(self.start), _up(self.stop))

    def populate(self) -> None:
        """Read a part into the page cache and map it; raises OSError if its file cannot be read."""
        if not self._advise(_POPULATE_READ, _down(self.start), _up(self.stop)):
            # Into the page cache only; page faults map the pages.
            if not hasattr(_local, "scratch"):
                _local.scratch = memoryview(mmap.mmap(-1, PART_BYTES))
            pread_into(self.descriptor, self.start, _local.scratch[: self.num_bytes])

    def drop(self, *, from_cache: bool) -> None:
        """Unmap the pages; with `from_cache`, also drop them from the page cache. Changes to them are lost.

        Pages at the borders, which may be shared, stay.
        """
        low, high = _up(self.start), _down(self.stop)
        if low < high:
            self._advise(mmap.MADV_DONTNEED, low, high)
            if from_cache:
                os.posix_fadvise(self.descriptor, low, high - low, os.POSIX_FADV_DONTNEED)

    def _advise(self, advice: int, low: int, high: int) -> bool:
        return bool(libc.madvise(self.address + low, high - low, advice) == 0)


class PageReader:
    """Populates pages with a few threads, in the order of the requests."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fsdp-shard-pages")

    def populate(self, parts: Sequence[FilePages], *, is_unmapped: bool) -> None:
        """Read and map `parts`; with `is_unmapped`, also those that the page cache already holds.

        Raises:
            OSError: A file cannot be read.
        """
        wanted = [part for part in parts if is_unmapped or not part.is_resident()]
        for error in [future.exception() for future in [self._pool.submit(part.populate) for part in wanted]]:
            if error is not None:
                raise error


def _down(position: int) -> int:
    return position // mmap.PAGESIZE * mmap.PAGESIZE


def _up(position: int) -> int:
    return -(-position // mmap.PAGESIZE) * mmap.PAGESIZE
