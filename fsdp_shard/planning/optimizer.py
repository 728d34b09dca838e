"""Bytes of an optimizer's state, measured by letting the real one take a step on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_shard.training.base import OptimConfig


def optimizer_bytes(
    optim: OptimConfig, local: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> int:
    """State of `optim` for parameters of shape `local` on this rank, whose logical shapes are `shapes`."""
    with FakeTensorMode():
        params = {name: nn.Parameter(torch.empty(shape, dtype=dtype)) for name, shape in local.items()}
        for param in params.values():
            param.grad = torch.empty_like(param)
        optimizer = optim.build(params, shapes)
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return sum(value.numel() * value.element_size() for value in states if isinstance(value, torch.Tensor))
