"""Checks an objective against the task, the data, the adapter and the parallelism of a run."""

from fsdp_shard.data import PAIRS
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training.objectives.distill import DistillConfig
from fsdp_shard.training.objectives.objective import DISPATCHED, PRECOMPUTED, ObjectiveConfig, ReferenceConfig
from fsdp_shard.training.peft.config import AdapterConfig


def check_objective(
    objective: ObjectiveConfig,
    model: ModelConfig,
    shard: ShardConfig,
    adapter: AdapterConfig,
    *,
    is_packed: bool,
    is_streamed: bool,
) -> None:
    """Raise ConfigError if the objective contradicts other settings.

    Args:
        objective: The objective.
        model: The settings of the model.
        shard: How it is sharded.
        adapter: The trained part of it.
        is_packed: Whether samples are packed.
        is_streamed: Whether samples are unknown before training.
    """
    check_task(objective, model.task)
    if shard.context_parallel > 1 and objective.name == "reward":
        raise ConfigError(
            f"objective=reward cannot be combined with shard.context_parallel={shard.context_parallel} yet: its "
            f"scores are of the last token. Remove one of them."
        )
    if shard.context_parallel > 1 and is_packed and objective.samples == PAIRS:
        raise ConfigError(
            f"data.packing=true cannot be combined with shard.context_parallel={shard.context_parallel} for "
            f"objective={objective.name} yet: packed pairs have masks of their own. Remove one of them."
        )
    if isinstance(objective, DistillConfig) and objective.is_precomputed and is_streamed:
        raise ConfigError(
            "objective.teacher_logits=precomputed needs all samples before training, which data.streaming=true does "
            "not have; set objective.teacher_logits=computed."
        )
    if isinstance(objective, ReferenceConfig):
        _check_reference(objective, model, shard, adapter, is_streamed=is_streamed)


def _check_reference(
    objective: ReferenceConfig, model: ModelConfig, shard: ShardConfig, adapter: AdapterConfig, *, is_streamed: bool
) -> None:
    """Raise ConfigError if the source of the reference's log-probabilities contradicts other settings."""
    given, begins_at_base = objective.reference, adapter.begins_at_base
    if given == "adapter" and not adapter.trains_all and not begins_at_base:
        raise ConfigError(
            "objective.reference=adapter is the model without its adapter, and with adapter.path training begins from "
            "another one; use precomputed or sharded, or remove it."
        )
    if given == "adapter" and adapter.trains_all:
        raise ConfigError(
            "objective.reference=adapter is the model without its adapter, but adapter=none; use precomputed or "
            "sharded, or set adapter=lora."
        )
    kind = objective.reference_kind(begins_at_base=begins_at_base, is_streamed=is_streamed)
    if kind == PRECOMPUTED and is_streamed:
        raise ConfigError(
            f"objective.reference={given} needs all samples before training, which data.streaming=true does not have; "
            f"use objective.reference=sharded, or remove it."
        )
    if given == DISPATCHED:
        _check_dispatched(model, shard, adapter)
    elif objective.reference_max_memory is not None:
        raise ConfigError(
            f"objective.reference_max_memory is for objective.reference={DISPATCHED}, and that is {given}; leave it "
            f"out, or set {DISPATCHED}."
        )


def _check_dispatched(model: ModelConfig, shard: ShardConfig, adapter: AdapterConfig) -> None:
    """Raise ConfigError if a dispatched model would differ from the reference of this run."""
    if (kind := adapter.quantize) != "none":
        raise ConfigError(
            f"objective.reference={DISPATCHED} cannot be combined with adapter.quantize={kind}, as the reference is "
            f"the quantized model; use objective.reference=adapter or precomputed."
        )
    held, computed = model.dtype, shard.param_dtype
    if held not in ("float32", computed):
        raise ConfigError(
            f"objective.reference={DISPATCHED} loads the weights in shard.param_dtype={computed}, and "
            f"model.dtype={held} would round them before; set model.dtype=float32 or {computed}, or use "
            f"objective.reference={PRECOMPUTED}."
        )


def check_task(objective: ObjectiveConfig, task: str) -> None:
    """Raise ConfigError if the objective does not train models of a task."""
    if task not in objective.tasks:
        raise ConfigError(
            f"objective={objective.name} trains model.task={' or '.join(objective.tasks)}, not {task}; change one of "
            f"them{', and set model.labels=[reward] for a new head' if objective.name == 'reward' else ''}."
        )
