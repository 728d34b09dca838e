"""Tensors seen where they lie in a checkpoint's own files, through `mmap`: no copy, no memory to be written first.

A tensor can be seen so when it is one contiguous run of one file, in the dtype that is wanted, at an address that its
elements may have; or several runs, of as many ranks' files, that meet at borders of pages (see `stitching`). Views may
be written to: what is written stays in this process. Knows files and no model.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fsdp_shard.checkpoint import member, open_regular, to_torch
from fsdp_shard.inference.offload.page_cache import FilePages
from fsdp_shard.inference.offload.stitched_mmap import Stitched, meet_at_pages, stitch, ways_to_map

if TYPE_CHECKING:
    from fsdp_shard.checkpoint import Span, TensorIndex


@dataclass(frozen=True)
class _Mapped:
    """One file; the descriptor lives as long as the mapping, for reading ahead."""

    memory: mmap.mmap
    descriptor: int
    address: int

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)  # as Python ends, modules are gone before this is called


class MappedFiles:
    """The files of `index`, each mapped once, when a tensor of it is first asked for."""

    def __init__(self, index: TensorIndex) -> None:
        self._index = index
        self._files: dict[str, _Mapped] = {}
        self._stitched: dict[str, Stitched] = {}

    def view(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """The stored tensor `name` in its file, or None where it has to be copied."""
        entry = self._index.entry(name)
        spans = self._spans(name)
        if not spans or to_torch(entry.dtype) != dtype or spans[0].start % dtype.itemsize:
            return None
        if any(span.stop > len(self._open(span.file).memory) for span in spans):
            return None  # a file cut short is told of by whoever reads it
        buffer: Any = self._open(spans[0].file).memory
        offset = spans[0].start
        if len(spans) > 1:
            stitched = self._stitch(name, spans)
            if stitched is None:
                return None
            buffer, offset = stitched.memory, 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(buffer, dtype=dtype, count=entry.num_elements, offset=offset)
        return flat.view(entry.shape)

    def pages(self, names: Iterable[str]) -> list[FilePages]:
        """Where tensors that `view` has given lie, neighbors taken together."""
        whole = [spans[0] for name in set(names) if len(spans := self._spans(name)) == 1]
        places = sorted((span.file, span.start, span.stop) for span in whole)
        joined: list[tuple[str, int, int]] = []
        for file, start, stop in places:
            if joined and joined[-1][0] == file and start - joined[-1][2] < mmap.PAGESIZE:
                start, stop = joined[-1][1], max(stop, joined.pop()[2])
            joined.append((file, start, stop))
        found = [
            FilePages(mapped, mapped.descriptor, mapped.address, start, stop)
            for file, start, stop in joined
            for mapped in [self._open(file)]
        ]
        for stitched in (self._stitched[name] for name in sorted(set(names) & self._stitched.keys())):
            for span, address in zip(stitched.spans, stitched.addresses, strict=True):
                owner = (self._open(span.file), stitched)
                found.append(FilePages(owner, owner[0].descriptor, address - span.start, span.start, span.stop))
        return found

    def _spans(self, name: str) -> list[Span]:
        """Where a tensor lies that is stored as it is; nothing where it is not."""
        if not self._index.is_in_long_runs(name):
            return []
        return self._index.places(name, 0, self._index.entry(name).num_elements)

    def _stitch(self, name: str, spans: Sequence[Span]) -> Stitched | None:
        if name not in self._stitched and meet_at_pages(spans):
            made = stitch(spans, [self._open(span.file).descriptor for span in spans])
            if made is not None:
                self._stitched[name] = made
        return self._stitched.get(name)

    def _open(self, name: str) -> _Mapped:
        if name not in self._files:
            descriptor = open_regular(member(self._index.root, name))
            memory = _map(descriptor)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
            self._files[name] = _Mapped(memory, descriptor, address)
        return self._files[name]


def _map(descriptor: int) -> mmap.mmap:
    *better, last = ways_to_map()
    for prot, flags in better:
        try:
            return mmap.mmap(descriptor, 0, flags=flags, prot=prot)
        except OSError:
            continue
    return mmap.mmap(descriptor, 0, flags=last[1], prot=last[0])
