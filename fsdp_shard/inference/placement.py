"""Carries out a device plan on a model on meta: fills what stays, streams the rest, moves inputs between devices.

Knows blocks, a plan and names in a tensor index; how the plan came about is not its business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_shard import models
from fsdp_shard.blocks import Block
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.inference.base import Device
from fsdp_shard.inference.device_map import DevicePlan, device_name
from fsdp_shard.inference.reader import TensorReader
from fsdp_shard.inference.stream import BlockStream, Fill, StreamedParameter


def place(
    model: nn.Module, blocks: Sequence[Block], plan: DevicePlan, index: TensorIndex, stored: Mapping[str, str]
) -> None:
    """Make `model` run as `plan` says; `stored` maps its parameters and persistent buffers to names in `index`."""
    main = torch.device(device_name(plan.main))
    reader = TensorReader(index)
    models.rebuild_buffers(model, main)
    _fill_buffers(model, main, reader, stored)
    _fill_parameters(model, blocks, plan, reader, stored)
    reader.release()
    _move_inputs(model, blocks, plan)


def _fill_buffers(model: nn.Module, device: torch.device, reader: TensorReader, stored: Mapping[str, str]) -> None:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                filled = module._buffers[name] = torch.empty_like(buffer, device=device)
                reader.fill(stored[f"{prefix}.{name}" if prefix else name], filled)


def _fill_parameters(
    model: nn.Module, blocks: Sequence[Block], plan: DevicePlan, reader: TensorReader, stored: Mapping[str, str]
) -> None:
    """Give each parameter memory where its block lies, and stream the blocks that compute elsewhere."""
    names = {id(param): stored[name] for name, param in model.named_parameters()}  # a tied one's kept name comes first
    kept: dict[int, nn.Parameter] = {}
    stream = BlockStream(torch.device(device_name(plan.main)))
    streamed: list[tuple[nn.Module, list[StreamedParameter]]] = []
    for block in blocks:
        module, device = model.get_submodule(block.fqn), plan.devices[block.fqn]
        slots = list(_slots(module, block.direct))
        if device != "disk":
            for _, _, meta in slots:
                if id(meta) not in kept:
                    empty = torch.empty_like(meta, device=device_name(device))
                    reader.fill(names[id(meta)], empty)
                    kept[id(meta)] = nn.Parameter(empty, requires_grad=False)
        if plan.is_streamed(block.fqn):
            fills = (_filler(meta, kept.get(id(meta)), reader, names) for _, _, meta in slots)
            streamed.append((module, [StreamedParameter(*slot, fill) for slot, fill in zip(slots, fills, strict=True)]))
        else:
            for owner, name, meta in slots:
                owner._parameters[name] = kept[id(meta)]
    for module, parameters in streamed:
        stream.add(module, parameters)


def _slots(module: nn.Module, direct: bool) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every (module, parameter name, parameter) in a block."""
    for owner in [module] if direct else module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                yield owner, name, param


def _filler(meta: nn.Parameter, kept: nn.Parameter | None, reader: TensorReader, names: Mapping[int, str]) -> Fill:
    """How a streamed parameter's values are had: from CPU memory when they are there, else from the checkpoint."""
    if kept is None:
        return partial(reader.fill, names[id(meta)])
    return lambda out: _copy(kept, out)


def _copy(kept: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(kept)


def _move_inputs(model: nn.Module, blocks: Sequence[Block], plan: DevicePlan) -> None:
    """Let each block find its inputs and buffers on the device where it computes."""
    computes: dict[str, Device] = {
        block.fqn: plan.main if plan.is_streamed(block.fqn) else plan.devices[block.fqn] for block in blocks
    }
    if plan.main != "cpu":
        _move_inputs_of(model, torch.device(device_name(plan.main)))
    if set(computes.values()) == {plan.main}:
        return
    for block in blocks:
        if not block.direct:
            module, device = model.get_submodule(block.fqn), torch.device(device_name(computes[block.fqn]))
            _move_inputs_of(module, device)
            for inner in module.modules():
                inner._buffers.update(_to(inner._buffers, device))


def _move_inputs_of(module: nn.Module, device: torch.device) -> None:
    def move(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _to(args, device), _to(kwargs, device)

    module.register_forward_pre_hook(move, with_kwargs=True)


def _to(value: Any, device: torch.device) -> Any:
    """`value` with the tensors in it on `device`; caches and other objects see to themselves."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_to(item, device) for item in value)
    if type(value) is dict:
        return {key: _to(item, device) for key, item in value.items()}
    return value
