"""Settings of `plan` in addition to those of the planned run. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.inference import DispatchConfig
from fsdp_shard.utils import Parsed, parse_size, setting


@dataclass
class DeviceConfig:
    """The devices that the run would have."""

    memory: str | None = setting(None, "Memory of each device, such as 80GB, to check whether the run fits.")
    memory_bytes = Parsed("memory", lambda size, name: None if size is None else parse_size(size, name))


@dataclass
class PlanDataConfig:
    """The settings of the data that a plan depends on."""

    sequence_length: int | None = setting(
        None, "Length of each sample, in tokens. Default: as in finetune, by the model's context.", minimum=1
    )
    packing: bool = setting(False, "As in finetune: several documents in a sample, which attention keeps apart.")


@dataclass
class PlanSavingConfig:
    """The settings of checkpoints that a plan depends on."""

    asynchronous: bool = setting(True, "As in finetune: saves may copy the state into host memory.")


@dataclass
class PlannedDispatchConfig(DispatchConfig):
    """As in `generate`; without a device map, only training is planned."""

    device_map: Any = field(
        default=None, metadata={"help": "Also plan the device map of generate; takes the same values."}
    )

    def check(self, prefix: str) -> None:
        """Raise ConfigError for settings that would do nothing."""
        if self.device_map is not None:
            super().check(prefix)
        elif self != PlannedDispatchConfig():
            raise ConfigError(
                f"{prefix}device_map is not set, so the other settings of {prefix.rstrip('.')} would do nothing; add "
                f"{prefix}device_map=auto."
            )


@dataclass
class PlanSettings:
    """The settings of `fsdp-shard plan` besides `model`, `shard`, `train`, `optim` and `launch`."""

    device: DeviceConfig = field(default_factory=DeviceConfig)
    data: PlanDataConfig = field(default_factory=PlanDataConfig)
    checkpoint: PlanSavingConfig = field(default_factory=PlanSavingConfig)
    dispatch: DispatchConfig = field(default_factory=PlannedDispatchConfig)
    trace: bool = setting(
        False,
        "Also trace two training steps of rank 0 on tensors without memory, operator by operator, and show the peak "
        "beside that of the formula. It takes up to a minute for 80 layers.",
    )
