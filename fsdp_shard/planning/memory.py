"""Peak memory of each rank of a run, from configs alone; the model is only ever on meta.

Per rank: its shards of parameters, gradients and optimizer state, exactly; and what is in memory at each moment of a
step, played over the units (`step_schedule`) from what one micro-batch keeps (`block_profiles`). The peak is the
highest of these moments. It counts tensors. What a GPU holds besides (`device_overhead`) is shown apart.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import models, sharding
from fsdp_shard.planning.facts import Facts, of_one_rank, of_parameters, with_any_loss
from fsdp_shard.planning.step.block_profiles import LOSS, Event, record_tape
from fsdp_shard.planning.step.device_overhead import CUBLAS_WORKSPACE_BYTES, device_overhead
from fsdp_shard.planning.step.divided_model import divide_model, with_expert_units
from fsdp_shard.planning.step.micro_batch import batch_bytes, micro_batch_loss
from fsdp_shard.planning.step.optimizer import exchange_bytes, step_bytes, whole_update_bytes
from fsdp_shard.planning.step.step_schedule import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    LOSS_TERM,
    PLAYERS,
    TEMPORARIES,
    UNREDUCED,
    Moment,
    StepRules,
    highest,
)
from fsdp_shard.planning.step.unit_bytes import trained_dtype, unit_bytes
from fsdp_shard.planning.step.unit_holdings import UnitHolding, UnitShards
from fsdp_shard.training import (
    AdapterConfig,
    LoraConfig,
    NewHead,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
    cross_entropy_chunk_bytes,
    inject_lora,
    quantize_base,
    use_loss_head,
)
from fsdp_shard.utils import balanced_partition, first_line

_FIGURES_BYTES = 1024  # counts, losses and sums of metrics of a step: some dozens of numbers

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class PlannedRun:
    """The settings of the planned run, as in `finetune`.

    Attributes:
        model: As in `finetune`, like the others that are not described here.
        sequence_length: In tokens.
        num_ranks: Number of ranks.
        saves_asynchronously: Whether saves may copy the state into host memory.
        is_streamed: Whether samples are not known before.
        on_gpu: Whether ranks have GPUs, whose collectives make no copies of what they reduce, as those of gloo do.
        is_packed: Whether rows hold several documents, which sdpa keeps apart by a mask.
    """

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
    on_gpu: bool = False
    is_packed: bool = False

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

    @property
    def padded_length(self) -> int:
        """The same, with what is filled up so that all ranks have two chunks of one length."""
        return self.part_length + (self.part_length % 2 if self.shard.context_parallel > 1 else 0)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        rank: The rank.
        parameters_bytes: Its shard of the parameters.
        gradients_bytes: Its shard of the gradients.
        optimizer_bytes: Its shard of the optimizer state.
        unsharded_bytes: The most that parameters and gradients take while they are unsharded, with the buffers of
            their collectives.
        activations_bytes: The most that activations and the loss take; None when they could not be measured.
        host_bytes: Bytes of the state that are in host memory, with CPU offload.
        staging_bytes: Bytes of the copy in host memory that asynchronous saves write from, not in the peak.
        reference_bytes: Its shard of the reference model of a preference objective.
        average_bytes: Its shard of the average of the trained weights (`train.ema_decay`).
        schedule: The moments of a run, without what only some ranks have; shared by ranks.
        highest_moments: Those of `schedule` with the most bytes in their phase: what a rank has besides is the same
            within a phase, so that its peak is one of them.
        own: Bytes by term that this rank has besides, at each moment after the model is loaded.
        updates_bytes: The most that a step of the optimizer takes for a moment.
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
    schedule: tuple[Moment, ...] = ()
    highest_moments: tuple[Moment, ...] = ()
    own: Mapping[str, int] = field(default_factory=dict)
    updates_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and averages, wherever they are."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.average_bytes

    @property
    def moments(self) -> tuple[Moment, ...]:
        """What is on the device at each moment of a run."""
        return tuple(self._complete(moment) for moment in self.schedule)

    @property
    def peak(self) -> Moment | None:
        """The moment with the most bytes on the device; None when the activations could not be measured."""
        if self.activations_bytes is None or not self.highest_moments:
            return None
        return highest(self._complete(moment) for moment in self.highest_moments)

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of tensors on the device; None when the activations could not be measured."""
        return None if self.peak is None else self.peak.total_bytes

    def _complete(self, moment: Moment) -> Moment:
        if moment.phase == "load":
            return moment
        updates = {TEMPORARIES: self.updates_bytes} if moment.phase == "optimizer" and self.updates_bytes else {}
        return replace(moment, terms={**self.own, **moment.terms, **updates})


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
        overhead: Bytes by term that a GPU holds besides tensors; none on CPUs.
        shards: The shards of each unit; None in a plan that was made without.
        tensor_ranks: Number of neighboring ranks that have the same rows.
    """

    model_class: str
    num_params: int
    num_trained: int
    blocks: tuple[models.Block, ...]
    per_rank: tuple[RankMemory, ...]
    problem: str | None = None
    tree: tuple[str, ...] = ()
    overhead: Mapping[str, int] = field(default_factory=dict)
    shards: UnitShards | None = None
    tensor_ranks: int = 1

    @property
    def fullest(self) -> RankMemory:
        """The rank with the highest peak; where there is none, that with the most state."""
        return max(self.per_rank, key=lambda rank: (rank.peak_bytes or 0, rank.state_bytes))

    def units_of(self, rank: int) -> tuple[UnitHolding, ...]:
        """What a rank holds of each unit for the whole run."""
        if self.shards is None:
            return ()
        return self.shards.held(rank // self.tensor_ranks % len(self.shards.local_shapes))

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
        """Whether `memory_bytes` hold the peak of every rank and what a GPU has besides; None when unknown."""
        if memory_bytes is None or self.peak_bytes is None:
            return None
        return self.needed_bytes <= memory_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that a device must have: the peak, which must be known, and what a GPU holds besides."""
        assert self.peak_bytes is not None, "the caller has looked"
        return self.peak_bytes + self.overhead_bytes

    @property
    def overhead_bytes(self) -> int:
        """Bytes that a GPU holds besides tensors."""
        return sum(self.overhead.values())


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
    sharding.check_mesh(run.shard, run.num_ranks)
    facts = Facts() if facts is None else facts
    model, blocks, units = planned_model(config, run, facts)
    of_model = (with_any_loss(run.model), run.adapter)
    facts.of("check", (*of_model, of_one_rank(run.shard)), lambda: sharding.check_shardable(model, run.shard))
    sharding.check_context_parallel(config, model, run.model, run.shard, run.sequence_length)
    part = facts.of("part", (*of_model, of_parameters(run.shard)), lambda: _part_of_rank(config, run, units, model))
    of_state = (*of_model, run.optim, run.train.ema_decay, of_parameters(run.shard), run.num_shards, run.on_gpu)
    shards = facts.of("shards", of_state, lambda: _unit_shards(part, run))
    states = facts.of("state", of_state, lambda: _states(shards, part, run))
    schedule, problem = plan_step(config, part, run, facts)
    by_phase: dict[str, list[Moment]] = {}
    for moment in schedule:
        by_phase.setdefault(moment.phase, []).append(moment)
    moments = schedule, tuple(map(highest, by_phase.values()))
    unsharded = max((_sum(moment, GATHERED, UNREDUCED, BUFFERS) for moment in schedule), default=0)
    activations = max((_sum(moment, ACTIVATIONS, LOSS_TERM) for moment in schedule), default=0)
    per_rank = [
        _rank_memory(rank, states[_shard_of(rank, run)], run, moments, unsharded, None if problem else activations)
        for rank in range(run.num_ranks)
    ]
    num_params, num_trained = sum(unit.num_params for unit in units), sum(unit.num_trained for unit in units)
    tree = tuple(sharding.unit_tree(model, run.shard, run.num_ranks)) if run.shard.explain else ()
    sizes = num_params, num_trained, tuple(blocks), tuple(per_rank), problem, tree
    return MemoryPlan(type(model).__name__, *sizes, _overhead(part, run, per_rank), shards, run.shard.tensor_parallel)


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


def _rank_memory(
    rank: int,
    state: "_State",
    run: PlannedRun,
    moments: tuple[tuple[Moment, ...], tuple[Moment, ...]],
    unsharded: int,
    activations: int | None,
) -> RankMemory:
    """The memory of one rank; `moments` are those of all phases, and the highest of each."""
    is_offloaded = run.shard.cpu_offload
    total = state.parameters + state.gradients + state.optimizer + state.average
    own = {} if is_offloaded else {"optimizer": state.optimizer, "average": state.average}
    return RankMemory(
        rank,
        state.parameters,
        state.gradients,
        state.optimizer,
        unsharded,
        activations,
        host_bytes=total if is_offloaded else 0,
        # Only what is trained is saved.
        staging_bytes=state.gradients + state.optimizer + state.average if run.saves_asynchronously else 0,
        reference_bytes=state.parameters if run.has_sharded_reference and not is_offloaded else 0,
        average_bytes=state.average,
        schedule=moments[0],
        highest_moments=moments[1],
        own={name: num for name, num in own.items() if num},
        updates_bytes=0 if is_offloaded else state.updates,
    )


def _sum(moment: Moment, *terms: str) -> int:
    return sum(moment.terms.get(term, 0) for term in terms)


@dataclass(frozen=True)
class _State:
    """Bytes of the state of one shard, and what its optimizer takes for a moment."""

    parameters: int
    gradients: int
    optimizer: int
    average: int
    updates: int


@dataclass(frozen=True)
class _Part:
    """What a replica's rank has of a model before it is sharded: all of it, or its part of divided layers and experts.

    Attributes:
        model: The model on meta, in the dtypes that parameters are stored in.
        units: Its units, the root last.
        experts: FQNs of the units of divided experts.
    """

    model: PreTrainedModel
    units: Sequence[sharding.Unit]
    experts: frozenset[str] = frozenset()


def _part_of_rank(
    config: PretrainedConfig, run: PlannedRun, units: Sequence[sharding.Unit], model: PreTrainedModel
) -> _Part:
    if run.shard.tensor_parallel == run.shard.expert_parallel == 1:
        return _Part(model, units)
    divided = _build(config, run, run.model.dtype)
    experts = divide_model(divided, run.shard)
    return _Part(divided, with_expert_units(units, experts), experts)


def _shard_of(rank: int, run: PlannedRun) -> int:
    """Which of the shards of a replica a rank has; those that divide layers have the same rows."""
    return rank // run.shard.tensor_parallel % run.num_shards


def _local_shapes(
    part: _Part, shapes: Mapping[str, sharding.Shape], run: PlannedRun
) -> list[dict[str, sharding.Shape]]:
    """The local shape of every parameter for each shard."""
    shard, num_shards = run.shard, run.num_shards
    if not part.experts:
        return shard.local_shapes(shapes, part.units, num_shards)
    dense, experts = dict(shapes), dict[str, sharding.Shape]()
    for unit in part.units:
        if unit.fqn in part.experts:
            experts |= {name: dense.pop(name) for name in unit.parameters}
    of_dense = shard.local_shapes(dense, part.units, num_shards)
    of_experts = shard.local_shapes(experts, part.units, num_shards // shard.expert_parallel)
    return [held | of_experts[index // shard.expert_parallel] for index, held in enumerate(of_dense)]


def _unit_shards(part: _Part, run: PlannedRun) -> UnitShards:
    """The parameters of each shard of a replica, and which of them have gradients and are updated."""
    model, units = part.model, part.units
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    trained = {name: param.numel() for name, param in model.named_parameters() if param.requires_grad}
    local_shapes = _local_shapes(part, shapes, run)
    owned: Sequence[Sequence[str]] | None = None
    if run.optim.needs_full_params:
        owned = balanced_partition(sorted(trained), run.num_shards, trained.__getitem__)
    with_gradient = [name for name in local_shapes[0] if name in trained]
    if run.shard.flattens_units and run.num_shards > 1:  # one gradient of a unit, of its frozen parameters too
        flat = [(number, unit) for number, unit in enumerate(units) if any(name in trained for name in unit.parameters)]
        with_gradient = [name for number, unit in flat for name in (*unit.parameters, f"(padding of unit {number})")]
    return UnitShards(
        units,
        local_shapes,
        shapes,
        {name: param.dtype for name, param in model.named_parameters()},
        padding_dtype=getattr(torch, run.model.dtype),
        with_gradient=frozenset(with_gradient),
        trained=frozenset(trained),
        owned=owned,
        optim=run.optim,
        flattens_units=run.shard.flattens_units,
        has_average=run.train.ema_decay is not None,
    )


def _states(shards: UnitShards, part: _Part, run: PlannedRun) -> list[_State]:
    """The state of each shard; equal shards are computed once."""
    shapes, dtypes, trained, padding = shards.shapes, shards.dtypes, shards.trained, shards.padding_dtype
    local_shapes, owned_by_rank = shards.local_shapes, shards.owned or [()] * run.num_shards
    updates: dict[str, int] = {}
    if run.optim.needs_full_params:
        in_order = [name for name, param in part.model.named_parameters() if param.requires_grad]
        updates = _whole_updates(run.optim, in_order, shapes, dtypes)

    def num_bytes(local: Mapping[str, sharding.Shape]) -> int:
        return sum(prod(shape) * dtypes.get(name, padding).itemsize for name, shape in local.items())

    contents: dict[int, tuple[tuple[str, sharding.Shape], ...]] = {}  # by the identity of dicts that ranks share
    known: dict[tuple[object, ...], _State] = {}
    states = []
    foreach = run.on_gpu and run.shard.wrapper != "fsdp2"  # DTensors are updated one by one
    for index, (local, owned) in enumerate(zip(local_shapes, owned_by_rank, strict=True)):
        content = contents.get(id(local)) or contents.setdefault(id(local), tuple(local.items()))
        if (key := (content, tuple(owned))) not in known:
            own = {name: shape for name, shape in local.items() if name in trained}
            gradients = {name: shape for name, shape in local.items() if name in shards.with_gradient}
            # Under FSDP1 a part without elements has no gradient.
            has_gradient = {name: shape for name, shape in own.items() if prod(shape) or not run.shard.flattens_units}
            updated = {name: shapes[name] for name in owned} if run.optim.needs_full_params else has_gradient
            optimizer, taken = (
                step_bytes(run.optim, updated, shapes, dtypes, uses_foreach=foreach) if updated else (0, 0)
            )
            if run.optim.needs_full_params:
                held = {name: prod(shape) * dtypes[name].itemsize for name, shape in own.items()}
                taken = exchange_bytes(owned_by_rank, index, held, shapes, dtypes, updates, on_gpu=run.on_gpu)
            average = 0 if run.train.ema_decay is None else 4 * sum(map(prod, own.values()))  # in float32
            known[key] = _State(num_bytes(local), num_bytes(gradients), optimizer, average, taken)
        states.append(known[key])
    return states


def _whole_updates(
    optim: OptimConfig,
    trained: Iterable[str],
    shapes: Mapping[str, sharding.Shape],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, int]:
    """What the update of each whole parameter takes for a moment; those that are alike are measured once."""
    known: dict[object, int] = {}
    found = {}
    for name in trained:
        key = re.sub(r"\d+", "*", name), shapes[name], dtypes[name]
        if key not in known:
            known[key] = whole_update_bytes(optim, name, shapes[name], dtypes[name])
        found[name] = known[key]
    return found


def plan_step(
    config: PretrainedConfig, part: _Part, run: PlannedRun, facts: Facts
) -> tuple[tuple[Moment, ...], str | None]:
    """The moments of a run on any rank, without the optimizer's state.

    Returns:
        The moments, and why activations could not be measured, if so; then there are none of a step.
    """
    model = part.model
    in_units, parameters = unit_bytes(model, part.units, run.shard, run.num_shards, part.experts)
    terms = {} if run.shard.cpu_offload else {"parameters": parameters}
    if run.has_sharded_reference and not run.shard.cpu_offload:
        terms["reference"] = parameters
    load = Moment("load", "", dict(terms))
    of_batch = (run.objective, run.reference_kind, run.num_rows, run.padded_length, run.is_packed)
    of_ranks = (run.shard.context_parallel, run.shard.context_method)
    of_tape = (run.model, run.adapter, of_one_rank(run.shard), *of_batch, *of_ranks, run.on_gpu)
    record, has_loss_head = facts.of("record", of_tape, lambda: _tape(config, run, part))
    try:
        with _math_attention() if _keeps_scores(config, run) else nullcontext():
            tape = facts.of("tape", of_tape, record)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        return (load,), first_line(error)
    if run.on_gpu:
        terms["cuBLAS workspace"] = CUBLAS_WORKSPACE_BYTES
        if run.objective.is_cross_entropy and not has_loss_head:
            tape = _with_chunks_of_gpus(tape, model, run)
    batch = batch_bytes(model, run.num_rows, run.padded_length, run.shard.context_parallel, is_packed=run.is_packed)
    terms["batch"] = batch * run.num_micro_batches
    terms["buffers"] = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()) + _FIGURES_BYTES
    if _keeps_scores(config, run):  # one copy more in the backward pass, as measured on an H200
        terms["attention scores"] = _score_bytes(config, run)
    if not run.shard.is_sharded:
        terms[GRADIENTS] = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        if run.on_gpu:  # as measured on an H200 with torch 2.11; on CPUs they are freed
            terms["buckets of the first step"] = terms[GRADIENTS]
    player = PLAYERS[run.shard.wrapper](in_units, _rules(model, run), terms)
    player.step(tape)
    player.note("", "optimizer")
    return (load, *player.moments), None


def _keeps_scores(config: PretrainedConfig, run: PlannedRun) -> bool:
    """Whether attention keeps the scores of all pairs of tokens.

    On a GPU, torch's flash attention has no float32, and the kernel that has it no grouped-query heads.
    """
    text: Any = config.get_text_config()
    heads, key_heads = (getattr(text, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    is_grouped = bool(heads and key_heads and key_heads < heads)
    return run.on_gpu and is_grouped and run.shard.param_dtype == "float32" and run.model.attention in ("auto", "sdpa")


def _score_bytes(config: PretrainedConfig, run: PlannedRun) -> int:
    """Bytes of the float32 scores of all pairs of tokens, of one layer."""
    text: Any = config.get_text_config()
    return 4 * run.num_rows * int(text.num_attention_heads) * run.padded_length**2


def _math_attention() -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return found


def _with_chunks_of_gpus(tape: Sequence[Event], model: PreTrainedModel, run: PlannedRun) -> list[Event]:
    """The tape, which was made on a CPU, with the larger chunks in which a GPU upcasts logits.

    A chunk is there four times: upcast, its log-softmax, and the gradients of both.
    """
    text: Any = model.config.get_text_config()
    logits = 4 * run.num_rows * run.padded_length * int(getattr(text, "vocab_size", 1))
    cpu, gpu = (min(logits, cross_entropy_chunk_bytes(device)) for device in ("cpu", "cuda"))
    extra = 4 * (gpu - cpu)
    return [
        replace(event, rise=event.rise + extra, rise_alone=event.rise_alone + extra) if event.kind == LOSS else event
        for event in tape
    ]


def _overhead(part: _Part, run: PlannedRun, per_rank: Sequence[RankMemory]) -> Mapping[str, int]:
    """What the GPU of the fullest rank holds besides tensors; nothing on CPUs."""
    peaks = [rank.peak_bytes for rank in per_rank]
    if not run.on_gpu or None in peaks:
        return {}
    shard = run.shard
    divided = (shard.replicas, shard.tensor_parallel, shard.expert_parallel, shard.context_parallel, run.num_shards)
    num_params = sum(1 for _ in part.model.parameters())
    num_groups = 1 + sum(ranks > 1 for ranks in divided) if run.num_ranks > 1 else 0
    return device_overhead(max(peak for peak in peaks if peak is not None), 4 * num_params, num_groups)


def _rules(model: PreTrainedModel, run: PlannedRun) -> StepRules:
    shard, stored = run.shard, str(trained_dtype(model)).removeprefix("torch.")
    default_backward = 1 if shard.wrapper == "fsdp1" else 0
    backward = default_backward if shard.prefetch_backward is None else shard.prefetch_backward
    return StepRules(
        reshard=shard.reshard_after_forward,
        prefetch_forward=shard.prefetch_forward or 0,
        prefetch_backward=backward,
        num_micro_batches=run.num_micro_batches,
        sync_every_micro_batch=shard.sync_every_micro_batch,
        gradient_itemsize=sharding.itemsize(shard.param_dtype),
        casts_gradients=shard.param_dtype != shard.reduce_dtype,
        casts_reduced=shard.reduce_dtype != stored,
        keeps_reduced=shard.replicas > 1,
        copies_reduced=not run.on_gpu,
        offloads_activations=shard.activation_offload,
        has_host_gradients=shard.cpu_offload,
    )


def _tape(config: PretrainedConfig, run: PlannedRun, part: _Part) -> tuple[Callable[[], list[Event]], bool]:
    """What measures what one micro-batch keeps in memory, and whether the output head computes the loss."""
    model = _build(config, run, run.shard.param_dtype)
    if run.shard.flattens_units:
        for unit in part.units:  # one flat gradient, also of what is frozen
            params = [model.get_parameter(name) for name in unit.parameters]
            if any(param.requires_grad for param in params):
                for param in params:
                    param.requires_grad_(True)
    has_loss_head = run.shard.tensor_parallel == 1 and use_loss_head(  # else the head is divided
        model, run.model.chunked_loss, any_vocabulary=not run.objective.is_cross_entropy
    )
    divide_model(model, run.shard)
    num_parts = run.shard.context_parallel
    if num_parts > 1:
        sharding.divide_attention(model, sharding.chosen_method(run.shard, config))
    sizes = run.num_rows, run.padded_length, num_parts
    compute = micro_batch_loss(model, run.objective, run.reference_kind, *sizes, is_packed=run.is_packed)
    record = partial(record_tape, model, run.shard, part.units, compute, uncast=part.experts, is_packed=run.is_packed)
    return record, has_loss_head
