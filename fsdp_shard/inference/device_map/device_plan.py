"""A device plan: the device of each block, and the memory required on each device."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.config import Device
from fsdp_shard.models import Block
from fsdp_shard.utils import format_count, format_size


@dataclass(frozen=True)
class DevicePlan:
    """The device of each block.

    Attributes:
        devices: Block FQN -> device, in module order.
        execution_device: The device that streamed blocks compute on.
        buffer_bytes: Bytes on `execution_device` for `1 + prefetch` of the largest streamed block.
        resident_bytes: Bytes of the blocks assigned to each device.
        prefetch: Number of streamed blocks to fetch ahead.
        cache_bytes: Bytes of the KV cache, by computing device.
        staging_bytes: Bytes of CPU memory for copying `1 + prefetch` blocks from disk to a GPU.
    """

    devices: dict[str, Device]
    execution_device: Device
    buffer_bytes: int
    resident_bytes: dict[Device, int]
    prefetch: int = 0
    cache_bytes: dict[Device, int] = field(default_factory=dict)
    staging_bytes: int = 0

    def is_streamed(self, fqn: str) -> bool:
        """Whether the block's parameters are on the execution device only while it runs."""
        return is_streamed(self.devices[fqn], self.execution_device)

    def table(self) -> str:
        """Return a line per run of neighboring blocks on one device."""
        runs: list[tuple[Device, list[str]]] = []
        for fqn, device in self.devices.items():
            if not runs or runs[-1][0] != device:
                runs.append((device, []))
            runs[-1][1].append(fqn or "(root)")
        return "\n".join(
            f"{device_name(device):<8} {fqns[0]}{f' ... {fqns[-1]}' if len(fqns) > 1 else ''}" for device, fqns in runs
        )

    def describe(self) -> str:
        """Return one line with the number of blocks and bytes on each device."""
        counts = Counter(self.devices.values())
        parts = [
            f"{device_name(device)} {format_count(counts[device], 'block')}, {format_size(num_bytes)}"
            for device, num_bytes in self.resident_bytes.items()
        ]
        if self.buffer_bytes:
            blocks = f"{1 + self.prefetch} blocks" if self.prefetch else "one block"
            device_of_buffer = device_name(self.execution_device)
            parts.append(f"{format_size(self.buffer_bytes)} on {device_of_buffer} for {blocks} in flight")
        if self.staging_bytes:
            parts.append(f"{format_size(self.staging_bytes)} on cpu for what is read from disk")
        for device, num_bytes in self.cache_bytes.items():
            parts.append(f"{format_size(num_bytes)} on {device_name(device)} for the KV cache")
        return "; ".join(parts)


@dataclass(frozen=True, eq=False)
class TiedBlocks:
    """Blocks that stay together because they share parameters; usually a single block.

    Attributes:
        blocks: The blocks, in module order.
        cache_bytes: Bytes of their KV cache.
    """

    blocks: tuple[Block, ...]
    cache_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.num_bytes for block in self.blocks)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest block, the minimum buffer size for streaming."""
        return max(block.num_bytes for block in self.blocks)

    @property
    def needs_execution_device(self) -> bool:
        """Whether the blocks cannot be streamed, because parameters that no layer owns are needed throughout a pass."""
        return any(block.direct for block in self.blocks)


def group_tied(
    blocks: Sequence[Block], ties: Sequence[Sequence[str]], cache_bytes: Mapping[str, int]
) -> list[TiedBlocks]:
    """Group tied `blocks`, with each group at the position of its first block."""
    group_of = {fqn: min(group, key=[block.fqn for block in blocks].index) for group in ties for fqn in group}
    members: dict[str, list[Block]] = {}
    for block in blocks:
        members.setdefault(group_of.get(block.fqn, block.fqn), []).append(block)
    return [
        TiedBlocks(tuple(group), sum(cache_bytes.get(block.fqn, 0) for block in group)) for group in members.values()
    ]


def checked_plan(
    groups: Sequence[TiedBlocks],
    devices: Mapping[TiedBlocks, Device],
    execution_device: Device,
    budgets: Mapping[Device, int],
    prefetch: int,
    *,
    is_given: bool = True,
) -> DevicePlan:
    """Plan `groups` on `devices`, reducing the prefetch as far as the budgets require.

    Args:
        groups: The blocks.
        devices: The device of each group.
        execution_device: The device that computes.
        budgets: Bytes by device.
        prefetch: Maximum number of streamed blocks to prefetch.
        is_given: Whether the user chose the devices, so that a device map derived from the budgets may help.

    Raises:
        PlanError: A device needs more than its budget even without prefetch.
    """
    streamed = [group for group in groups if is_streamed(devices[group], execution_device)]
    block_bytes = max((group.largest_bytes for group in streamed), default=0)
    on_disk = [group.largest_bytes for group in streamed if devices[group] == "disk"]
    staged_bytes = 0 if execution_device == "cpu" else max(on_disk, default=0)
    resident: Counter[Device] = Counter()
    cache: Counter[Device] = Counter()
    for group in groups:
        resident[devices[group]] += group.num_bytes
        if group.cache_bytes:
            computes_on = execution_device if is_streamed(devices[group], execution_device) else devices[group]
            cache[computes_on] += group.cache_bytes
    for ahead in range(min(prefetch, max(sum(len(group.blocks) for group in streamed) - 1, 0)), -1, -1):
        needed = resident + cache
        needed[execution_device] += (1 + ahead) * block_bytes
        needed["cpu"] += (1 + ahead) * staged_bytes
        lacking = [
            device for device in needed if device != "disk" and needed[device] > budgets.get(device, sys.maxsize)
        ]
        if not lacking:
            owners = {block.fqn: devices[group] for group in groups for block in group.blocks}
            return DevicePlan(
                owners,
                execution_device,
                buffer_bytes=(1 + ahead) * block_bytes,
                resident_bytes=dict(resident),
                prefetch=ahead,
                cache_bytes=dict(cache),
                staging_bytes=(1 + ahead) * staged_bytes,
            )
    device = execution_device if execution_device in lacking else lacking[0]
    need, budget = needed[device], budgets[device]
    raise PlanError(
        f"The device map needs {format_size(need)} on {device_name(device)}, where max_memory gives "
        f"{format_size(budget)}: {format_size(need - budget)} too little. Give {device}: {enough(need)}, "
        + ("load in a smaller dtype, put more blocks elsewhere, or take device_map=auto." if is_given else "or more.")
    )


def device_name(device: Device) -> str:
    """torch's name of a device: `cuda:0`, `cpu`; or `disk`."""
    return f"cuda:{device}" if isinstance(device, int) else device


def is_streamed(device: Device, execution_device: Device) -> bool:
    """Whether a block assigned to `device` is copied to `execution_device` each time it runs."""
    return device == "disk" or (device == "cpu" and execution_device != "cpu")


def enough(num_bytes: int) -> str:
    """Return a size of at least `num_bytes` that `max_memory` accepts."""
    unit, name = (2**20, "MiB") if num_bytes >= 10 * 2**20 else (2**10, "KiB")
    return f"{-(-num_bytes // unit)}{name}"
