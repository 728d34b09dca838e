"""Bytes of an optimizer's state and a step's temporary memory, measured on the real optimizer with fake tensors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from math import prod

import torch
from torch import nn

from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.training import OptimConfig, update_rounds
from fsdp_shard.utils import DataDependentOutputException, FakeTensorMode, one_thread

_LARGE = 1 << 16  # number of elements above which a matrix's rows and columns do not matter
_SIDE = 256


def step_bytes(
    optim: OptimConfig,
    local: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    *,
    uses_foreach: bool = False,
) -> tuple[int, int]:
    """Bytes of the state on one rank, and the maximum temporary bytes of a step of all these parameters.

    Only one of several identical parameters is updated, unless a step processes all of them at once.

    Args:
        optim: The optimizer settings.
        local: The local shape of each parameter that this rank updates, by FQN.
        shapes: The unsharded shape of every parameter.
        dtypes: The dtype of every parameter.
        uses_foreach: Whether one call updates all parameters, torch's default for plain tensors on a GPU.
    """
    with one_thread():
        _step(optim, {"weight": nn.Parameter(torch.zeros(64, 64))})  # torchao computes tables on first use
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


def _second_step(optimizer: torch.optim.Optimizer, *, is_eager: bool = True) -> int:
    """Maximum temporary bytes of a step once the state exists."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.zeros_like(param)
    recorder = Recorder(is_eager=is_eager)
    recorder.ignore([params, [param.grad for param in params], [*optimizer.state.values()]])
    with recorder, suppress(DataDependentOutputException):
        optimizer.step()
    recorder.mark("", "")
    return recorder.events[0].rise


def whole_update_bytes(
    optim: OptimConfig, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, on_gpu: bool
) -> int:
    """Maximum temporary bytes of updating one whole parameter, besides its state.

    On GPUs, torchao compiles its update, so the parts of its quantized states do not count (`adamw8bit.py`).

    Adafactor reads values, so this runs a step on small real tensors with the same number of dimensions, and scales up.
    """
    size = prod(shape)
    is_small = size <= _LARGE
    like = shape if is_small else (_LARGE,) if len(shape) < 2 else (*(1,) * (len(shape) - 2), _SIDE, _SIDE)
    needs_values = _needs_values(optim)
    like = like if needs_values else shape
    with one_thread(), nullcontext() if needs_values else FakeTensorMode():
        params = {name: nn.Parameter(torch.zeros(like, dtype=dtype))}
        found = _second_step(_step(optim, params, {name: shape}), is_eager=not on_gpu)
    return found * -(-size // max(1, prod(like)))


def whole_updates(
    optim: OptimConfig,
    trained: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    *,
    on_gpu: bool,
) -> dict[str, int]:
    """Temporary bytes of updating each whole parameter; identical parameters are measured once."""
    alike = _alike({name: shapes[name] for name in trained}, shapes, dtypes)
    sizes = [whole_update_bytes(optim, name, shapes[name], dtypes[name], on_gpu=on_gpu) for name, *_ in alike]
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
    """Maximum temporary bytes of a step on `rank` if each parameter is updated by its owner rank.

    A round gathers one parameter's value and gradient on its owner, updates it and sends it back; each exchange makes a
    flat copy of what it sends.

    Args:
        owned: Names of each rank's parameters, in the order of the rounds.
        rank: The rank.
        held: Bytes of each parameter on this rank.
        shapes: The unsharded shape of every parameter.
        dtypes: The dtype of every parameter.
        updates: Temporary bytes of each parameter's update, by name.
        on_gpu: Whether the ranks have GPUs. If so, an update makes one more copy, as measured on an H200
            (docs/benchmarks.md).
    """
    most, values = 0, 3 if on_gpu else 2
    for names in update_rounds(owned, dtypes):
        own = names[rank]
        sent = sum(held.get(name, 0) for name in names if name is not None)
        whole = 0 if own is None else prod(shapes[own]) * dtypes[own].itemsize
        update = 0 if own is None else updates[own]
        # While the new values are sent, the gradient still exists, and so do the flat copies that are exchanged.
        most = max(most, values * whole + update, 3 * whole + sent)
    return most


def _step(
    optim: OptimConfig, params: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of `params` after a step."""
    optimizer = optim.build(params, shapes or {name: tuple(param.shape) for name, param in params.items()})
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
        # Adafactor creates the state of a group before it reads values, which fake tensors do not have.
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
