"""Settings of a plan beside those of the run that is planned. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.inference import DispatchConfig
from fsdp_shard.utils import parse_size, setting


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
class PlanSavingConfig:
    """What a plan needs to know of checkpoints."""

    asynchronous: bool = setting(True, "As in finetune: what is saved may be copied in host memory.")


@dataclass
class PlannedDispatchConfig(DispatchConfig):
    """As in `generate`; without a device map, only training is planned."""

    device_map: Any = field(
        default=None, metadata={"help": "Also show where the blocks would lie in generate: as there."}
    )

    def check(self, prefix: str) -> None:
        """Refuse settings that nothing would look at."""
        if self.device_map is not None:
            super().check(prefix)
        elif self != PlannedDispatchConfig():
            raise ConfigError(
                f"{prefix}device_map is not set, so the other settings of {prefix.rstrip('.')} would do nothing; add "
                f"{prefix}device_map=auto."
            )


@dataclass
class PlanSettings:
    """What `fsdp-shard plan` takes beside `model`, `shard`, `train`, `optim` and `launch`."""

    device: DeviceConfig = field(default_factory=DeviceConfig)
    data: PlanDataConfig = field(default_factory=PlanDataConfig)
    checkpoint: PlanSavingConfig = field(default_factory=PlanSavingConfig)
    dispatch: DispatchConfig = field(default_factory=PlannedDispatchConfig)
