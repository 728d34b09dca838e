"""Settings of a plan beside those of the run that is planned. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_shard.settings import setting
from fsdp_shard.sizes import parse_size


@dataclass
class DeviceConfig:
    """The devices that the run would have."""

    memory: str | None = setting(None, "Memory of each device, such as 80GB, to say whether the run fits.")

    def check(self, prefix: str) -> None:
        """Refuse what is no size."""
        if self.memory is not None:
            parse_size(self.memory, f"{prefix}memory")

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_size(self.memory, "device.memory")


@dataclass
class PlanDataConfig:
    """What a plan needs to know of the data."""

    sequence_length: int = setting(1024, "Tokens in each window.", minimum=1)


@dataclass
class PlanSettings:
    """What `fsdp-shard plan` takes beside `model`, `shard`, `train`, `optim` and `launch`."""

    device: DeviceConfig = field(default_factory=DeviceConfig)
    data: PlanDataConfig = field(default_factory=PlanDataConfig)
