"""Tensors out of a checkpoint into memory that is already there, on any device and in any dtype, with no whole copy.

What is stored in the dtype that is wanted is read straight into CPU memory. All else goes through one staging buffer,
which is reused: writing into fresh pages is several times slower than into used ones. Knows no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.dtypes import to_torch
from fsdp_shard.checkpoint.index import TensorIndex, tensor_bytes

if TYPE_CHECKING:
    import torch

_STAGING_BYTES = 16 << 20


class TensorReader:
    """Fills tensors from `index`. For one thread at a time, since there is one staging buffer."""

    def __init__(self, index: TensorIndex) -> None:
        self.index = index
        self._staging: torch.Tensor | None = None

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Copy the stored tensor `name` into `out` (contiguous, same shape), cast to its dtype."""
        import torch

        entry = self.index.entry(name)
        dtype = to_torch(entry.dtype)
        with torch.no_grad():
            if out.device.type == "cpu" and out.dtype == dtype:
                self.index.read_into(name, 0, tensor_bytes(out))
            elif any(piece.codec is not None for piece in entry.pieces):
                out.copy_(self.index.read(name))  # a codec may have to decode the whole tensor for any part of it
            else:
                self._fill_by_parts(name, dtype, out.view(-1))

    def _fill_by_parts(self, name: str, dtype: torch.dtype, out: torch.Tensor) -> None:
        import torch

        if self._staging is None:
            with torch.inference_mode(False):
                self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=out.is_cuda)
        staging = self._staging.view(dtype)
        for start in range(0, len(out), len(staging)):
            part = staging[: len(out) - start]
            self.index.read_into(name, start, tensor_bytes(part))
            out[start : start + len(part)].copy_(part)

    def release(self) -> None:
        """Give the staging buffer back and close the files; a later `fill` takes them again."""
        self.index.close()
        self._staging = None
