"""Where each block of a model lies, what that takes on each device, and how it is told. Knows no way to find a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_shard.inference.config import Device
from fsdp_shard.utils import format_size


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
        return is_streamed(self.devices[fqn], self.main)

    def table(self) -> str:
        """A line for each run of neighboring blocks on one device."""
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


def device_name(device: Device) -> str:
    """As people write it: `cuda:0`, `cpu`, `disk`."""
    return f"cuda:{device}" if isinstance(device, int) else device


def is_streamed(device: Device, main: Device) -> bool:
    return device == "disk" or (device == "cpu" and main != "cpu")
