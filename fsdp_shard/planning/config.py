"""Settings that `plan` adds to those of the planned run. Imports no torch."""

import re
from dataclasses import dataclass, field
from typing import Any

from fsdp_shard.checkpoint import Location
from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.errors import ConfigError
from fsdp_shard.inference import DispatchConfig, locate_adapters, parse_adapters
from fsdp_shard.planning.devices import AutoDeviceConfig, DeviceConfig
from fsdp_shard.utils import Parsed, derived, setting


@dataclass
class PlannedLaunchConfig(LaunchConfig):
    """The ranks to plan for; with `search`, a range of rank counts."""

    ranks: Any = setting(
        1, "Number of processes per machine, each with one GPU; with search=true also a range such as 1:64."
    )

    def check(self, prefix: str) -> None:
        """Raise ConfigError unless `ranks` is a number or a range that contains a power of two."""
        if not re.fullmatch(r"[1-9]\d{0,4}(:[1-9]\d{0,4})?", str(self.ranks)):
            raise ConfigError(
                f"{prefix}ranks={self.ranks} is neither a number of 1 to 99,999 ranks nor a range such as 1:64."
            )
        low, _, high = str(self.ranks).partition(":")
        if high and int(high) < int(low):
            raise ConfigError(f"{prefix}ranks={self.ranks} ends below its beginning; give a range such as 1:64.")
        if not self.rank_counts:
            raise ConfigError(
                f"{prefix}ranks={self.ranks} has no power of two in it, and only those are tried; give a range such as "
                f"1:64."
            )
        super().check(prefix)

    @property
    def is_range(self) -> bool:
        """Whether several rank counts are planned."""
        return ":" in str(self.ranks)

    @property
    def rank_counts(self) -> list[int]:
        """The rank counts to plan for: ranks on all machines; for a range, its powers of two per machine."""
        if not self.is_range:
            return [int(self.ranks) * self.min_nodes]
        low, high = map(int, str(self.ranks).split(":"))
        powers = (1 << exponent for exponent in range(high.bit_length()))
        return [ranks * self.min_nodes for ranks in powers if low <= ranks <= high]

    @property
    def num_ranks(self) -> int:
        """The smallest rank count."""
        return self.rank_counts[0]


@dataclass
class PlanDataConfig:
    """The data settings that a plan depends on."""

    sequence_length: int | None = setting(
        None, "Length of each sample in tokens. Default: as in finetune, from the model's context length.", minimum=1
    )
    packing: bool = setting(False, "As in finetune: several documents or pairs per sample, separated by attention.")
    streaming: bool = setting(
        False, "As in finetune: samples are not known in advance, so a reference model runs alongside training."
    )
    target_length: int | None = setting(
        None,
        "As in finetune, with model.task=seq2seq: tokens per target. Default: data.sequence_length.",
        minimum=1,
    )
    mask_fraction: float = setting(
        0.15,
        "As in finetune, with model.task=masked_lm: fraction of the tokens that are predicted.",
        above=0.0,
        maximum=1.0,
    )


@dataclass
class PlanSavingConfig:
    """The checkpoint settings that a plan depends on."""

    asynchronous: bool = setting(True, "As in finetune: saves may copy the state into host memory.")
    every: int = setting(
        0,
        "As in finetune: steps between checkpoints. On CPUs, the copies of asynchronous saves are then in the peak.",
        minimum=0,
    )
    save_best: bool = setting(
        True,
        "As in finetune: the step with the lowest held-out loss so far is saved. With train.eval_every, the copies of "
        "asynchronous saves are then in the peak on CPUs, as with checkpoint.every.",
    )
    optimizer: bool = setting(True, "As in finetune: checkpoints have the optimizer state, too.")


@dataclass
class PlannedDispatchConfig(DispatchConfig):
    """As in `generate`; without a device map, only training is planned."""

    device_map: Any = field(
        default=None, metadata={"help": "Also plan the device map of generate; takes the same values."}
    )

    def check(self, prefix: str) -> None:
        """Raise ConfigError for settings that would have no effect."""
        if self.device_map is not None:
            super().check(prefix)
        elif self != PlannedDispatchConfig():
            raise ConfigError(
                f"{prefix}device_map is not set, so the other settings of {prefix.rstrip('.')} have no effect; add "
                f"{prefix}device_map=auto."
            )


@dataclass
class PlanSettings:
    """The settings of `fsdp-shard plan` beyond the sections that `PlanConfig` shares with a run."""

    search: bool = setting(
        False,
        "Find the smallest number of GPUs in launch.ranks that fits device.memory, and the settings with the best "
        "trade-offs between memory and time: as a table, and with run_dir as search.png (needs matplotlib).",
    )
    run: str | None = setting(
        None,
        "Directory of a finetune run: plan its settings and compare the plan with the run's measurements, as "
        "`fsdp-shard plan RUN` does. Nothing is written into the directory.",
    )
    device: DeviceConfig = field(default_factory=DeviceConfig)
    launch: PlannedLaunchConfig = field(default_factory=PlannedLaunchConfig)
    data: PlanDataConfig = field(default_factory=PlanDataConfig)
    checkpoint: PlanSavingConfig = field(default_factory=PlanSavingConfig)
    dispatch: DispatchConfig = field(default_factory=PlannedDispatchConfig)
    # Any, as in DispatchConfig.
    adapters: Any = setting(
        None, "As in generate: adapters by name, loaded over the model. Their files give the sizes."
    )
    trace: bool = setting(
        False,
        "Also trace two training steps of rank 0, operator by operator, on tensors without memory, and show both its "
        "peak and that of the formula. This takes up to a minute for 80 layers.",
    )

    adapter_paths = Parsed("adapters", parse_adapters)

    @derived("adapters")
    def adapter_sources(self) -> dict[str, Location]:
        """The located `adapters`, by name; errors name the setting."""
        return locate_adapters(self.adapter_paths)

    def check(self, prefix: str) -> None:
        """Raise ConfigError for a rank range without a search, a search without a limit, or two devices."""
        rank_kind, kind = {"cpu": "cpu", "cuda": "gpu"}.get(self.launch.device), self.device.kind
        if self.run is None and rank_kind is not None and kind is not None and rank_kind != kind:
            raise ConfigError(
                f"{prefix}launch.device={self.launch.device} contradicts {prefix}device.kind={kind}, which a preset "
                f"sets too; remove {prefix}launch.device, or choose a device whose kind is {rank_kind}."
            )
        if self.search and self.trace:
            raise ConfigError(
                f"{prefix}trace=true is for one plan, and {prefix}search=true makes many; remove one of them."
            )
        if self.adapter_paths and self.dispatch.device_map is None:
            raise ConfigError(
                f"{prefix}adapters are those of generate, which is not planned without {prefix}dispatch.device_map; "
                f"add {prefix}dispatch.device_map=auto. The adapter that is trained is {prefix}adapter=lora."
            )
        if self.launch.is_range and not self.search:
            raise ConfigError(
                f"{prefix}launch.ranks={self.launch.ranks} is a range, which only {prefix}search=true takes; add that, "
                f"or give a number."
            )
        if self.search and self.device.memory is None and not isinstance(self.device, AutoDeviceConfig):
            raise ConfigError(
                f"{prefix}search=true needs the memory of a GPU; add {prefix}device.memory=SIZE, such as 80GiB."
            )
        if self.search and self.dispatch.device_map is not None:
            raise ConfigError(
                f"{prefix}dispatch.device_map={self.dispatch.device_map} is for one plan, and {prefix}search=true "
                f"makes many; remove one of them."
            )
