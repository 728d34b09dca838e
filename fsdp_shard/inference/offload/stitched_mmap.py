"""Ranges of several files seen as one piece of memory: each is mapped right behind the one before. Linux only.

A tensor whose rows are spread over the files of ranks is whole in memory so, without a copy, wherever its parts begin
and end with a page in their files. Knows no tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_shard.checkpoint import Span

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of every Linux but on alpha, mips and parisc
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Stitched:
    """Memory that shows `spans` one after the other; `addresses` are where each begins. Unmapped with its last user."""

    def __init__(self, base: int, num_bytes: int, spans: Sequence[Span], addresses: Sequence[int]) -> None:
        self.spans, self.addresses = tuple(spans), tuple(addresses)
        # Not at the end of the process: others may still look at the memory then.
        weakref.finalize(self, _libc.munmap, base, num_bytes).atexit = False

    @property
    def memory(self) -> Any:
        """The bytes of all spans, as a buffer that keeps this object."""
        num_bytes = sum(span.num_bytes for span in self.spans)
        kind = type("StitchedMemory", (ctypes.c_ubyte * num_bytes,), {})
        buffer = kind.from_address(self.addresses[0])  # type: ignore[attr-defined]  # mypy sees a plain `type`
        buffer.owner = self
        return buffer


def meet_at_pages(spans: Sequence[Span]) -> bool:
    """Whether each span but the last ends with a page of its file, and each but the first begins with one."""
    return all(one.stop % mmap.PAGESIZE == 0 == two.start % mmap.PAGESIZE for one, two in pairwise(spans))


def stitch(spans: Sequence[Span], descriptors: Sequence[int]) -> Stitched | None:
    """Map `spans`, which meet at pages, of the files open as `descriptors`; None where the system does not.

    It does not outside Linux, and where a process has as many mappings as it may, or too little private memory.
    """
    if sys.platform != "linux":
        return None
    lows = [span.start // mmap.PAGESIZE * mmap.PAGESIZE for span in spans]
    sizes = [-(-(span.stop - low) // mmap.PAGESIZE) * mmap.PAGESIZE for span, low in zip(spans, lows, strict=True)]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _libc.mmap(None, sum(sizes), 0, flags, -1, 0)  # a place that is free, and long enough
    if base == _FAILED:
        return None
    at, addresses = base, []
    for span, low, size, descriptor in zip(spans, lows, sizes, descriptors, strict=True):
        if not _map(at, size, descriptor, low):
            _libc.munmap(base, sum(sizes))
            return None
        addresses.append(at + span.start - low)
        at += size
    return Stitched(base, sum(sizes), spans, addresses)


def ways_to_map() -> list[tuple[int, int]]:
    """Protection and flags for a file, best first: copied on write, else read-only.

    Where private memory is limited (RLIMIT_DATA) only read-only: mappings that may be written to count there in full,
    so a few tensors would leave nothing to what needs memory of its own.
    """
    read_only = (mmap.PROT_READ, mmap.MAP_SHARED)
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        return [read_only]
    return [(mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE), read_only]


def _map(at: int, size: int, descriptor: int, low: int) -> bool:
    ways = ways_to_map()
    return any(_libc.mmap(at, size, prot, flags | _MAP_FIXED, descriptor, low) == at for prot, flags in ways)
