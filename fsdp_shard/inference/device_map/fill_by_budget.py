"""Budgets that are filled in order: GPUs, then the CPU, then the disk, with room for what is streamed. Pure.

Knows the strategies that divide a model by sizes alone, and says what would be enough where nothing fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.config import Device
from fsdp_shard.inference.device_map.device_plan import DevicePlan, device_name, is_streamed
from fsdp_shard.inference.device_map.tied_groups import Unit, checked_plan, enough
from fsdp_shard.utils import format_size


def fill_devices(
    units: Sequence[Unit], budgets: Mapping[Device, int], main: Device, prefetch: int, strategy: str
) -> DevicePlan:
    """GPUs in order, then CPU, then disk; but for `sequential`, GPUs get equal parts when they hold the whole model.

    `balanced_low_0` then leaves GPU 0 as empty as the others allow, for what `generate` keeps there. With something
    streamed, the buffer is made as small as can be: for each size that it might have, the units that would not go
    through it are placed first, and the smallest size at which those fit is taken. Fetching ahead is not worth more
    than half of the memory: each buffer is a block that could have stayed.
    """
    gpus = {device: size for device, size in budgets.items() if device != "cpu"}
    if strategy == "balanced_low_0" and len(gpus) > 1:
        gpus = _low_0(units, gpus)
    if whole := _place(units, gpus if strategy == "sequential" else _even(units, gpus), 0, main):
        return checked_plan(units, whole, main, budgets, 0)
    if main == "cpu" and (whole := _place(units, budgets, 0, main)):
        return checked_plan(units, whole, main, budgets, 0)
    for ahead in range(prefetch, -1, -1):
        for block_bytes in sorted({unit.streamed_bytes for unit in units if not unit.pinned}):
            buffer_bytes = (1 + ahead) * block_bytes
            if ahead and 2 * buffer_bytes > budgets.get(main, 0):
                continue
            if placement := _place(units, budgets, block_bytes, main, stream=True, num_buffers=1 + ahead):
                return checked_plan(units, placement, main, budgets, ahead)
    raise PlanError(_too_small(units, budgets, main))


def _place(
    units: Sequence[Unit],
    budgets: Mapping[Device, int],
    block_bytes: int,
    main: Device,
    *,
    stream: bool = False,
    num_buffers: int = 1,
) -> dict[int, Device] | None:
    """Unit -> device with `num_buffers` of `block_bytes` kept free on `main`; None when it cannot be.

    A GPU that is full is not gone back to, so activations pass from each GPU to the next once. The CPU takes
    whatever still fits. Without `stream` every unit must have a place where it computes.
    """
    free = dict(budgets)
    if main not in free:
        return None
    # Until a unit is found to compute elsewhere, its keys and values are on the main device.
    free[main] -= num_buffers * block_bytes + sum(unit.cache_bytes for unit in units)
    placement: dict[int, Device] = {}
    forced = [unit for unit in units if stream and (unit.pinned or unit.streamed_bytes > block_bytes)]
    for unit in forced:
        free[main] -= unit.num_bytes
        placement[id(unit)] = main
    if free[main] < 0:
        return None
    gpus = [device for device in free if device != "cpu"]
    for unit in units:
        if id(unit) in placement:
            continue
        while gpus and _needed(unit, gpus[0], main) > free[gpus[0]]:
            gpus.pop(0)
        device: Device = gpus[0] if gpus else "cpu" if unit.num_bytes <= free.get("cpu", -1) else "disk"
        if not stream and is_streamed(device, main):
            return None
        if device != "disk":
            free[device] -= _needed(unit, device, main)
        if not is_streamed(device, main) and device != main:
            free[main] += unit.cache_bytes
        placement[id(unit)] = device
    return placement


def _needed(unit: Unit, device: Device, main: Device) -> int:
    """What `unit` takes on `device` beside the room that is kept on `main` for its keys and values."""
    return unit.num_bytes + (0 if device == main or is_streamed(device, main) else unit.cache_bytes)


def _low_0(units: Sequence[Unit], gpus: Mapping[Device, int]) -> dict[Device, int]:
    """The budgets with that of the first GPU cut to the least at which the model still fits on them."""
    first = next(iter(gpus))
    low, high = 0, gpus[first]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _place(units, {**gpus, first: middle}, 0, first) else (middle + 1, high)
    return {**gpus, first: low}


def _even(units: Sequence[Unit], gpus: Mapping[Device, int]) -> dict[Device, int]:
    """The budgets of the GPUs cut to the smallest equal limit at which the whole model still fits on them."""
    low, high = 0, max(gpus.values(), default=0)
    while low < high:
        middle = (low + high) // 2
        fits = _place(units, {g: min(size, middle) for g, size in gpus.items()}, 0, next(iter(gpus)))
        low, high = (low, middle) if fits else (middle + 1, high)
    return {g: min(size, low) for g, size in gpus.items()}


def _too_small(units: Sequence[Unit], budgets: Mapping[Device, int], main: Device) -> str:
    pinned = sum(unit.num_bytes for unit in units if unit.pinned)
    largest = max((unit for unit in units if not unit.pinned), key=lambda unit: unit.streamed_bytes)
    cache = sum(unit.cache_bytes for unit in units)
    need, budget = pinned + largest.streamed_bytes + cache, budgets.get(main, 0)
    kept = f", {format_size(cache)} of it for keys and values" if cache else ""
    block = max(largest.blocks, key=lambda block: block.num_bytes)
    return (
        f"max_memory gives {format_size(budget)} on {device_name(main)}, and the largest block {block.fqn} "
        f"({block.cls}) alone needs {format_size(need)} there while it runs{kept}: {format_size(need - budget)} too "
        f"little. Give {main}: {enough(need)} or more, or load in a smaller dtype."
    )
