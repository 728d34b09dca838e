"""A temporary file for the hidden states of passes that wait for a block, mapped into memory through `mmap`.

A tensor moved there is used as before: touching its pages reads them, and the system writes them out when it needs
memory. The file has no name, so nothing remains of it, however the process ends.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from fsdp_shard.inference.offload.page_cache import FilePages
from fsdp_shard.utils import name_in_errors, num_storage_users

_SMALLEST_BYTES = 1 << 16
# The file is mapped in few parts, because each needs a descriptor; they occupy no disk space until used.
_SEGMENT_BYTES = 1 << 30


class HiddenStateFile:
    """The file, in `directory`; its disk space is reused once a tensor is freed. A context manager.

    Attributes:
        num_bytes_moved: Bytes of all tensors moved so far.
    """

    def __init__(self, directory: Path) -> None:
        self.num_bytes_moved = 0
        self._directory = directory
        with name_in_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)  # the first rank creates it on its machine only
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - __exit__ closes it
        self._segment, self._address = mmap.mmap(-1, 1), 0
        self._end = self._used = 0  # end of the file, and used bytes of the last segment
        self._free: defaultdict[int, list[tuple[mmap.mmap, int, FilePages]]] = defaultdict(list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()  # its tensors have their own descriptor, with the mapping

    def move(self, values: Any) -> None:
        """Move CPU tensors in lists, tuples and mappings to the file, in place, if nothing else uses their memory.

        A tensor that shares memory with others stays: all of them must see writes to one of them.

        Raises:
            OSError: The disk is full.
        """
        if isinstance(values, torch.Tensor):
            if _is_movable(values):
                self._move(values)
        elif isinstance(values, Mapping):
            self.move(list(values.values()))
        elif isinstance(values, (list, tuple)):
            for value in values:
                self.move(value)

    def _move(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        num_bytes, shape, stride = storage.nbytes(), tensor.size(), tensor.stride()
        segment, start, pages = self._region(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        memory = (ctypes.c_ubyte * num_bytes).from_buffer(segment, start)
        weakref.finalize(memory, partial(self._release, segment, start, pages)).atexit = False
        with torch.inference_mode(tensor.is_inference()):
            copy = torch.frombuffer(memory, dtype=torch.uint8)
            copy.untyped_storage().copy_(storage)
            tensor.set_(copy.untyped_storage(), tensor.storage_offset(), shape, stride)
        pages.drop(from_cache=False)
        self.num_bytes_moved += num_bytes

    def _release(self, segment: mmap.mmap, start: int, pages: FilePages) -> None:
        pages.drop(from_cache=False)
        self._free[pages.num_bytes].append((segment, start, pages))

    def _region(self, num_bytes: int) -> tuple[mmap.mmap, int, FilePages]:
        """Return a mapping, and an unused range of it with disk space."""
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        descriptor = self._file.fileno()
        with name_in_errors(self._directory):
            if self._used + num_bytes > len(self._segment):
                size = max(_SEGMENT_BYTES, num_bytes)
                os.ftruncate(descriptor, self._end + size)
                self._segment = mmap.mmap(descriptor, size, offset=self._end)
                self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._segment)) - self._end
                self._end, self._used = self._end + size, 0
            start = self._used
            first = self._end - len(self._segment) + start
            os.posix_fallocate(descriptor, first, num_bytes)  # a page without disk space would end the process (SIGBUS)
        self._used += num_bytes
        return self._segment, start, FilePages(self._segment, descriptor, self._address, first, first + num_bytes)


def _is_movable(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()  # memory not allocated by torch, such as the file's, is not resizable
    return storage.nbytes() >= _SMALLEST_BYTES and storage.resizable() and num_storage_users(tensor) == 1
