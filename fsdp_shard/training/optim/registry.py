"""The optimizers: a new one is a file of this folder and a line here."""

from fsdp_shard.training.optim.adamw8bit import AdamW8bitConfig
from fsdp_shard.training.optim.config import OptimConfig
from fsdp_shard.training.optim.muon import MuonConfig
from fsdp_shard.training.optim.torch_optim import AdafactorConfig, AdamWConfig, SgdConfig

# Name in `optim=NAME` -> its settings.
OPTIMIZERS: dict[str, type[OptimConfig]] = {
    "adamw": AdamWConfig,
    "adamw8bit": AdamW8bitConfig,
    "adafactor": AdafactorConfig,
    "muon": MuonConfig,
    "sgd": SgdConfig,
}
