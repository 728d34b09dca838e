"""Pages of mapped files: brought into memory ahead of their reader, and let go behind it. Knows no tensors.

Bringing in is left to the kernel (`MADV_POPULATE_READ`, Linux 5.14), which fills the page cache and this process' page
table in one go and needs next to no time of a core for it; two threads keep the disk busy (docs/decisions.md). Where
that is not to be had, the files are read into a small buffer that is thrown away.
"""

from __future__ import annotations

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

_libc = ctypes.CDLL(None, use_errno=True)
_local = threading.local()


@dataclass(frozen=True)
class FilePages:
    """The bytes [start, stop) of a mapped file; `owner` keeps mapping and descriptor alive, `address` is its byte 0."""

    owner: object
    descriptor: int
    address: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def parts(self) -> list[FilePages]:
        """Itself, in parts of a few MB."""
        starts = range(self.start, self.stop, PART_BYTES)
        return [replace(self, start=start, stop=min(start + PART_BYTES, self.stop)) for start in starts]

    def is_resident(self) -> bool:
        """Whether the page cache has a part, told by a page in its middle: the others come and go with that one, but
        for borders. To look at all of them would take a tenth of the time that a block computes.
        """
        middle = _down((self.start + self.stop) // 2)
        found = ctypes.c_ubyte()
        if _libc.mincore(ctypes.c_void_p(self.address + middle), ctypes.c_size_t(1), ctypes.byref(found)) != 0:
            return True  # not to be known: a fault will tell
        return bool(found.value & 1)

    def in_large_pages(self) -> None:
        """Ask for large pages where these come in: the kernel's tables of them are quick to make and to look into."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE, *self._outer())

    def bring_in(self) -> None:
        """Have a part in the page cache and in this process' page table; OSError where its file cannot be read."""
        if not self._advise(_POPULATE_READ, *self._outer()):
            self._read()

    def _read(self) -> None:
        """Through a buffer into the page cache, from where faults bring it into the page table."""
        if not hasattr(_local, "scratch"):
            _local.scratch = memoryview(mmap.mmap(-1, PART_BYTES))
        pread_into(self.descriptor, self.start, _local.scratch[: self.num_bytes])

    def drop(self, *, from_cache: bool) -> None:
        """Give the memory up; with `from_cache`, that of the page cache too. Only whole pages: others may be shared.

        What was written to these pages is lost.
        """
        low, high = _up(self.start), _down(self.stop)
        if low < high:
            self._advise(mmap.MADV_DONTNEED, low, high)
            if from_cache and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.descriptor, low, high - low, os.POSIX_FADV_DONTNEED)

    def _outer(self) -> tuple[int, int]:
        return _down(self.start), _up(self.stop)

    def _advise(self, advice: int, low: int, high: int) -> bool:
        address, size = ctypes.c_void_p(self.address + low), ctypes.c_size_t(high - low)
        return bool(_libc.madvise(address, size, ctypes.c_int(advice)) == 0)


class PageReader:
    """Brings pages in from a few threads. What is asked for first comes first, whoever asks."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fsdp-shard-pages")

    def bring_in(self, parts: Sequence[FilePages], *, dropped: bool) -> None:
        """Have `parts` in memory. `dropped` ones are not in the page table, whether the page cache has them or not."""
        wanted = [part for part in parts if dropped or not part.is_resident()]
        errors = [future.exception() for future in [self._pool.submit(part.bring_in) for part in wanted]]
        if first := next(filter(None, errors), None):
            raise first


def resident_bytes(pages: Sequence[FilePages]) -> int:
    """Bytes of `pages` that the page cache holds, to within a few MB."""
    return sum(part.num_bytes for these in pages for part in these.parts() if part.is_resident())


def _down(position: int) -> int:
    return position // mmap.PAGESIZE * mmap.PAGESIZE


def _up(position: int) -> int:
    return -(-position // mmap.PAGESIZE) * mmap.PAGESIZE
