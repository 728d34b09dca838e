"""Memory that each rank of a run needs at its fullest, from configs alone; the model is only ever on meta.

What is counted, per rank: its share of the parameters, gradients and optimizer state; what is whole for a while (units
gathered in the compute dtype, gradients before they are reduced, and the quantized weight that is multiplied with); and
what the forward pass of a micro-batch keeps.
They are added up as if all were there at once, so the peak is an upper estimate. Not counted: the CUDA context, the
allocator's fragmentation and the buffers of the communication library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from fsdp_shard.errors import ConfigError
from fsdp_shard.models import Block, ModelConfig, build_on_meta, no_split_blocks, num_weights, scratch_bytes
from fsdp_shard.planning.activations import measure_activations
from fsdp_shard.planning.head import take_out_head
from fsdp_shard.planning.optimizer import optimizer_bytes
from fsdp_shard.sharding import Shape, ShardConfig, explain, itemsize, plan_units, recomputed_fqns
from fsdp_shard.training import (
    AdapterConfig,
    LoraConfig,
    OptimConfig,
    TrainConfig,
    assign_owners,
    inject,
    quantize_base,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class PlannedRun:
    """The settings of the run that is planned, as `finetune` takes them."""

    model: ModelConfig
    shard: ShardConfig
    train: TrainConfig
    optim: OptimConfig
    sequence_length: int
    num_ranks: int
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    saves_asynchronously: bool = True

    @property
    def num_shards(self) -> int:
        return self.shard.num_shards(self.num_ranks)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank; `host_bytes` of them are not on the device. None: the activations could not be measured.

    `staging_bytes` of host memory come on top: the copy that asynchronous saves write from.
    """

    rank: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    unsharded_bytes: int
    activations_bytes: int | None
    host_bytes: int
    staging_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The most on the device at one time."""
        if self.activations_bytes is None:
            return None
        return self.state_bytes - self.host_bytes + self.unsharded_bytes + self.activations_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """`problem` says why activations could not be measured, if so; `tree` is what `shard.explain` asks for.

    `num_params` are all, with those that an adapter adds, of which `num_trained` are not frozen.
    """

    model_class: str
    num_params: int
    num_trained: int
    blocks: tuple[Block, ...]
    per_rank: tuple[RankMemory, ...]
    problem: str | None = None
    tree: tuple[str, ...] = ()

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of all parameters, were they held in each dtype."""
        return {name: -(-self.num_params * bits // 8) for name, bits in BITS.items()}

    @property
    def balance(self) -> float:
        """State of the fullest rank over that of the mean one; 1.0 is even."""
        sizes = [rank.state_bytes for rank in self.per_rank]
        return max(sizes) * len(sizes) / sum(sizes)

    @property
    def peak_bytes(self) -> int | None:
        """On the fullest rank."""
        peaks = [rank.peak_bytes for rank in self.per_rank]
        return None if None in peaks else max(peak for peak in peaks if peak is not None)

    def fits(self, memory_bytes: int | None) -> bool | None:
        """Whether every rank fits in `memory_bytes`; None when one of the two is not known."""
        return None if memory_bytes is None or self.peak_bytes is None else self.peak_bytes <= memory_bytes


def plan_memory(config: PretrainedConfig, run: PlannedRun) -> MemoryPlan:
    """The plan of `run` for the model that `config` describes. Raises ConfigError or ModelError."""
    for name, what in (("tensor_parallel", "a divided layer keeps"), ("expert_parallel", "is sent to experts")):
        if (ranks := getattr(run.shard, name)) > 1:
            raise ConfigError(
                f"shard.{name}={ranks} cannot be planned for: what {what} is not counted. Plan with shard.{name}=1."
            )
    run.shard.check_mesh(run.num_ranks)
    model = _build(config, run, run.model.dtype)
    run.shard.check_model(model)
    blocks = [
        replace(block, num_params=_num_weights(model, block)) for block in no_split_blocks(model, run.shard.blocks)
    ]
    units = plan_units(model, run.shard)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    kept, problem = _kept_bytes(config, run)
    unsharded = run.shard.unsharded_bytes(units, run.num_shards, accumulates=_num_micro_batches(run) > 1)
    unsharded += scratch_bytes(model, itemsize(run.shard.param_dtype))
    states = _state_bytes(run.shard.shares(shapes, units, run.num_shards), shapes, trained, dtypes, run)
    per_rank = []
    for rank in range(run.num_ranks):
        parameters, gradients, optimizer = states[rank % run.num_shards]
        host = parameters + gradients + optimizer if run.shard.cpu_offload else 0
        staging = gradients + optimizer if run.saves_asynchronously else 0  # what is trained is what is saved
        per_rank.append(RankMemory(rank, parameters, gradients, optimizer, unsharded, kept, host, staging))
    num_params, num_trained = sum(unit.num_params for unit in units), sum(unit.num_trained for unit in units)
    tree = tuple(explain(units, shapes, run.shard, run.num_ranks)) if run.shard.explain else ()
    return MemoryPlan(type(model).__name__, num_params, num_trained, tuple(blocks), tuple(per_rank), problem, tree)


def _build(config: PretrainedConfig, run: PlannedRun, dtype: str) -> PreTrainedModel:
    # The kernels of flash-attn need not be installed to plan; they keep what sdpa's flash kernel keeps.
    attention = "eager" if run.model.attention == "eager" else "sdpa"
    trust = run.model.trust_remote_code
    model = build_on_meta(config, dtype, trust_remote_code=trust, attention=attention)
    if isinstance(run.adapter, LoraConfig):
        inject(model, run.adapter, run.model.path, {}, run.model.task)
        quantize_base(model, run.adapter.quantize, run.shard, {})
    return model


def _num_weights(model: PreTrainedModel, block: Block) -> int:
    """`block.num_params`, with what quantized weights stand for instead of their bytes."""
    module = model.get_submodule(block.fqn)
    inside = {} if block.direct else num_weights(module)
    return block.num_params + sum(count - module.get_parameter(name).numel() for name, count in inside.items())


def _state_bytes(
    shares: Sequence[Mapping[str, Shape]],
    shapes: Mapping[str, Shape],
    trained: Collection[str],
    dtypes: Mapping[str, torch.dtype],
    run: PlannedRun,
) -> list[tuple[int, int, int]]:
    """(bytes of parameters, of gradients, of optimizer state) of each shard; equal shards are looked at once."""
    known: dict[tuple[object, ...], tuple[int, int, int]] = {}
    padding = getattr(torch, run.model.dtype)
    sizes = []
    sizes_by_name = {name: torch.Size(shapes[name]).numel() for name in trained}
    for share, owned in zip(shares, assign_owners(sizes_by_name, len(shares)), strict=True):
        local = {name: shape for name, shape in share.items() if name in trained}
        updated = {name: shapes[name] for name in owned} if run.optim.needs_whole else local
        if (key := (tuple(share.items()), tuple(updated))) not in known:
            held, mine = (
                sum(torch.Size(s).numel() * dtypes.get(name, padding).itemsize for name, s in part.items())
                for part in (share, local)
            )
            known[key] = held, mine, optimizer_bytes(run.optim, updated, shapes, dtypes) if updated else 0
        sizes.append(known[key])
    return sizes


def _num_micro_batches(run: PlannedRun) -> int:
    return -(-run.train.global_batch_size // (run.train.micro_batch_size * run.num_ranks))


def _kept_bytes(config: PretrainedConfig, run: PlannedRun) -> tuple[int | None, str | None]:
    """Of a micro-batch: what is saved for the backward pass, and the loss with its gradient, in the compute dtype.

    Or why that cannot be measured: control flow that depends on values, no text input.
    """
    model = _build(config, run, run.shard.param_dtype)
    of_head = take_out_head(model, run.model.chunked_loss, run.train.micro_batch_size * run.sequence_length)
    blocks = no_split_blocks(model, run.shard.blocks)
    try:
        activations = measure_activations(
            model,
            blocks,
            run.train.micro_batch_size,
            run.sequence_length,
            recomputed=recomputed_fqns([b.fqn for b in blocks if b.repeated], run.shard.activation_checkpointing),
            selective=run.shard.activation_checkpointing == "selective",
            offload=run.shard.activation_offload,
        )
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        return None, (str(error).strip() or type(error).__name__).splitlines()[0]
    return activations.saved_bytes + (2 * activations.logits_bytes if of_head is None else of_head), None
