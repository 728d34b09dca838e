"""Peak memory of each rank of a run, from configs alone; the model is only ever on meta.

Counted are, per rank: its shard of the parameters, gradients and optimizer state; what is unsharded for a while (units
gathered in the compute dtype, gradients before they are reduced, and one dequantized weight); and the activations of
one micro-batch, or of the rank's part of its sequences. They are added up as if all were in use at once, so the peak
is an upper bound. Not counted: the CUDA context, the allocator's fragmentation and the buffers of the communication
library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import models, sharding
from fsdp_shard.errors import ConfigError
from fsdp_shard.planning.activations import measure_activations, take_out_head
from fsdp_shard.planning.facts import Facts, of_one_rank, of_parameters, with_any_loss
from fsdp_shard.planning.optimizer import optimizer_bytes
from fsdp_shard.training import (
    AdapterConfig,
    LoraConfig,
    NewHead,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
    inject_lora,
    quantize_base,
)
from fsdp_shard.utils import balanced_partition, first_line

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class PlannedRun:
    """The settings of the planned run, as in `finetune`; `sequence_length` is in tokens."""

    model: models.ModelConfig
    shard: sharding.ShardConfig
    train: TrainConfig
    optim: OptimConfig
    sequence_length: int
    num_ranks: int
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    saves_asynchronously: bool = True
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    is_streamed: bool = False

    @property
    def num_shards(self) -> int:
        """Number of ranks that one replica is sharded over."""
        return sharding.num_shards(self.shard, self.num_ranks)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each rank in a step."""
        return -(-self.train.global_batch_size // (self.train.micro_batch_size * self.num_data_ranks))

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks, or of groups that divide sequences, that each see samples of their own."""
        return sharding.num_data_ranks(self.shard, self.num_ranks)

    @property
    def num_rows(self) -> int:
        """Number of sequences in a micro-batch that are kept for the backward pass: both answers of each pair."""
        return self.train.micro_batch_size * (2 if self.objective.samples == "pairs" else 1)

    @property
    def has_sharded_reference(self) -> bool:
        """Whether a frozen copy of the model is sharded alongside it."""
        return self.reference_kind == "sharded"

    @property
    def reference_kind(self) -> str | None:
        """Where the reference of a preference objective comes from."""
        has_adapter = not self.adapter.trains_all
        return self.objective.reference_kind(has_adapter=has_adapter, is_streamed=self.is_streamed)

    @property
    def part_length(self) -> int:
        """Number of tokens that a rank has of each sequence."""
        return -(-self.sequence_length // self.shard.context_parallel)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        rank: The rank.
        parameters_bytes: Its shard of the parameters.
        gradients_bytes: Its shard of the gradients.
        optimizer_bytes: Its shard of the optimizer state.
        unsharded_bytes: Parameters and gradients that are unsharded for a while.
        activations_bytes: Activations of one micro-batch; None when they could not be measured.
        host_bytes: Bytes of the state that are in host memory, with CPU offload.
        staging_bytes: Bytes of the copy in host memory that asynchronous saves write from, not in the peak.
        reference_bytes: Its shard of the reference model of a preference objective, and the root that stays gathered.
        average_bytes: Its shard of the average of the trained weights (`train.ema_decay`).
    """

    rank: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    unsharded_bytes: int
    activations_bytes: int | None
    host_bytes: int
    staging_bytes: int = 0
    reference_bytes: int = 0
    average_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and averages, wherever they are."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.average_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Upper bound on the bytes in use on the device; None when the activations could not be measured."""
        if self.activations_bytes is None:
            return None
        transient_bytes = self.unsharded_bytes + self.activations_bytes
        return self.state_bytes - self.host_bytes + self.reference_bytes + transient_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a run needs.

    Attributes:
        model_class: Name of the model's class.
        num_params: Number of parameters, with those of an adapter.
        num_trained: Number of parameters that are not frozen.
        blocks: The no-split blocks.
        per_rank: The memory of each rank.
        problem: Why the activations could not be measured, if so.
        tree: The table of units, with `shard.explain`.
    """

    model_class: str
    num_params: int
    num_trained: int
    blocks: tuple[models.Block, ...]
    per_rank: tuple[RankMemory, ...]
    problem: str | None = None
    tree: tuple[str, ...] = ()

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of all parameters in each of several dtypes."""
        return {name: -(-self.num_params * bits // 8) for name, bits in BITS.items()}

    @property
    def balance(self) -> float:
        """State of the fullest rank divided by the mean; 1.0 is even."""
        sizes = [rank.state_bytes for rank in self.per_rank]
        return max(sizes) * len(sizes) / sum(sizes)

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the fullest rank; None when the activations could not be measured."""
        peaks = [rank.peak_bytes for rank in self.per_rank]
        return None if None in peaks else max(peak for peak in peaks if peak is not None)

    def fits(self, memory_bytes: int | None) -> bool | None:
        """Whether the peak of every rank is at most `memory_bytes`; None when either is unknown."""
        return None if memory_bytes is None or self.peak_bytes is None else self.peak_bytes <= memory_bytes


def plan_memory(config: PretrainedConfig, run: PlannedRun, facts: Facts | None = None) -> MemoryPlan:
    """Plan the memory of a run.

    Args:
        config: The transformers config of the model.
        run: The settings of the run.
        facts: Those of earlier plans of the same model, which are used again and added to.

    Returns:
        The plan.

    Raises:
        ConfigError: The settings cannot work for this model and number of ranks, or cannot be planned.
        ModelError: No blocks are found in the model.
    """
    for name, what in (("tensor_parallel", "divided layers keep"), ("expert_parallel", "is sent to experts")):
        if (ranks := getattr(run.shard, name)) > 1:
            raise ConfigError(
                f"shard.{name}={ranks} cannot be planned: the memory that {what} is not counted. Plan with "
                f"shard.{name}=1."
            )
    sharding.check_mesh(run.shard, run.num_ranks)
    facts = Facts() if facts is None else facts
    of_model = (with_any_loss(run.model), run.adapter)
    model, blocks, units = planned_model(config, run, facts)
    facts.of("check", (*of_model, of_one_rank(run.shard)), lambda: sharding.check_shardable(model, run.shard))
    sharding.check_context_parallel(config, model, run.model, run.shard, run.sequence_length)
    of_batch = (run.num_rows, run.part_length, run.objective.is_cross_entropy)
    of_activations = (run.model, run.adapter, of_one_rank(run.shard), *of_batch)
    activations, problem = facts.of("activations", of_activations, lambda: _activations_bytes(config, run))
    unsharded = _unsharded_bytes(run.shard, units, accumulates=run.num_micro_batches > 1)
    unsharded += models.dequantization_bytes(model, sharding.itemsize(run.shard.param_dtype))
    of_state = (*of_model, run.optim, run.train.ema_decay, of_parameters(run.shard), run.num_shards)
    states = facts.of("state", of_state, lambda: _state_bytes(model, units, run))
    per_rank = []
    for rank in range(run.num_ranks):
        parameters, gradients, optimizer, average = states[rank % run.num_shards]
        host = parameters + gradients + optimizer + average if run.shard.cpu_offload else 0
        staging = gradients + optimizer + average if run.saves_asynchronously else 0  # only what is trained is saved
        reference = 0
        if run.has_sharded_reference:
            of_root = units[-1].gathered_bytes if run.shard.is_sharded else 0
            reference = of_root + (0 if run.shard.cpu_offload else parameters)
        sizes = (parameters, gradients, optimizer, unsharded, activations, host, staging, reference, average)
        per_rank.append(RankMemory(rank, *sizes))
    num_params, num_trained = sum(unit.num_params for unit in units), sum(unit.num_trained for unit in units)
    tree = tuple(sharding.unit_tree(model, run.shard, run.num_ranks)) if run.shard.explain else ()
    return MemoryPlan(type(model).__name__, num_params, num_trained, tuple(blocks), tuple(per_rank), problem, tree)


def planned_model(
    config: PretrainedConfig, run: PlannedRun, facts: Facts
) -> tuple[PreTrainedModel, list[models.Block], tuple[sharding.Unit, ...]]:
    """The model as it trains, on meta, its blocks and its units."""

    def build() -> tuple[PreTrainedModel, list[models.Block], tuple[sharding.Unit, ...]]:
        model = _build(config, run, run.model.dtype)
        blocks = [
            replace(block, num_params=_num_weights(model, block))
            for block in models.no_split_blocks(model, run.shard.blocks)
        ]
        return model, blocks, sharding.plan_units(model, run.shard)

    return facts.of("model", (with_any_loss(run.model), run.adapter, of_parameters(run.shard)), build)


def _build(config: PretrainedConfig, run: PlannedRun, dtype: str) -> PreTrainedModel:
    # The kernels of flash-attn need not be installed to plan; they keep what sdpa's flash kernel keeps.
    attention = "sdpa" if run.model.attention == "flash_attention_2" else run.model.attention
    trust = run.model.trust_remote_code
    model = models.build_on_meta(config, dtype, trust_remote_code=trust, attention=attention)
    if isinstance(run.adapter, LoraConfig):
        head = NewHead.of(model).modules if run.model.labels else ()
        inject_lora(model, run.adapter, run.model.path, {}, run.model.task, head)
        quantize_base(model, run.adapter.quantize, run.shard, {})
    return model


def _num_weights(model: PreTrainedModel, block: models.Block) -> int:
    """`block.num_params`, with the number of weights instead of bytes where they are quantized."""
    module = model.get_submodule(block.fqn)
    inside = {} if block.direct else models.weights_per_parameter(module)
    return block.num_params + sum(count - module.get_parameter(name).numel() for name, count in inside.items())


def _unsharded_bytes(shard: sharding.ShardConfig, units: Sequence[sharding.Unit], *, accumulates: bool) -> int:
    """An upper bound on the bytes of gathered units and of gradients that are not reduced yet.

    Gathered are the root, the unit that computes and the prefetched ones, in the dtype that they compute in, and what
    all units keep after the forward pass. Gradients are those of the root and of one unit, and a copy of one of the two
    in the dtype of the reduction; those of all units, if they are reduced once per step only.

    Args:
        shard: The shard settings.
        units: All units of the model, the root last.
        accumulates: Whether a step has several micro-batches.

    Returns:
        The bytes; 0 where nothing is sharded, as everything is then counted as state of the rank.
    """
    if not shard.is_sharded:
        return 0
    *inner, root = (unit.gathered_bytes for unit in units)
    every, num_ahead = shard.reshard_after_forward, max(1, shard.prefetch_forward or 0, shard.prefetch_backward or 0)
    gathered = root + (sum(inner) if every is False else sum(sorted(inner)[-1 - num_ahead :]))
    if type(every) is int:
        gathered += sum(inner) // every
    *trained, of_root = (unit.num_trained * sharding.itemsize(unit.dtype) for unit in units)
    reduce = sharding.itemsize(shard.reduce_dtype)
    gradients = of_root + max(trained, default=0) + reduce * max(unit.num_trained for unit in units)
    if accumulates and not shard.sync_every_micro_batch:
        gradients += sum(unit.num_trained for unit in units) * reduce
    return gathered + gradients


def _state_bytes(
    model: PreTrainedModel, units: Sequence[sharding.Unit], run: PlannedRun
) -> list[tuple[int, int, int, int]]:
    """Bytes of parameters, gradients, optimizer state and averages of each shard; equal shards are computed once."""
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    trained = {name: param.numel() for name, param in model.named_parameters() if param.requires_grad}
    padding = getattr(torch, run.model.dtype)
    local_shapes = run.shard.local_shapes(shapes, units, run.num_shards)
    owned_by_rank: Sequence[Sequence[str]] = [()] * run.num_shards
    if run.optim.needs_full_params:
        owned_by_rank = balanced_partition(sorted(trained), run.num_shards, trained.__getitem__)

    def num_bytes(local: Mapping[str, sharding.Shape]) -> int:
        return sum(prod(shape) * dtypes.get(name, padding).itemsize for name, shape in local.items())

    contents: dict[int, tuple[tuple[str, sharding.Shape], ...]] = {}  # by the identity of dicts that ranks share
    known: dict[tuple[object, ...], tuple[int, int, int, int]] = {}
    sizes = []
    for local, owned in zip(local_shapes, owned_by_rank, strict=True):
        content = contents.get(id(local)) or contents.setdefault(id(local), tuple(local.items()))
        if (key := (content, tuple(owned))) not in known:
            gradients = {name: shape for name, shape in local.items() if name in trained}
            updated = {name: shapes[name] for name in owned} if run.optim.needs_full_params else gradients
            optimizer = optimizer_bytes(run.optim, updated, shapes, dtypes) if updated else 0
            average = 0 if run.train.ema_decay is None else 4 * sum(map(prod, gradients.values()))  # in float32
            known[key] = num_bytes(local), num_bytes(gradients), optimizer, average
        sizes.append(known[key])
    return sizes


def _activations_bytes(config: PretrainedConfig, run: PlannedRun) -> tuple[int | None, str | None]:
    """Bytes that a micro-batch saves for the backward pass, with the loss and its gradient, in the compute dtype.

    Or None and why they cannot be measured: control flow that depends on values, or a model without text input.
    """
    model = _build(config, run, run.shard.param_dtype)
    any_vocabulary, num_tokens = not run.objective.is_cross_entropy, run.num_rows * run.part_length
    of_head = take_out_head(model, run.model.chunked_loss, num_tokens, any_vocabulary=any_vocabulary)
    try:
        activations = measure_activations(model, run.shard, run.num_rows, run.part_length)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        return None, first_line(error)
    return activations.saved_bytes + (2 * activations.logits_bytes if of_head is None else of_head), None
