"""Pages of mapped files: brought into memory ahead of their reader, and let go behind it. Knows no tensors.

Bringing in is done with `pread` from several threads into a small buffer that is thrown away: it fills the page cache
faster than `madvise` and page faults do (docs/decisions.md). Where a system lacks a call, nothing happens but that.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_shard.checkpoint.files import pread_into

PART_BYTES = 4 << 20
_POPULATE_READ = 22  # Linux 5.14; older ones refuse it, and pages come in as they are touched

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

    def missing(self) -> Iterator[FilePages]:
        """The parts of a few MB of which some page is not in memory."""
        for start in range(self.start, self.stop, PART_BYTES):
            part = FilePages(self.owner, self.descriptor, self.address, start, min(start + PART_BYTES, self.stop))
            if not part._is_resident():
                yield part

    def read(self) -> None:
        """Read the part through, so that the page cache has it. For parts that `missing` gave."""
        if not hasattr(_local, "scratch"):
            _local.scratch = memoryview(mmap.mmap(-1, PART_BYTES))
        pread_into(self.descriptor, self.start, _local.scratch[: self.num_bytes])

    def populate(self) -> None:
        """Put what the page cache has into this process' page table, which else costs a fault for every few pages."""
        self._advise(_POPULATE_READ, *self._outer())

    def drop(self, *, from_cache: bool) -> None:
        """Give the memory up; with `from_cache`, that of the page cache too. Only whole pages: others may be shared.

        What was written to these pages is lost.
        """
        low, high = _up(self.start), _down(self.stop)
        if low < high:
            self._advise(mmap.MADV_DONTNEED, low, high)
            if from_cache and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.descriptor, low, high - low, os.POSIX_FADV_DONTNEED)

    def _is_resident(self) -> bool:
        low, high = self._outer()
        pages = (ctypes.c_ubyte * ((high - low) // mmap.PAGESIZE))()
        if _libc.mincore(ctypes.c_void_p(self.address + low), ctypes.c_size_t(high - low), pages) != 0:
            return True  # not to be known: a fault will tell
        return all(page & 1 for page in bytes(pages))

    def _outer(self) -> tuple[int, int]:
        return _down(self.start), _up(self.stop)

    def _advise(self, advice: int, low: int, high: int) -> None:
        _libc.madvise(ctypes.c_void_p(self.address + low), ctypes.c_size_t(high - low), ctypes.c_int(advice))


def resident_bytes(pages: Sequence[FilePages]) -> int:
    """Bytes of `pages` that the page cache holds, to within a few MB."""
    return sum(part.num_bytes - sum(lacking.num_bytes for lacking in part.missing()) for part in pages)


def _down(position: int) -> int:
    return position // mmap.PAGESIZE * mmap.PAGESIZE


def _up(position: int) -> int:
    return -(-position // mmap.PAGESIZE) * mmap.PAGESIZE
