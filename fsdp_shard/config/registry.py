"""The options that Hydra offers: a new wrapper, optimizer or preset is one line here, or a YAML file under conf/."""

from __future__ import annotations

from fsdp_shard.inference import DispatchConfig, GenerationSettings
from fsdp_shard.planning import PlannedDispatchConfig
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    AdapterConfig,
    LoraConfig,
    MuonConfig,
    SgdConfig,
    TrainConfig,
)

# Group -> option -> the dataclass behind it; YAML files in conf/GROUP/ are options too. There can be no group
# `checkpoint`: Hydra would take generate's `checkpoint=PATH` for a choice of it.
OPTIONS: dict[str, dict[str, type]] = {
    "shard": dict(WRAPPERS),
    "optim": {
        "adamw": AdamWConfig,
        "adamw8bit": AdamW8bitConfig,
        "adafactor": AdafactorConfig,
        "muon": MuonConfig,
        "sgd": SgdConfig,
    },
    "adapter": {"none": AdapterConfig, "lora": LoraConfig},
    "train": {"default": TrainConfig},
    "dispatch": {"default": DispatchConfig, "planned": PlannedDispatchConfig},
    "generation": {"default": GenerationSettings},
}
