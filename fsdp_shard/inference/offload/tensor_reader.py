"""Reads checkpoint tensors into existing memory, on any device and in any dtype, without a copy of the whole.

Data stored in the wanted dtype is read directly into CPU memory. Everything else goes through a staging buffer per
thread, which is reused because writing to fresh pages is several times slower. Several threads read at once, which is
faster on disks.
"""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from fsdp_shard.checkpoint import TensorIndex, copy_stored, tensor_bytes, to_torch

_NUM_THREADS = 4  # concurrent disk requests; more than a small machine's cores
_STAGING_BYTES = 4 << 20
READ_BYTES = _NUM_THREADS * _STAGING_BYTES  # over all threads, for data that is cast or goes to a GPU


class TensorReader:
    """Fills tensors from `index`, from several threads."""

    def __init__(self, index: TensorIndex) -> None:
        self.index = index
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fsdp-shard-read")

    def fill_all(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """`fill` each, several at once; the first error is raised once no tensor is being written any more."""
        futures = [self._pool.submit(self.fill, name, out) for name, out in wanted]
        for error in [future.exception() for future in futures]:
            if error is not None:
                raise error

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Copy the stored tensor `name` into `out` (contiguous, same shape), cast to its dtype."""
        entry = self.index.entry(name)
        dtype = to_torch(entry.dtype)
        with torch.no_grad():
            if out.device.type == "cpu" and out.dtype == dtype:
                self.index.read_into(name, 0, tensor_bytes(out))
            elif any(piece.codec is not None for piece in entry.pieces):
                copy_stored(self.index, name, self.index.read(name), out)  # a codec may need the whole for any part
            else:
                # Threads start on GPU 0, where pinned memory and copies would create a context.
                with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
                    self._fill_by_parts(name, dtype, out.view(-1))

    def _fill_by_parts(self, name: str, dtype: torch.dtype, out: torch.Tensor) -> None:
        if not hasattr(self._local, "staging"):
            with torch.inference_mode(False):
                self._local.staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=out.is_cuda)
        staging = self._local.staging.view(dtype)
        for start in range(0, len(out), len(staging)):
            part = staging[: len(out) - start]
            self.index.read_into(name, start, tensor_bytes(part))
            copy_stored(self.index, name, part, out[start : start + len(part)])
