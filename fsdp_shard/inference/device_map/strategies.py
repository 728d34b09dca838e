"""Blocks x budgets -> the device of each block. Pure: it asks no machine and touches no tensor.

A no-split block is never divided and blocks with a common (tied) parameter stay together. Blocks that fit on no device
are on `disk`: while one of them runs, its parameters are in a buffer on the main device, which is the first GPU, or
the CPU when no GPU takes part; so are those of blocks on the CPU when the main device is a GPU. The plan keeps room
for that buffer, for those of the blocks that are fetched ahead, and for the cache of keys and values of each block
where it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.config import Device
from fsdp_shard.inference.device_map.device_plan import DevicePlan
from fsdp_shard.inference.device_map.explicit import place_by_name
from fsdp_shard.inference.device_map.fill_by_budget import fill_devices
from fsdp_shard.inference.device_map.tied_groups import Unit, checked_plan, enough, make_units
from fsdp_shard.utils import format_size

if TYPE_CHECKING:
    from fsdp_shard.models import Block


def plan_device_map(
    blocks: Sequence[Block],
    device_map: str | Mapping[str, Device],
    budgets: Mapping[Device, int],
    *,
    ties: Sequence[Sequence[str]] = (),
    prefetch: int = 0,
    cache_bytes: Mapping[str, int] | None = None,
) -> DevicePlan:
    """Place `blocks` (module order).

    `device_map` is a strategy or a mapping from module FQNs to devices, as `parse_device_map` gives them; `budgets`
    are bytes for each GPU and for `cpu` (for a mapping they may be empty: nothing is checked then). `ties` are groups
    of block FQNs with common parameters. `prefetch` streamed blocks, or fewer where memory is short, are fetched ahead;
    `cache_bytes` are those of the keys and values of a block. Raises PlanError when a budget is too small, with what
    would fit.
    """
    plan = _plan(make_units(blocks, ties, cache_bytes or {}), device_map, _in_order(budgets), prefetch)
    return replace(plan, devices={block.fqn: plan.devices[block.fqn] for block in blocks})


def _plan(
    units: Sequence[Unit], device_map: str | Mapping[str, Device], budgets: Mapping[Device, int], prefetch: int
) -> DevicePlan:
    if isinstance(device_map, Mapping):
        return place_by_name(units, device_map, budgets, prefetch)
    if device_map == "cpu":
        return all_on_cpu(units, budgets)
    main = next(iter(budgets), "cpu")
    if device_map == "disk":
        return checked_plan(
            units, {id(unit): main if unit.pinned else "disk" for unit in units}, main, budgets, prefetch
        )
    return fill_devices(units, budgets, main, prefetch, device_map)


def _in_order(budgets: Mapping[Device, int]) -> dict[Device, int]:
    """GPUs by their number, then the CPU."""
    return {device: budgets[device] for device in sorted(budgets, key=lambda device: (device == "cpu", device))}


def all_on_cpu(units: Sequence[Unit], budgets: Mapping[Device, int]) -> DevicePlan:
    total = sum(unit.num_bytes + unit.cache_bytes for unit in units)
    if (budget := budgets.get("cpu", total)) < total:
        raise PlanError(
            f"device_map=cpu needs {format_size(total)} on the CPU and max_memory gives {format_size(budget)}, which "
            f"is {format_size(total - budget)} too little. Give cpu: {enough(total)}, load in a smaller dtype, or "
            f"take device_map=auto, which leaves on disk what does not fit."
        )
    return checked_plan(units, {id(unit): "cpu" for unit in units}, "cpu", {}, 0)
