"""Assigns blocks to devices, by strategy or by name. Pure: nothing here queries the machine or touches a tensor.

A no-split block is never divided, and blocks with shared (tied) parameters stay on one device. Blocks that fit on no
device are assigned to `disk`: while such a block runs, its parameters are in a buffer on the execution device, which is
the first GPU, or the CPU if no GPU is used. Blocks on the CPU are streamed in the same way if the execution device is a
GPU. The plan reserves memory for that buffer, for the buffers of prefetched blocks, for CPU memory of the same size if
blocks go from disk to a GPU, and for the KV cache of each block where it is computed.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.config import Device
from fsdp_shard.inference.device_map import device_plan
from fsdp_shard.inference.device_map.device_plan import DevicePlan, TiedBlocks, checked_plan, device_name, is_streamed
from fsdp_shard.models import Block
from fsdp_shard.utils import format_size, nearest


def plan_device_map(
    blocks: Sequence[Block],
    device_map: str | Mapping[str, Device],
    budgets: Mapping[Device, int],
    *,
    ties: Sequence[Sequence[str]] = (),
    prefetch: int = 0,
    cache_bytes: Mapping[str, int] | None = None,
) -> DevicePlan:
    """Assign each block to a device.

    Args:
        blocks: The blocks, in module order.
        device_map: A strategy, or a mapping from module FQNs to devices, as `parse_device_map` returns it.
        budgets: Bytes of each GPU and of `cpu`. May be empty for a mapping, which then stays unchecked.
        ties: Groups of block FQNs that share parameters.
        prefetch: Number of streamed blocks to prefetch; fewer if memory is short.
        cache_bytes: Block FQN -> bytes of its KV cache.

    Raises:
        PlanError: A budget is too small; the message names a sufficient one.
    """
    groups = device_plan.group_tied(blocks, ties, cache_bytes or {})
    # GPUs by number, then the CPU.
    ordered = {device: budgets[device] for device in sorted(budgets, key=lambda device: (device == "cpu", device))}
    execution_device = next(iter(ordered), "cpu")
    if isinstance(device_map, Mapping):
        plan = _by_name(groups, device_map, ordered, prefetch)
    elif device_map == "cpu":
        plan = checked_plan(groups, dict.fromkeys(groups, "cpu"), "cpu", ordered, prefetch)
    elif device_map == "disk":
        devices = {group: execution_device if group.needs_execution_device else "disk" for group in groups}
        plan = checked_plan(groups, devices, execution_device, ordered, prefetch)
    else:
        plan = _fill(groups, ordered, execution_device, prefetch, device_map)
    return replace(plan, devices={block.fqn: plan.devices[block.fqn] for block in blocks})


def _by_name(
    groups: Sequence[TiedBlocks], mapping: Mapping[str, Device], budgets: Mapping[Device, int], prefetch: int
) -> DevicePlan:
    _check_keys([block for group in groups for block in group.blocks], mapping)
    execution_device: Device = min((device for device in mapping.values() if isinstance(device, int)), default="cpu")
    devices: dict[TiedBlocks, Device] = {}
    for group in groups:
        found = {block.fqn: _lookup(block.fqn, mapping) for block in group.blocks}
        named = {fqn: device for fqn, device in found.items() if device is not None}
        if not named:
            raise PlanError(f"device_map names no device for {', '.join(found)}; add it, or '*' for all other modules.")
        device, *others = dict.fromkeys(named.values())
        if others:
            conflict = ", ".join(f"{fqn}: {device_name(device)}" for fqn, device in named.items())
            raise PlanError(f"device_map divides blocks that share tied parameters ({conflict}); give them one device.")
        is_moved = group.needs_execution_device and is_streamed(device, execution_device)
        devices[group] = execution_device if is_moved else device
    return checked_plan(groups, devices, execution_device, budgets, prefetch)


def _check_keys(blocks: Sequence[Block], mapping: Mapping[str, Device]) -> None:
    known = [block.fqn for block in blocks]
    for key in mapping:
        if key == "" or any(_covers(key, fqn) for fqn in known):
            continue
        outer = next((block for block in blocks if not block.direct and _covers(block.fqn, key)), None)
        if outer is not None:
            raise PlanError(
                f"device_map has {key}, which would divide the block {outer.fqn} ({outer.cls}); name the block."
            )
        raise PlanError(f"device_map has {key}, which is not a module with parameters{nearest(key, known)}.")


def _lookup(fqn: str, mapping: Mapping[str, Device]) -> Device | None:
    """The device of the longest key that covers `fqn`."""
    key = max((key for key in mapping if _covers(key, fqn)), key=len, default=None)
    return None if key is None else mapping[key]


def _covers(key: str, fqn: str) -> bool:
    return key in ("", fqn) or fqn.startswith(key + ".")


def _fill(
    groups: Sequence[TiedBlocks], budgets: Mapping[Device, int], execution_device: Device, prefetch: int, strategy: str
) -> DevicePlan:
    """Fill GPUs in order, then the CPU, then the disk.

    Except with `sequential`, GPUs that hold the whole model receive equal parts. With `balanced_low_0`, GPU 0 then
    receives as little as the other budgets allow, which leaves memory for what `generate` keeps there. If blocks must
    be streamed, the buffer is as small as possible: for each possible size, the blocks that do not fit into it are
    assigned first, and the smallest size at which those fit is used. Prefetched blocks use at most half of the memory,
    because each buffer could have held a resident block.

    Args:
        groups: Tied blocks, in module order.
        budgets: Bytes of each device, GPUs first.
        execution_device: The device that streamed blocks compute on.
        prefetch: Maximum number of streamed blocks to prefetch.
        strategy: `auto`, `balanced`, `balanced_low_0` or `sequential`.

    Raises:
        PlanError: The execution device cannot hold its part; the message names a sufficient budget.
    """
    gpus = {device: size for device, size in budgets.items() if device != "cpu"}
    if strategy == "balanced_low_0" and len(gpus) > 1:

        def fits(size: int) -> bool:
            return bool(_assign(groups, {**gpus, execution_device: size}, 0, execution_device))

        gpus[execution_device] = _smallest(gpus[execution_device], fits)
    if strategy != "sequential":
        gpus = _even(groups, gpus, execution_device)
    if devices := _assign(groups, budgets if execution_device == "cpu" else gpus, 0, execution_device):
        return checked_plan(groups, devices, execution_device, budgets, 0, is_given=False)
    sizes = sorted({group.largest_bytes for group in groups if not group.needs_execution_device})
    for ahead in range(prefetch, -1, -1):
        for block_bytes in sizes:
            if ahead and 2 * (1 + ahead) * block_bytes > budgets.get(execution_device, 0):
                continue
            if devices := _assign_with_staging(groups, budgets, block_bytes, execution_device, 1 + ahead):
                return checked_plan(groups, devices, execution_device, budgets, ahead, is_given=False)
    raise PlanError(_too_small(groups, budgets, execution_device))


def _assign(
    groups: Sequence[TiedBlocks],
    budgets: Mapping[Device, int],
    block_bytes: int,
    execution_device: Device,
    num_buffers: int = 0,
) -> dict[TiedBlocks, Device] | None:
    """Assign each group to a device, with `num_buffers` of `block_bytes` reserved; None if they do not fit.

    The buffers are on the execution device. Once a GPU is full, no later block is assigned to it, so activations move
    from each GPU to the next once. The CPU holds whatever still fits. Without buffers nothing is streamed.
    """
    free = dict(budgets)
    if execution_device not in free:
        return None
    # Until a group is known to compute elsewhere, its KV cache counts on the execution device.
    free[execution_device] -= num_buffers * block_bytes + sum(group.cache_bytes for group in groups)
    # Inputs stay on the device of blocks that need the execution device, and nothing moves them.
    forced = [
        group for group in groups if group.needs_execution_device or (num_buffers and group.largest_bytes > block_bytes)
    ]
    free[execution_device] -= sum(group.num_bytes for group in forced)
    if free[execution_device] < 0:
        return None
    devices: dict[TiedBlocks, Device] = dict.fromkeys(forced, execution_device)
    gpus = [device for device in free if device != "cpu"]
    for group in groups:
        if group in devices:
            continue
        while gpus and _needed(group, gpus[0], execution_device) > free[gpus[0]]:
            gpus.pop(0)
        device: Device = gpus[0] if gpus else "cpu" if group.num_bytes <= free.get("cpu", -1) else "disk"
        if not num_buffers and is_streamed(device, execution_device):
            return None
        if device != "disk":
            free[device] -= _needed(group, device, execution_device)
        if not is_streamed(device, execution_device) and device != execution_device:
            free[execution_device] += group.cache_bytes
        devices[group] = device
    return devices


def _assign_with_staging(
    groups: Sequence[TiedBlocks],
    budgets: Mapping[Device, int],
    block_bytes: int,
    execution_device: Device,
    num_buffers: int,
) -> dict[TiedBlocks, Device] | None:
    """Like `_assign`, but reserve CPU memory for `num_buffers` if a GPU's blocks are read from disk."""
    devices = _assign(groups, budgets, block_bytes, execution_device, num_buffers)
    if devices is None or "disk" not in devices.values() or execution_device == "cpu" or "cpu" not in budgets:
        return devices
    left = budgets["cpu"] - num_buffers * block_bytes
    return _assign(groups, {**budgets, "cpu": left}, block_bytes, execution_device, num_buffers)


def _needed(group: TiedBlocks, device: Device, execution_device: Device) -> int:
    """Bytes of `group` on `device`, excluding the KV cache if it is already reserved on `execution_device`."""
    is_reserved = device == execution_device or is_streamed(device, execution_device)
    return group.num_bytes + (0 if is_reserved else group.cache_bytes)


def _even(groups: Sequence[TiedBlocks], gpus: Mapping[Device, int], execution_device: Device) -> dict[Device, int]:
    """The GPU budgets, cut to the smallest equal limit at which the whole model still fits."""

    def limited(limit: int) -> dict[Device, int]:
        return {gpu: min(size, limit) for gpu, size in gpus.items()}

    def fits(limit: int) -> bool:
        return bool(_assign(groups, limited(limit), 0, execution_device))

    return limited(_smallest(max(gpus.values(), default=0), fits))


def _smallest(limit: int, fits: Callable[[int], bool]) -> int:
    """The smallest size below `limit` that fits, or `limit`."""
    return bisect_left(range(limit), True, key=fits)


def _too_small(groups: Sequence[TiedBlocks], budgets: Mapping[Device, int], execution_device: Device) -> str:
    staying = sum(group.num_bytes for group in groups if group.needs_execution_device)
    streamable = [group for group in groups if not group.needs_execution_device]
    largest = max(streamable, key=lambda group: group.largest_bytes)
    cache = sum(group.cache_bytes for group in groups)
    need, budget = staying + largest.largest_bytes + cache, budgets.get(execution_device, 0)
    for_cache = f", {format_size(cache)} of it for the KV cache" if cache else ""
    block = max(largest.blocks, key=lambda block: block.num_bytes)
    return (
        f"max_memory gives {format_size(budget)} on {device_name(execution_device)}, and the largest block {block.fqn} "
        f"({block.cls}) alone needs {format_size(need)} there while it runs{for_cache}: {format_size(need - budget)} "
        f"too little. Give {execution_device}: {device_plan.enough(need)} or more, or load in a smaller dtype."
    )
