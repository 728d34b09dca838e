"""Tensors as views of a checkpoint's own files, through `mmap`, without a copy.

This works for a tensor stored as one contiguous range of one file, in the wanted dtype and aligned to its elements. It
also works for a tensor whose rows are spread over the ranks' files, if its parts begin and end at page boundaries: they
are mapped to contiguous memory. Views are writable: changes are private to this process.
"""

import ctypes
import mmap
import os
import resource
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from fsdp_shard.checkpoint import Span, TensorIndex, to_torch
from fsdp_shard.inference.offload.page_cache import FilePages, libc

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # on every Linux except alpha, mips and parisc
_FAILED = ctypes.c_void_p(-1).value

_OTHER_FILES = 64  # files a process has open besides the mapped ones


@dataclass(frozen=True)
class _MappedFile:
    """One file; the descriptor stays open along with the mapping, for reading ahead."""

    memory: mmap.mmap
    descriptor: int
    address: int

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)  # a default argument, because modules no longer exist when this runs at Python's exit


@dataclass(frozen=True)
class _MappedSpans:
    """A buffer of consecutive `spans`, each at one of `addresses`; unmapped when its last user is freed."""

    memory: Any
    spans: Sequence[Span]
    addresses: Sequence[int]


class MappedFiles:
    """The files of `index`, each mapped once, when one of its tensors is first requested."""

    def __init__(self, index: TensorIndex) -> None:
        self._index = index
        self._files: dict[str, _MappedFile] = {}
        self._stitched: dict[str, _MappedSpans] = {}

    def view(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """The stored tensor `name` as a view of its file, or None if it must be copied."""
        entry = self._index.entry(name)
        spans = self._spans(name)
        if not spans or to_torch(entry.dtype) != dtype or spans[0].start % dtype.itemsize:
            return None
        if not self._may_open({span.file for span in spans}):
            return None
        if any(span.stop > len(self._open(span.file).memory) for span in spans):
            return None  # the reader reports that the file is truncated
        buffer: Any = self._open(spans[0].file).memory
        offset = spans[0].start
        if len(spans) > 1:
            stitched = self._stitch(name, spans)
            if stitched is None:
                return None
            buffer, offset = stitched.memory, 0
        return _from_buffer(buffer, dtype, entry.num_elements, offset).view(entry.shape)

    def pages(self, names: Iterable[str]) -> list[FilePages]:
        """The pages of tensors that `view` returned; neighboring pages are joined."""
        wanted = set(names)
        single = [spans[0] for name in wanted if len(spans := self._spans(name)) == 1]
        joined: list[tuple[str, int, int]] = []
        for file, start, stop in sorted((span.file, span.start, span.stop) for span in single):
            if joined and joined[-1][0] == file and start - joined[-1][2] < mmap.PAGESIZE:
                start, stop = joined[-1][1], max(stop, joined.pop()[2])
            joined.append((file, start, stop))
        found = [
            FilePages(mapped, mapped.descriptor, mapped.address, start, stop)
            for file, start, stop in joined
            for mapped in [self._open(file)]
        ]
        for stitched in (self._stitched[name] for name in sorted(wanted & self._stitched.keys())):
            for span, address in zip(stitched.spans, stitched.addresses, strict=True):
                owner = (self._open(span.file), stitched)
                found.append(FilePages(owner, owner[0].descriptor, address - span.start, span.start, span.stop))
        return found

    def _spans(self, name: str) -> list[Span]:
        """The ranges of a tensor that is stored without a codec; otherwise none."""
        if not self._index.entry(name).is_in_long_runs:
            return []
        return self._index.spans(name, 0, self._index.entry(name).num_elements)

    def _stitch(self, name: str, spans: Sequence[Span]) -> _MappedSpans | None:
        if name not in self._stitched and _meet_at_pages(spans):
            stitched = _stitch(spans, [self._open(span.file).descriptor for span in spans])
            if stitched is not None:
                self._stitched[name] = stitched
        return self._stitched.get(name)

    def _may_open(self, names: set[str]) -> bool:
        """Whether the process may open this many more files; each mapped file is open twice."""
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        num_open = 2 * len(self._files.keys() | names)
        return names <= self._files.keys() or allowed == resource.RLIM_INFINITY or num_open + _OTHER_FILES <= allowed

    def _open(self, name: str) -> _MappedFile:
        if name not in self._files:
            descriptor = self._index.reader.files.open(name)
            memory = _map(descriptor)
            self._files[name] = _MappedFile(memory, descriptor, _from_buffer(memory, torch.uint8, 1, 0).data_ptr())
        return self._files[name]


def _from_buffer(buffer: Any, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)


def _map(descriptor: int) -> mmap.mmap:
    *better, last = _mapping_modes()
    for prot, flags in better:
        try:
            return mmap.mmap(descriptor, 0, flags=flags, prot=prot)
        except OSError:
            continue
    return mmap.mmap(descriptor, 0, flags=last[1], prot=last[0])


def _meet_at_pages(spans: Sequence[Span]) -> bool:
    """Whether each span but the last ends at a page boundary of its file, and each but the first begins at one."""
    return all(one.stop % mmap.PAGESIZE == 0 == two.start % mmap.PAGESIZE for one, two in pairwise(spans))


def _stitch(spans: Sequence[Span], descriptors: Sequence[int]) -> _MappedSpans | None:
    """Map `spans`, which meet at page boundaries, of the files open as `descriptors`.

    Returns:
        The memory, or None if the process is at its limit of mappings or private memory.
    """
    lows = [span.start // mmap.PAGESIZE * mmap.PAGESIZE for span in spans]
    sizes = [-(-(span.stop - low) // mmap.PAGESIZE) * mmap.PAGESIZE for span, low in zip(spans, lows, strict=True)]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = libc.mmap(None, sum(sizes), 0, flags, -1, 0)  # reserves a free range of addresses
    if base == _FAILED:
        return None
    at, addresses = base, []
    for span, low, size, descriptor in zip(spans, lows, sizes, descriptors, strict=True):
        if not _map_at(at, size, descriptor, low):
            libc.munmap(base, sum(sizes))
            return None
        addresses.append(at + span.start - low)
        at += size
    memory = (ctypes.c_ubyte * sum(span.num_bytes for span in spans)).from_address(addresses[0])
    # Not at process exit, when others may still use the memory.
    weakref.finalize(memory, libc.munmap, base, sum(sizes)).atexit = False
    return _MappedSpans(memory, spans, addresses)


def _mapping_modes() -> list[tuple[int, int]]:
    """Protection and flags to map a file with, best first: copy-on-write, else read-only.

    If private memory is limited (RLIMIT_DATA), only read-only: writable mappings count in full, so a few tensors would
    exhaust the limit.
    """
    read_only = (mmap.PROT_READ, mmap.MAP_SHARED)
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        return [read_only]
    return [(mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE), read_only]


def _map_at(at: int, size: int, descriptor: int, low: int) -> bool:
    modes = _mapping_modes()
    return any(libc.mmap(at, size, prot, flags | _MAP_FIXED, descriptor, low) == at for prot, flags in modes)
