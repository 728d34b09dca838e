"""Bytes of an optimizer's state and of what a step takes for a moment, measured by the real one on fake tensors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import zip_longest
from math import prod

import torch
from torch import nn

from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.training import OptimConfig
from fsdp_shard.utils import DataDependentOutputException, FakeTensorMode, one_thread

_LARGE = 1 << 16  # elements from which on rows and columns of a matrix do not matter
_SIDE = 256


def step_bytes(
    optim: OptimConfig,
    local: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    *,
    uses_foreach: bool = False,
) -> tuple[int, int]:
    """Bytes of the state on one rank, and the most that a step of all these parameters takes in addition.

    Of parameters that are alike, one is updated, unless a step takes all of them at one time.

    Args:
        optim: The optimizer settings.
        local: The local shape of each parameter that the rank updates, by FQN.
        shapes: The unsharded shape of every parameter.
        dtypes: The dtype of every parameter.
        uses_foreach: Whether one call updates all parameters, which torch chooses for plain tensors on a GPU.
    """
    with one_thread():
        _step(optim, {"weight": nn.Parameter(torch.zeros(64, 64))})  # torchao computes tables at first use
    alike = [[name] for name in local] if uses_foreach else _alike(local, shapes, dtypes)
    numbers = {names[0]: len(names) for names in alike}
    with FakeTensorMode():
        params = {name: nn.Parameter(torch.empty(local[name], dtype=dtypes[name])) for name in numbers}
        optimizer = _step(optim, params, shapes)
        state = sum(
            numbers[name] * _num_bytes(value)
            for name, param in params.items()
            for value in optimizer.state.get(param, {}).values()
        )
        for group in optimizer.param_groups if uses_foreach else ():
            if "foreach" in group and not group.get("fused"):
                group["foreach"] = True
        return state, _second_step(optimizer)


def state_bytes_of_each(
    optim: OptimConfig, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, int]:
    """Bytes of the state of `optim` for each whole parameter in `shapes`, after the first step."""
    alike = _alike(shapes, shapes, dtypes)
    with FakeTensorMode():
        params = {names[0]: nn.Parameter(torch.empty(shapes[names[0]], dtype=dtypes[names[0]])) for names in alike}
        optimizer = _step(optim, params, shapes)
        sizes = {name: sum(map(_num_bytes, optimizer.state.get(param, {}).values())) for name, param in params.items()}
    return {name: sizes[names[0]] for names in alike for name in names}


def _alike(
    local: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> list[list[str]]:
    """Names of parameters that an optimizer treats alike."""
    found: dict[object, list[str]] = {}
    for name, shape in local.items():
        found.setdefault((re.sub(r"\d+", "*", name), shape, shapes[name], dtypes[name]), []).append(name)
    return [*found.values()]


def _second_step(optimizer: torch.optim.Optimizer) -> int:
    """The most bytes that a step takes, when the state is there."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.zeros_like(param)
    recorder = Recorder()
    recorder.ignore([params, [param.grad for param in params], [*optimizer.state.values()]])
    with recorder, suppress(DataDependentOutputException):
        optimizer.step()
    recorder.mark("", "")
    return recorder.events[0].rise


def whole_update_bytes(optim: OptimConfig, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The most bytes that the update of one whole parameter takes, in addition to its state.

    Adafactor looks at values, so a step is made with small real tensors of as many dimensions, and scaled.
    """
    size = prod(shape)
    is_small = size <= _LARGE
    like = shape if is_small else (_LARGE,) if len(shape) < 2 else (*(1,) * (len(shape) - 2), _SIDE, _SIDE)
    needs_values = _needs_values(optim)
    like = like if needs_values else shape
    with one_thread(), nullcontext() if needs_values else FakeTensorMode():
        params = {name: nn.Parameter(torch.zeros(like, dtype=dtype))}
        found = _second_step(_step(optim, params, {name: shape}))
    return found * -(-size // max(1, prod(like)))


def whole_updates(
    optim: OptimConfig,
    trained: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, int]:
    """What the update of each whole parameter takes for a moment; those that are alike are measured once."""
    alike = _alike({name: shapes[name] for name in trained}, shapes, dtypes)
    sizes = [whole_update_bytes(optim, name, shapes[name], dtypes[name]) for name, *_ in alike]
    return {name: size for names, size in zip(alike, sizes, strict=True) for name in names}


def _needs_values(optim: OptimConfig) -> bool:
    try:
        with one_thread(), FakeTensorMode():
            param = nn.Parameter(torch.zeros(64, 64))
            optimizer = optim.build({"weight": param}, {"weight": (64, 64)})
            param.grad = torch.zeros_like(param)
            optimizer.step()
    except DataDependentOutputException:
        return True
    return False


def exchange_bytes(
    owned: Sequence[Sequence[str]],
    rank: int,
    held: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    updates: Mapping[str, int],
    *,
    on_gpu: bool,
) -> int:
    """The most bytes that a step takes on `rank` when each parameter is updated by the rank that owns it.

    A round gathers the values and the gradient of one parameter on its owner, updates it and sends it back; each
    exchange has a flat copy of what is sent.

    Args:
        owned: Names of the parameters of each rank, in the order of the rounds.
        rank: The rank.
        held: Bytes that this rank has of each parameter.
        shapes: The unsharded shape of every parameter.
        dtypes: The dtype of every parameter.
        updates: What the update of each parameter takes, by name.
        on_gpu: Whether the ranks have GPUs. Then an update has one copy more, as measured on an H200
            (docs/benchmarks.md).
    """
    most, values = 0, 3 if on_gpu else 2
    for names in zip_longest(*owned):
        own = names[rank]
        sent = sum(held.get(name, 0) for name in names if name is not None)
        whole = 0 if own is None else prod(shapes[own]) * dtypes[own].itemsize
        update = 0 if own is None else updates[own]
        # The gradient is still there while the new values are sent: as they are for all copies, flat, and received.
        most = max(most, values * whole + update, 3 * whole + sent)
    return most


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
        return value.nbytes
    parts, _ = value.__tensor_flatten__()  # a quantized state
    return sum(_num_bytes(getattr(value, part)) for part in parts)
