"""Bytes of an optimizer's state, measured by letting the real one take a step on fake tensors."""

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import nn

from fsdp_shard.training import OptimConfig
from fsdp_shard.utils import DataDependentOutputException, FakeTensorMode, one_thread


def optimizer_bytes(
    optim: OptimConfig,
    local: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> int:
    """Bytes of the state of `optim` on one rank.

    Args:
        optim: The optimizer settings.
        local: The local shape of each parameter that the rank updates, by FQN.
        shapes: The unsharded shape of every parameter.
        dtypes: The dtype of every parameter.

    Returns:
        The bytes of the state after the first step.
    """
    with one_thread():
        _step(optim, {"weight": nn.Parameter(torch.zeros(64, 64))})  # torchao computes tables at first use
    with FakeTensorMode():
        params = {name: nn.Parameter(torch.empty(shape, dtype=dtypes[name])) for name, shape in local.items()}
        optimizer = _step(optim, params, shapes)
        return sum(_num_bytes(value) for state in optimizer.state.values() for value in state.values())


def _step(
    optim: OptimConfig, params: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of `params`, after a step."""
    optimizer = optim.build(params, shapes or {name: tuple(param.shape) for name, param in params.items()})
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
        # Adafactor looks at values, which fake tensors do not have, after it has made the state of a group.
        with suppress(DataDependentOutputException):
            optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _num_bytes(value: object) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    if not hasattr(value, "__tensor_flatten__"):
        return value.numel() * value.element_size()
    parts, _ = value.__tensor_flatten__()  # a quantized state
    return sum(_num_bytes(getattr(value, part)) for part in parts)
