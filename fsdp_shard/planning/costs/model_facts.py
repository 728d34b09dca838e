"""The facts about a model that the cost of a step depends on: measured once, reused for many plans."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import models, sharding
from fsdp_shard.models import MASKED_LM
from fsdp_shard.planning.costs.block_flops import ModelCosts, measure_costs
from fsdp_shard.planning.meta_model import build_planned
from fsdp_shard.planning.plan_cache import PlanCache, without_activations
from fsdp_shard.planning.step.optimizer import step_bytes
from fsdp_shard.planning.step.recording.record_passes import CANNOT_RUN
from fsdp_shard.training import AdapterConfig, OptimConfig, use_loss_head
from fsdp_shard.utils import FakeTensorMode, first_line, only_errors_of


@dataclass(frozen=True)
class ParamFacts:
    """A parameter: its shape, the stored bytes per element, and whether it is trained."""

    shape: tuple[int, ...]
    itemsize: int
    is_floating: bool
    is_trained: bool


@dataclass(frozen=True)
class ModelFacts:
    """A model with its adapter as a step uses it, in its parameter dtypes.

    Attributes:
        config: Its config.
        model: The model on meta.
        params: FQN -> parameter.
        costs: FLOPs and saved bytes; None if they cannot be measured.
        problem: Why they cannot be measured, if so.
        tensor_plan: FQN of a module or parameter -> how tensor parallelism divides it.
        expert_plan: The same for experts.
        head: FQN of the output head; empty if there is none.
        base_bytes: Bytes of frozen parameters, in the config's dtype.
        unmasked_flops: FLOPs of both passes that a masked language model saves per token it does not predict: those of
            the output head, if the head computes the loss in chunks.
    """

    config: PretrainedConfig
    params: Mapping[str, ParamFacts]
    costs: ModelCosts | None
    problem: str | None
    tensor_plan: Mapping[str, str]
    expert_plan: Mapping[str, str]
    head: str
    base_bytes: int
    unmasked_flops: int
    model: PreTrainedModel = field(repr=False)
    cache: PlanCache = field(default_factory=PlanCache, repr=False)

    @property
    def blocks(self) -> list[str]:
        """FQNs of the repeated blocks; none if the costs could not be measured."""
        return [] if self.costs is None else list(self.costs.blocks)

    def num_calls(self, module: str) -> int:
        """How often a module is called in a pass: one of a block that stands for many layers once for each."""
        return 1 if self.costs is None else self.costs.num_calls_of(module)

    def units(self, shard: sharding.ShardConfig) -> tuple[sharding.Unit, ...]:
        """The units of the model, computed once per combination of the settings that they depend on."""
        return self.cache.get("units", (without_activations(shard),), lambda: sharding.plan_units(self.model, shard))

    def state_bytes(self, optim: OptimConfig) -> int:
        """Bytes of the state of `optim` for all trained parameters, computed once per config."""

        def measure() -> int:
            shapes = {name: tuple(param.shape) for name, param in self.model.named_parameters()}
            dtypes = {name: param.dtype for name, param in self.model.named_parameters()}
            trained = {name: shapes[name] for name, param in self.params.items() if param.is_trained}
            return step_bytes(optim, trained, shapes, dtypes)[0] if trained else 0

        return self.cache.get("state", (optim,), measure)


def model_facts(
    config: PretrainedConfig,
    stored: PreTrainedModel,
    model: models.ModelConfig,
    adapter: AdapterConfig,
    shard: sharding.ShardConfig,
) -> ModelFacts:
    """Measure the facts of a model, on a copy of it on meta.

    Args:
        config: The transformers config of the model.
        stored: The model as `build_planned` builds it for `shard`.
        model: The settings `model.*`.
        adapter: The settings `adapter.*`.
        shard: The settings `shard.*`: blocks, compute dtype, and how quantized weights are stored.

    Returns:
        The facts, valid for plans with any other settings.

    Raises:
        ModelError: The model cannot be built.
        ConfigError: The model has no modules for the adapter.
    """
    computing, _ = build_planned(config, model, adapter, shard.param_dtype)
    file_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    frozen = sum(param.numel() for param in computing.parameters() if not param.requires_grad)
    costs, problem = measured_costs(
        lambda: build_planned(config, model, adapter, shard.param_dtype)[0], tuple(shard.blocks)
    )
    params = {
        name: ParamFacts(tuple(param.shape), param.element_size(), param.is_floating_point(), param.requires_grad)
        for name, param in stored.named_parameters()
    }
    head = stored.get_output_embeddings()
    fqn = next((fqn for fqn, module in stored.named_modules() if module is head), "")
    return ModelFacts(
        config=config,
        params=params,
        costs=costs,
        problem=problem,
        tensor_plan=models.parallel_plan(stored, "tp_plan"),
        expert_plan=models.parallel_plan(stored, "ep_plan"),
        head=fqn,
        base_bytes=frozen * file_dtype.itemsize,
        unmasked_flops=_unmasked_flops(config, model, adapter),
        model=stored,
    )


def _unmasked_flops(config: PretrainedConfig, settings: models.ModelConfig, adapter: AdapterConfig) -> int:
    if settings.task != MASKED_LM:
        return 0
    model, _ = build_planned(config, settings, adapter, settings.dtype)
    if not use_loss_head(model, settings.chunked_loss):
        return 0
    weight: torch.Tensor = model.get_output_embeddings().weight
    return 2 * weight.numel() * (3 if weight.requires_grad else 2)  # logits, gradients of the input and of the weight


def measured_costs(
    build: Callable[[], PreTrainedModel], blocks: Sequence[str] = ()
) -> tuple[ModelCosts | None, str | None]:
    """FLOPs and saved bytes of a model, or why they cannot be measured.

    Args:
        build: Builds the model on meta, in its compute dtype.
        blocks: `shard.blocks`.
    """
    costs, problem = _measured(build(), blocks, "meta")
    if costs is None:
        model = build()
        with FakeTensorMode():
            costs, problem = _measured(model, blocks, "cpu")
    return costs, problem


@only_errors_of("torch", logging.CRITICAL)  # torch logs the traceback of a pass that cannot run on fake tensors
def _measured(model: PreTrainedModel, names: Sequence[str], device: str) -> tuple[ModelCosts | None, str | None]:
    blocks = [block.fqn for block in models.no_split_blocks(model, names) if block.repeated]
    try:
        return measure_costs(model, blocks, device), None
    except CANNOT_RUN as error:
        return None, first_line(error)


def text_setting(config: PretrainedConfig, *names: str) -> int | None:
    """The first of these language model settings that is a number."""
    text: Any = config.get_text_config()
    found = (getattr(text, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)
