"""Blocks that stay together, and a plan of where they lie that keeps every budget. Pure; chooses no place itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.config import Device
from fsdp_shard.inference.device_map.device_plan import DevicePlan, device_name, is_streamed
from fsdp_shard.utils import format_size

if TYPE_CHECKING:
    from fsdp_shard.models import Block


@dataclass(frozen=True)
class Unit:
    """Blocks that stay together; `streamed_bytes` is the largest of them, which is what a buffer must hold."""

    blocks: tuple[Block, ...]
    num_bytes: int
    streamed_bytes: int
    pinned: bool
    cache_bytes: int

    @property
    def fqns(self) -> list[str]:
        return [block.fqn for block in self.blocks]


def make_units(blocks: Sequence[Block], ties: Sequence[Sequence[str]], cache_bytes: Mapping[str, int]) -> list[Unit]:
    """Groups of tied blocks, each where its first block is."""
    group_of = {fqn: min(group, key=[block.fqn for block in blocks].index) for group in ties for fqn in group}
    members: dict[str, list[Block]] = {}
    for block in blocks:
        members.setdefault(group_of.get(block.fqn, block.fqn), []).append(block)
    return [
        Unit(
            tuple(group),
            sum(block.num_bytes for block in group),
            max(block.num_bytes for block in group),
            any(block.direct for block in group),
            sum(cache_bytes.get(block.fqn, 0) for block in group),
        )
        for group in members.values()
    ]


def checked_plan(
    units: Sequence[Unit],
    placement: Mapping[int, Device],
    main: Device,
    budgets: Mapping[Device, int],
    prefetch: int,
) -> DevicePlan:
    """The plan that `placement` is, checked against `budgets`; fewer blocks are fetched ahead where it then fits."""
    resident: dict[Device, int] = {}
    cache: dict[Device, int] = {}
    block_bytes = num_streamed = 0
    for unit in units:
        device = placement[id(unit)]
        resident[device] = resident.get(device, 0) + unit.num_bytes
        if is_streamed(device, main):
            block_bytes, num_streamed = max(block_bytes, unit.streamed_bytes), num_streamed + len(unit.blocks)
        if unit.cache_bytes:
            computes = main if is_streamed(device, main) else device
            cache[computes] = cache.get(computes, 0) + unit.cache_bytes
    prefetch = min(prefetch, max(num_streamed - 1, 0))
    while prefetch and _lacking(resident, cache, main, (1 + prefetch) * block_bytes, budgets):
        prefetch -= 1
    buffer_bytes = (1 + prefetch) * block_bytes
    if found := _lacking(resident, cache, main, buffer_bytes, budgets):
        device, need = found
        raise PlanError(
            f"The device map needs {format_size(need)} on {device_name(device)}, where max_memory gives "
            f"{format_size(budgets[device])}: {format_size(need - budgets[device])} too little. Give {device}: "
            f"{enough(need)}, or put more blocks elsewhere."
        )
    owner = {fqn: placement[id(unit)] for unit in units for fqn in unit.fqns}
    return DevicePlan(owner, main, buffer_bytes, resident, prefetch, cache)


def _lacking(
    resident: Mapping[Device, int],
    cache: Mapping[Device, int],
    main: Device,
    buffer_bytes: int,
    budgets: Mapping[Device, int],
) -> tuple[Device, int] | None:
    """The first device whose budget is too small, and what is needed there."""
    for device in {main: 0, **resident, **cache}:
        if device != "disk":
            need = resident.get(device, 0) + cache.get(device, 0) + (buffer_bytes if device == main else 0)
            if need > budgets.get(device, need):
                return device, need
    return None


def enough(num_bytes: int) -> str:
    """A size that can be typed back and is not below `num_bytes`."""
    unit, name = (10**6, "MB") if num_bytes >= 10**7 else (10**3, "kB")
    return f"{-(-num_bytes // unit)}{name}"
