"""Blocks whose parameters are on the main device only while they run.

Outside its forward pass such a block has parameters on the meta device. A hook before its forward pass takes a buffer,
fills it from where the parameters are kept, and shows them to the module; a hook after it gives the buffer back. The
buffers are reused from block to block. Knows blocks and something that fills tensors, no files and no model class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ALIGN_BYTES = 256  # what a GPU's own allocator gives, and enough for any vector instruction

Fill = Callable[[torch.Tensor], None]
"""Copies a parameter's values into the tensor that it is given."""


@dataclass(frozen=True)
class StreamedParameter:
    """A parameter of one module of a block, and how its values are had."""

    owner: nn.Module
    name: str
    meta: nn.Parameter
    fill: Fill


class BlockStream:
    """The streamed blocks of a model and the buffers on `device` that they take turns in."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer_bytes = 0
        self._free: list[torch.Tensor] = []
        self._shown: dict[nn.Module, torch.Tensor] = {}

    def add(self, block: nn.Module, parameters: Sequence[StreamedParameter]) -> None:
        """Stream the `parameters` of `block` whenever its forward pass runs."""
        self._buffer_bytes = max(self._buffer_bytes, _padded_bytes(parameters))

        def before(module: nn.Module, args: Any) -> None:
            hide()  # in case that Ctrl-C ended the last pass, after which torch calls no hooks
            self._shown[block] = self._show(parameters)

        def hide(*_: Any) -> None:
            for parameter in parameters:
                parameter.owner._parameters[parameter.name] = parameter.meta
            if (buffer := self._shown.pop(block, None)) is not None:
                self._free.append(buffer)

        block.register_forward_pre_hook(before)
        block.register_forward_hook(hide, always_call=True)  # a pass that raises gives its buffer back, too

    def _show(self, parameters: Sequence[StreamedParameter]) -> torch.Tensor:
        """Fill a buffer with `parameters` and put them into their modules; returns the buffer."""
        views: dict[int, nn.Parameter] = {}
        buffer, used = self._take(), 0
        for parameter in parameters:
            if id(parameter.meta) not in views:
                meta, num_bytes = parameter.meta, _num_bytes(parameter.meta)
                view = buffer[used : used + num_bytes].view(meta.dtype).view(meta.shape)
                parameter.fill(view)
                views[id(meta)] = nn.Parameter(view, requires_grad=False)
                used += _pad(num_bytes)
            parameter.owner._parameters[parameter.name] = views[id(parameter.meta)]
        return buffer

    def _take(self) -> torch.Tensor:
        """A free buffer, each as large as the largest block; a second one is made only when a block runs in another."""
        if self._free:
            return self._free.pop()
        with torch.inference_mode(False):  # else it could be filled in no other mode than that of the first pass
            return torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._device)


def _padded_bytes(parameters: Sequence[StreamedParameter]) -> int:
    distinct = {id(parameter.meta): parameter.meta for parameter in parameters}
    return sum(_pad(_num_bytes(meta)) for meta in distinct.values())


def _pad(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
