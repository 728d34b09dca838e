"""Blocks x budgets -> the device of each block. Pure: it asks no machine and touches no tensor.

A no-split block is never divided and blocks with a common (tied) parameter stay together. Blocks that fit on no device
are on `disk`: while one of them runs, its parameters are in a buffer on the main device, which is the first GPU, or
the CPU when no GPU takes part; so are those of blocks on the CPU when the main device is a GPU. The plan keeps room
for that buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.base import Device
from fsdp_shard.settings import nearest
from fsdp_shard.sizes import format_size

if TYPE_CHECKING:
    from fsdp_shard.blocks import Block


@dataclass(frozen=True)
class DevicePlan:
    """`devices`: block FQN -> device, in module order. `buffer_bytes`: room for the largest block that is streamed."""

    devices: dict[str, Device]
    main: Device
    buffer_bytes: int
    resident_bytes: dict[Device, int]

    def is_streamed(self, fqn: str) -> bool:
        """Whether the block's parameters come to the main device only while it runs."""
        return _is_streamed(self.devices[fqn], self.main)

    def describe(self) -> str:
        """One line: how many blocks and bytes are where."""
        parts = []
        for device, num_bytes in self.resident_bytes.items():
            count = sum(place == device for place in self.devices.values())
            parts.append(f"{device_name(device)} {count} blocks, {format_size(num_bytes)}")
        if self.buffer_bytes:
            parts.append(f"a buffer of {format_size(self.buffer_bytes)} on {device_name(self.main)}")
        return "; ".join(parts)


@dataclass(frozen=True)
class _Unit:
    """Blocks that stay together; `streamed_bytes` is the largest of them, which is what a buffer must hold."""

    blocks: tuple[Block, ...]
    num_bytes: int
    streamed_bytes: int
    pinned: bool

    @property
    def fqns(self) -> list[str]:
        return [block.fqn for block in self.blocks]


def plan_device_map(
    blocks: Sequence[Block],
    device_map: str | Mapping[str, Device],
    budgets: Mapping[Device, int],
    *,
    ties: Sequence[Sequence[str]] = (),
) -> DevicePlan:
    """Place `blocks` (module order).

    `device_map` is a strategy or a mapping from module FQNs to devices, as `parse_device_map` gives them; `budgets`
    are bytes for each GPU and for `cpu` (for a mapping they may be empty: nothing is checked then). `ties` are groups
    of block FQNs with common parameters. Raises PlanError when a budget is too small, with what would fit.
    """
    plan = _plan(_units(blocks, ties), device_map, _in_order(budgets))
    return replace(plan, devices={block.fqn: plan.devices[block.fqn] for block in blocks})


def device_name(device: Device) -> str:
    """As people write it: `cuda:0`, `cpu`, `disk`."""
    return f"cuda:{device}" if isinstance(device, int) else device


def _units(blocks: Sequence[Block], ties: Sequence[Sequence[str]]) -> list[_Unit]:
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
        )
        for group in members.values()
    ]


def _plan(units: Sequence[_Unit], device_map: str | Mapping[str, Device], budgets: Mapping[Device, int]) -> DevicePlan:
    if isinstance(device_map, Mapping):
        return _explicit(units, device_map, budgets)
    if device_map == "cpu":
        return _all_on_cpu(units, budgets)
    main = next(iter(budgets), "cpu")
    if device_map == "disk":
        return _finish(units, {id(unit): main if unit.pinned else "disk" for unit in units}, main, budgets)
    return _fill(units, budgets, main, even=device_map in ("auto", "balanced"))


def _in_order(budgets: Mapping[Device, int]) -> dict[Device, int]:
    """GPUs by their number, then the CPU."""
    return {device: budgets[device] for device in sorted(budgets, key=lambda device: (device == "cpu", device))}


def _all_on_cpu(units: Sequence[_Unit], budgets: Mapping[Device, int]) -> DevicePlan:
    total = sum(unit.num_bytes for unit in units)
    if (budget := budgets.get("cpu", total)) < total:
        raise PlanError(
            f"device_map=cpu needs {format_size(total)} on the CPU and max_memory gives {format_size(budget)}, which "
            f"is {format_size(total - budget)} too little. Give cpu: {_enough(total)}, load in a smaller dtype, or "
            f"take device_map=auto, which leaves on disk what does not fit."
        )
    return _finish(units, {id(unit): "cpu" for unit in units}, "cpu", {})


def _explicit(units: Sequence[_Unit], mapping: Mapping[str, Device], budgets: Mapping[Device, int]) -> DevicePlan:
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
    return _finish(units, placement, main, budgets)


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


def _fill(units: Sequence[_Unit], budgets: Mapping[Device, int], main: Device, *, even: bool) -> DevicePlan:
    """GPUs in order, then CPU, then disk; with `even`, GPUs get equal parts when they hold the whole model.

    With something streamed, the buffer is made as small as can be: for each size that it might have, the units that
    would not go through it are placed first, and the smallest size at which those fit is taken.
    """
    gpus = {device: size for device, size in budgets.items() if device != "cpu"}
    if whole := _place(units, _even(units, gpus) if even else gpus, 0, main):
        return _finish(units, whole, main, budgets)
    if main == "cpu" and (whole := _place(units, budgets, 0, main)):
        return _finish(units, whole, main, budgets)
    for buffer_bytes in sorted({unit.streamed_bytes for unit in units if not unit.pinned}):
        if placement := _place(units, budgets, buffer_bytes, main, stream=True):
            return _finish(units, placement, main, budgets)
    raise PlanError(_too_small(units, budgets, main))


def _place(
    units: Sequence[_Unit], budgets: Mapping[Device, int], buffer_bytes: int, main: Device, *, stream: bool = False
) -> dict[int, Device] | None:
    """Unit -> device with a buffer of `buffer_bytes` kept free on `main`; None when it cannot be.

    A GPU that is full is not gone back to, so activations pass from each GPU to the next once. The CPU takes
    whatever still fits. Without `stream` every unit must have a place where it computes.
    """
    free = dict(budgets)
    if main not in free:
        return None
    free[main] -= buffer_bytes
    placement: dict[int, Device] = {}
    forced = [unit for unit in units if stream and (unit.pinned or unit.streamed_bytes > buffer_bytes)]
    for unit in forced:
        if unit.num_bytes > free[main]:
            return None
        free[main] -= unit.num_bytes
        placement[id(unit)] = main
    gpus = [device for device in free if device != "cpu"]
    for unit in units:
        if id(unit) in placement:
            continue
        while gpus and unit.num_bytes > free[gpus[0]]:
            gpus.pop(0)
        device: Device = gpus[0] if gpus else "cpu" if unit.num_bytes <= free.get("cpu", -1) else "disk"
        if not stream and _is_streamed(device, main):
            return None
        if device != "disk":
            free[device] -= unit.num_bytes
        placement[id(unit)] = device
    return placement


def _even(units: Sequence[_Unit], gpus: Mapping[Device, int]) -> dict[Device, int]:
    """The budgets of the GPUs cut to the smallest equal limit at which the whole model still fits on them."""
    low, high = 0, max(gpus.values(), default=0)
    while low < high:
        middle = (low + high) // 2
        fits = _place(units, {g: min(size, middle) for g, size in gpus.items()}, 0, next(iter(gpus)))
        low, high = (low, middle) if fits else (middle + 1, high)
    return {g: min(size, low) for g, size in gpus.items()}


def _finish(
    units: Sequence[_Unit], placement: Mapping[int, Device], main: Device, budgets: Mapping[Device, int]
) -> DevicePlan:
    """The plan that `placement` is, checked against `budgets`."""
    resident: dict[Device, int] = {}
    buffer_bytes = 0
    for unit in units:
        device = placement[id(unit)]
        resident[device] = resident.get(device, 0) + unit.num_bytes
        if _is_streamed(device, main):
            buffer_bytes = max(buffer_bytes, unit.streamed_bytes)
    for device, need in _needs(resident, main, buffer_bytes):
        if need > (budget := budgets.get(device, need)):
            raise PlanError(
                f"The device map needs {format_size(need)} on {device_name(device)}, where max_memory gives "
                f"{format_size(budget)}: {format_size(need - budget)} too little. Give {device}: {_enough(need)}, or "
                f"put more blocks elsewhere."
            )
    owner = {fqn: placement[id(unit)] for unit in units for fqn in unit.fqns}
    return DevicePlan(owner, main, buffer_bytes, resident)


def _needs(resident: Mapping[Device, int], main: Device, buffer_bytes: int) -> Iterator[tuple[Device, int]]:
    for device in {main: 0, **resident}:
        if device != "disk":
            yield device, resident.get(device, 0) + (buffer_bytes if device == main else 0)


def _is_streamed(device: Device, main: Device) -> bool:
    return device == "disk" or (device == "cpu" and main != "cpu")


def _too_small(units: Sequence[_Unit], budgets: Mapping[Device, int], main: Device) -> str:
    pinned = sum(unit.num_bytes for unit in units if unit.pinned)
    largest = max((unit for unit in units if not unit.pinned), key=lambda unit: unit.streamed_bytes)
    need, budget = pinned + largest.streamed_bytes, budgets.get(main, 0)
    block = max(largest.blocks, key=lambda block: block.num_bytes)
    return (
        f"max_memory gives {format_size(budget)} on {device_name(main)}, and the largest block {block.fqn} "
        f"({block.cls}) alone needs {format_size(need)} there while it runs: {format_size(need - budget)} too little. "
        f"Give {main}: {_enough(need)} or more, or load in a smaller dtype."
    )


def _enough(num_bytes: int) -> str:
    """A size that can be typed back and is not below `num_bytes`."""
    unit, name = (10**6, "MB") if num_bytes >= 10**7 else (10**3, "kB")
    return f"{-(-num_bytes // unit)}{name}"
