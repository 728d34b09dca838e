"""Blocks x budgets -> the device of each block. Pure: it asks no machine and touches no tensor.

A no-split block is never divided and blocks with a common (tied) parameter stay together. Blocks that fit on no device
are on `disk`: while one of them runs, its parameters are in a buffer on the main device, which is the first GPU, or
the CPU when no GPU takes part; so are those of blocks on the CPU when the main device is a GPU. The plan keeps room
for that buffer, for those of the blocks that are fetched ahead, and for the cache of keys and values of each block
where it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.base import Device
from fsdp_shard.settings import nearest
from fsdp_shard.sizes import format_size

if TYPE_CHECKING:
    from fsdp_shard.blocks import Block


@dataclass(frozen=True)
class DevicePlan:
    """`devices`: block FQN -> device, in module order.

    `buffer_bytes`: room on `main` for `1 + prefetch` of the largest block that is streamed; `cache_bytes`: room for
    keys and values, by the device where they are computed.
    """

    devices: dict[str, Device]
    main: Device
    buffer_bytes: int
    resident_bytes: dict[Device, int]
    prefetch: int = 0
    cache_bytes: dict[Device, int] = field(default_factory=dict)

    def is_streamed(self, fqn: str) -> bool:
        """Whether the block's parameters come to the main device only while it runs."""
        return _is_streamed(self.devices[fqn], self.main)

    def table(self) -> str:
        """A line for each run of neighbouring blocks on one device."""
        runs: list[tuple[Device, list[str]]] = []
        for fqn, device in self.devices.items():
            if not runs or runs[-1][0] != device:
                runs.append((device, []))
            runs[-1][1].append(fqn or "(root)")
        return "\n".join(
            f"{device_name(device):<8} {fqns[0]}{f' ... {fqns[-1]}' if len(fqns) > 1 else ''}" for device, fqns in runs
        )

    def describe(self) -> str:
        """One line: how many blocks and bytes are where."""
        parts = []
        for device, num_bytes in self.resident_bytes.items():
            count = sum(place == device for place in self.devices.values())
            parts.append(f"{device_name(device)} {count} blocks, {format_size(num_bytes)}")
        if self.buffer_bytes:
            blocks = f"{1 + self.prefetch} blocks" if self.prefetch else "one block"
            parts.append(f"{format_size(self.buffer_bytes)} on {device_name(self.main)} for {blocks} in flight")
        for device, num_bytes in self.cache_bytes.items():
            parts.append(f"{format_size(num_bytes)} on {device_name(device)} for keys and values")
        return "; ".join(parts)


@dataclass(frozen=True)
class _Unit:
    """Blocks that stay together; `streamed_bytes` is the largest of them, which is what a buffer must hold."""

    blocks: tuple[Block, ...]
    num_bytes: int
    streamed_bytes: int
    pinned: bool
    cache_bytes: int

    @property
    def fqns(self) -> list[str]:
        return [block.fqn for block in self.blocks]


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
    plan = _plan(_units(blocks, ties, cache_bytes or {}), device_map, _in_order(budgets), prefetch)
    return replace(plan, devices={block.fqn: plan.devices[block.fqn] for block in blocks})


def device_name(device: Device) -> str:
    """As people write it: `cuda:0`, `cpu`, `disk`."""
    return f"cuda:{device}" if isinstance(device, int) else device


def _units(blocks: Sequence[Block], ties: Sequence[Sequence[str]], cache_bytes: Mapping[str, int]) -> list[_Unit]:
    """Groups of tied blocks, each where its first block is."""
    group_of = {fqn: min(group, key=[block.fqn for block in blocks].index) for group in ties for fqn in group}
    members: dict[str, list[Block]] = {}
    for block in blocks:
        members.setdefault(group_of.get(block.fqn, block.fqn), []).append(block)
    return [
        _Unit(
            tuple(group),
            sum(block.num_bytes for block in group),
            max(block.num_bytes for block in group),
            any(block.direct for block in group),
            sum(cache_bytes.get(block.fqn, 0) for block in group),
        )
        for group in members.values()
    ]


def _plan(
    units: Sequence[_Unit], device_map: str | Mapping[str, Device], budgets: Mapping[Device, int], prefetch: int
) -> DevicePlan:
    if isinstance(device_map, Mapping):
        return _explicit(units, device_map, budgets, prefetch)
    if device_map == "cpu":
        return _all_on_cpu(units, budgets)
    main = next(iter(budgets), "cpu")
    if device_map == "disk":
        return _finish(units, {id(unit): main if unit.pinned else "disk" for unit in units}, main, budgets, prefetch)
    return _fill(units, budgets, main, prefetch, device_map)


def _in_order(budgets: Mapping[Device, int]) -> dict[Device, int]:
    """GPUs by their number, then the CPU."""
    return {device: budgets[device] for device in sorted(budgets, key=lambda device: (device == "cpu", device))}


def _all_on_cpu(units: Sequence[_Unit], budgets: Mapping[Device, int]) -> DevicePlan:
    total = sum(unit.num_bytes + unit.cache_bytes for unit in units)
    if (budget := budgets.get("cpu", total)) < total:
        raise PlanError(
            f"device_map=cpu needs {format_size(total)} on the CPU and max_memory gives {format_size(budget)}, which "
            f"is {format_size(total - budget)} too little. Give cpu: {_enough(total)}, load in a smaller dtype, or "
            f"take device_map=auto, which leaves on disk what does not fit."
        )
    return _finish(units, {id(unit): "cpu" for unit in units}, "cpu", {}, 0)


def _explicit(
    units: Sequence[_Unit], mapping: Mapping[str, Device], budgets: Mapping[Device, int], prefetch: int
) -> DevicePlan:
    blocks = [block for unit in units for block in unit.blocks]
    _check_keys(blocks, mapping)
    gpus = [device for device in mapping.values() if isinstance(device, int)]
    main: Device = min(gpus) if gpus else "cpu"
    placement: dict[int, Device] = {}
    for unit in units:
        found = {block.fqn: _lookup(block.fqn, mapping) for block in unit.blocks}
        devices = {device for device in found.values() if device is not None}
        if not devices:
            raise PlanError(
                f"device_map names no device for {', '.join(unit.fqns)}; add it, or one for '' as the rest."
            )
        if len(devices) > 1:
            where = ", ".join(f"{fqn}: {device_name(d)}" for fqn, d in found.items() if d is not None)
            raise PlanError(f"device_map divides blocks that share tied parameters ({where}); give them one device.")
        device = devices.pop()
        placement[id(unit)] = main if unit.pinned and _is_streamed(device, main) else device
    return _finish(units, placement, main, budgets, prefetch)


def _check_keys(blocks: Sequence[Block], mapping: Mapping[str, Device]) -> None:
    known = [block.fqn for block in blocks]
    for key in mapping:
        if key == "" or any(_covers(key, fqn) for fqn in known):
            continue
        inside = next((block for block in blocks if not block.direct and _covers(block.fqn, key)), None)
        if inside is not None:
            raise PlanError(
                f"device_map has {key}, which would divide the block {inside.fqn} ({inside.cls}); name the block."
            )
        raise PlanError(f"device_map has {key}, which is no module with parameters{nearest(key, known)}.")


def _lookup(fqn: str, mapping: Mapping[str, Device]) -> Device | None:
    """The device of the longest key that covers `fqn`."""
    keys = [key for key in mapping if _covers(key, fqn)]
    return mapping[max(keys, key=len)] if keys else None


def _covers(key: str, fqn: str) -> bool:
    return key in ("", fqn) or fqn.startswith(key + ".")


def _fill(
    units: Sequence[_Unit], budgets: Mapping[Device, int], main: Device, prefetch: int, strategy: str
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
        return _finish(units, whole, main, budgets, 0)
    if main == "cpu" and (whole := _place(units, budgets, 0, main)):
        return _finish(units, whole, main, budgets, 0)
    for ahead in range(prefetch, -1, -1):
        for block_bytes in sorted({unit.streamed_bytes for unit in units if not unit.pinned}):
            buffer_bytes = (1 + ahead) * block_bytes
            if ahead and 2 * buffer_bytes > budgets.get(main, 0):
                continue
            if placement := _place(units, budgets, block_bytes, main, stream=True, num_buffers=1 + ahead):
                return _finish(units, placement, main, budgets, ahead)
    raise PlanError(_too_small(units, budgets, main))


def _place(
    units: Sequence[_Unit],
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
        if not stream and _is_streamed(device, main):
            return None
        if device != "disk":
            free[device] -= _needed(unit, device, main)
        if not _is_streamed(device, main) and device != main:
            free[main] += unit.cache_bytes
        placement[id(unit)] = device
    return placement


def _needed(unit: _Unit, device: Device, main: Device) -> int:
    """What `unit` takes on `device` beside the room that is kept on `main` for its keys and values."""
    return unit.num_bytes + (0 if device == main or _is_streamed(device, main) else unit.cache_bytes)


def _low_0(units: Sequence[_Unit], gpus: Mapping[Device, int]) -> dict[Device, int]:
    """The budgets with that of the first GPU cut to the least at which the model still fits on them."""
    first = next(iter(gpus))
    low, high = 0, gpus[first]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _place(units, {**gpus, first: middle}, 0, first) else (middle + 1, high)
    return {**gpus, first: low}


def _even(units: Sequence[_Unit], gpus: Mapping[Device, int]) -> dict[Device, int]:
    """The budgets of the GPUs cut to the smallest equal limit at which the whole model still fits on them."""
    low, high = 0, max(gpus.values(), default=0)
    while low < high:
        middle = (low + high) // 2
        fits = _place(units, {g: min(size, middle) for g, size in gpus.items()}, 0, next(iter(gpus)))
        low, high = (low, middle) if fits else (middle + 1, high)
    return {g: min(size, low) for g, size in gpus.items()}


def _finish(
    units: Sequence[_Unit],
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
        if _is_streamed(device, main):
            block_bytes, num_streamed = max(block_bytes, unit.streamed_bytes), num_streamed + len(unit.blocks)
        if unit.cache_bytes:
            computes = main if _is_streamed(device, main) else device
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
            f"{_enough(need)}, or put more blocks elsewhere."
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


def _is_streamed(device: Device, main: Device) -> bool:
    return device == "disk" or (device == "cpu" and main != "cpu")


def _too_small(units: Sequence[_Unit], budgets: Mapping[Device, int], main: Device) -> str:
    pinned = sum(unit.num_bytes for unit in units if unit.pinned)
    largest = max((unit for unit in units if not unit.pinned), key=lambda unit: unit.streamed_bytes)
    cache = sum(unit.cache_bytes for unit in units)
    need, budget = pinned + largest.streamed_bytes + cache, budgets.get(main, 0)
    kept = f", {format_size(cache)} of it for keys and values" if cache else ""
    block = max(largest.blocks, key=lambda block: block.num_bytes)
    return (
        f"max_memory gives {format_size(budget)} on {device_name(main)}, and the largest block {block.fqn} "
        f"({block.cls}) alone needs {format_size(need)} there while it runs{kept}: {format_size(need - budget)} too "
        f"little. Give {main}: {_enough(need)} or more, or load in a smaller dtype."
    )


def _enough(num_bytes: int) -> str:
    """A size that can be typed back and is not below `num_bytes`."""
    unit, name = (10**6, "MB") if num_bytes >= 10**7 else (10**3, "kB")
    return f"{-(-num_bytes // unit)}{name}"
