"""The objectives: a new one is a file of this folder and a line here."""

from fsdp_shard.training.objectives.distill import DistillConfig
from fsdp_shard.training.objectives.dpo import DpoConfig
from fsdp_shard.training.objectives.ipo import IpoConfig
from fsdp_shard.training.objectives.kto import KtoConfig
from fsdp_shard.training.objectives.objective import ObjectiveConfig
from fsdp_shard.training.objectives.orpo import OrpoConfig
from fsdp_shard.training.objectives.reward import RewardConfig
from fsdp_shard.training.objectives.simpo import SimpoConfig

# Name in `objective=NAME` -> its settings.
OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    objective.name: objective
    for objective in (
        ObjectiveConfig,
        DpoConfig,
        IpoConfig,
        OrpoConfig,
        KtoConfig,
        SimpoConfig,
        RewardConfig,
        DistillConfig,
    )
}
