"""Tensors seen where they lie in a checkpoint's own files, through `mmap`: no copy, no memory to be written first.

A tensor can be seen so when it is one contiguous run of one file, in the dtype that is wanted, at an address that its
elements may have. Views may be written to: what is written stays in this process. Knows files and no model.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fsdp_shard.checkpoint.dtypes import to_torch
from fsdp_shard.checkpoint.files import member, open_regular
from fsdp_shard.inference.pages import FilePages

if TYPE_CHECKING:
    from fsdp_shard.checkpoint.index import TensorIndex


@dataclass(frozen=True)
class _Mapped:
    """One file; the descriptor lives as long as the mapping, for reading ahead."""

    memory: mmap.mmap
    descriptor: int
    address: int

    def __del__(self) -> None:
        os.close(self.descriptor)


class MappedFiles:
    """The files of `index`, each mapped once, when a tensor of it is first asked for."""

    def __init__(self, index: TensorIndex) -> None:
        self._index = index
        self._files: dict[str, _Mapped] = {}

    def view(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """The stored tensor `name` in its file, or None where it has to be copied."""
        entry = self._index.entry(name)
        place = self._place(name)
        if place is None or to_torch(entry.dtype) != dtype or not entry.num_elements:
            return None
        file, start, stop = place
        mapped = self._open(file)
        if start % dtype.itemsize or stop > len(mapped.memory):  # a file cut short is told of by whoever reads it
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(mapped.memory, dtype=dtype, count=entry.num_elements, offset=start)
        return flat.view(entry.shape)

    def pages(self, names: Iterable[str]) -> list[FilePages]:
        """Where tensors that `view` has given lie, neighbours taken together."""
        places = sorted(place for name in set(names) if (place := self._place(name)) is not None)
        joined: list[tuple[str, int, int]] = []
        for file, start, stop in places:
            if joined and joined[-1][0] == file and start - joined[-1][2] < mmap.PAGESIZE:
                start, stop = joined[-1][1], max(stop, joined.pop()[2])
            joined.append((file, start, stop))
        return [
            FilePages(mapped, mapped.descriptor, mapped.address, start, stop)
            for file, start, stop in joined
            for mapped in [self._open(file)]
        ]

    def _place(self, name: str) -> tuple[str, int, int] | None:
        """(file, first byte, last byte + 1) of a tensor that lies in one run."""
        entry = self._index.entry(name)
        if any(piece.codec is not None for piece in entry.pieces):
            return None
        found = self._index.places(name, 0, entry.num_elements)
        return found[0] if len(found) == 1 else None

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
    """The file, copied on write; read-only where a limit on private memory (RLIMIT_DATA) leaves no room for that."""
    try:
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
