"""FLOPs, communication and memory traffic of each rank in a step, independent of the hardware.

Pure arithmetic on `ModelFacts`: a few milliseconds for any number of ranks, so a search can evaluate thousands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fsdp_shard import sharding
from fsdp_shard.planning.costs.block_flops import CostPolynomial
from fsdp_shard.planning.costs.model_facts import ModelFacts
from fsdp_shard.planning.costs.step_traffic import Traffic, step_traffic
from fsdp_shard.planning.costs.unit_shares import UnitShare, unit_shares
from fsdp_shard.planning.planned_run import PlannedRun

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class CheckpointCost:
    """Bytes of a saved step.

    Attributes:
        weights_bytes: The weights, or the adapter's weights.
        optimizer_bytes: The optimizer state.
        average_bytes: The average of the weights (`train.ema_decay`).
        base_bytes: What a run with an adapter reads in addition when it resumes: its base.
        num_writers: Number of ranks that write a part each.
        num_readers: Number of ranks that read a part each.
    """

    weights_bytes: int
    optimizer_bytes: int
    average_bytes: int
    base_bytes: int
    num_writers: int
    num_readers: int

    @property
    def total_bytes(self) -> int:
        """All bytes written."""
        return self.weights_bytes + self.optimizer_bytes + self.average_bytes


@dataclass(frozen=True)
class StepCost:
    """The work of one rank in a step; ranks differ by padding only.

    Attributes:
        num_ranks: Number of ranks.
        num_steps: Number of steps of the run; None if it depends on the data.
        tokens: Tokens per step over all ranks: target tokens for a seq2seq model, predicted tokens for a masked one.
        flops: FLOPs that a rank must compute, including recomputation; None if they cannot be measured. Attention
            counts the pairs that its mask allows, and for packed documents the minimum. Elementwise work and the
            optimizer do not count.
        model_flops: The FLOPs that train the model: without recomputation, a reference, a teacher, or answers that are
            only compared.
        precision: Precision of matrix products: `bf16`, `tf32` or `fp32`.
        traffic: What the rank sends to other ranks.
        memory_bytes: Minimum device memory traffic: parameters once per pass, outputs of gathers, gradients,
            activations kept between the passes or recomputed, and updated optimizer state.
        to_host_bytes: Bytes that offload copies from the device.
        to_device_bytes: Bytes that offload copies back, plus a teacher's weights that are not on the device.
        checkpoint: A saved step.
        problem: Why FLOPs cannot be measured, if so.
        is_packed: Whether rows hold documents or pairs of unknown lengths.
    """

    num_ranks: int
    num_steps: int | None
    tokens: int
    flops: int | None
    model_flops: int | None
    precision: str
    traffic: tuple[Traffic, ...]
    memory_bytes: int
    to_host_bytes: int
    to_device_bytes: int
    checkpoint: CheckpointCost
    problem: str | None = None
    is_packed: bool = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends to others."""
        return sum(traffic.sent_bytes for traffic in self.traffic)


def step_cost(facts: ModelFacts, run: PlannedRun) -> StepCost:
    """Count the cost of a step for each rank.

    Args:
        facts: The model, measured with the run's `model.*`, `adapter.*`, `shard.blocks` and `shard.param_dtype`.
        run: The settings of the run.

    Returns:
        The cost.

    Raises:
        ConfigError: The traffic of a mixture of experts cannot be counted.
    """
    shares = list(unit_shares(facts, run))
    flops = model_flops = None
    if facts.costs is not None:
        flops, model_flops = _flops(facts, run), _flops(facts, run, of_model=True)
    kept, recomputed = _activation_bytes(facts, run)
    to_host, to_device = _offloaded_bytes(facts, run, shares, kept)
    precision = "bf16" if run.shard.param_dtype == "bfloat16" else "tf32" if run.train.tf32 else "fp32"
    return StepCost(
        num_ranks=run.num_ranks,
        num_steps=None if run.train.epochs is not None else run.train.num_steps,
        tokens=run.num_micro_batches * run.num_data_ranks * _labels_of_rows(run),
        flops=flops,
        model_flops=model_flops,
        precision=precision,
        traffic=step_traffic(facts, run, shares),
        memory_bytes=_memory_bytes(facts, run, shares, kept + recomputed),
        to_host_bytes=to_host,
        to_device_bytes=to_device,
        checkpoint=_checkpoint_cost(facts, run),
        problem=facts.problem,
        is_packed=run.is_packed,
    )


def _flops(facts: ModelFacts, run: PlannedRun, *, of_model: bool = False) -> int:
    """FLOPs of a rank in a step, or `model_flops`. Ranks that divide layers or sequences have equal shares."""
    assert facts.costs is not None
    kind = run.shard.activation_checkpointing
    recomputed = set() if of_model else set(sharding.recomputed_fqns(facts.blocks, kind))
    counted: list[CostPolynomial] = []
    blocks = {"": facts.costs.outside} | dict(facts.costs.blocks)
    for fqn, block in blocks.items():
        counted += [block.forward, block.backward]
        if fqn in recomputed:
            counted.append(block.recomputed_selectively if kind == "selective" else block.recomputed)
    lengths = run.sequence_length, run.target_length
    flops = run.num_rows * _sum_at(counted, *lengths, is_packed=run.is_packed)
    if run.mask_fraction is not None and run.shard.tensor_parallel == 1:  # otherwise the head is divided
        flops -= (run.num_rows * run.sequence_length - _labels_of_rows(run)) * facts.unmasked_flops
    if not of_model:  # answers compared without gradients
        num_rows = run.num_read_rows - run.num_rows
        num_rows += run.num_read_rows if run.reference_kind in ("sharded", "adapter") else 0
        forward = [block.forward for block in blocks.values()]
        flops += num_rows * _sum_at(forward, *lengths, is_packed=run.is_packed)
    return run.num_micro_batches * flops // (run.shard.tensor_parallel * run.shard.context_parallel)


def _labels_of_rows(run: PlannedRun) -> int:
    """Number of predicted tokens in a micro-batch, over all rows; the mean for a masked language model."""
    return round(run.num_rows * (run.target_length or run.sequence_length) * (run.mask_fraction or 1))


def _sum_at(
    costs: Sequence[CostPolynomial], length: int, decoder_length: int | None, *, is_packed: bool = False
) -> int:
    """The sum of `costs`, many of which are equal."""
    known: dict[int, int] = {}
    for cost in costs:
        if id(cost) not in known:
            known[id(cost)] = cost.at(length, decoder_length, is_packed=is_packed)
    return sum(known[id(cost)] for cost in costs)


def _activation_bytes(facts: ModelFacts, run: PlannedRun) -> tuple[int, int]:
    """Minimum bytes that a rank's blocks keep between the passes of one micro-batch, and that they recompute."""
    if facts.costs is None:
        return 0, 0
    recomputed = set(sharding.recomputed_fqns(facts.blocks, run.shard.activation_checkpointing))
    blocks = facts.costs.blocks
    kept = [block.input_bytes if fqn in recomputed else block.saved_bytes for fqn, block in blocks.items()]
    again = [block.saved_bytes for fqn, block in blocks.items() if fqn in recomputed]
    of_kept, of_again = (
        run.num_rows * _sum_at(costs, run.part_length, run.target_length) // run.shard.tensor_parallel
        for costs in (kept, again)
    )
    return of_kept, of_again


def _offloaded_bytes(
    facts: ModelFacts, run: PlannedRun, shares: Sequence[UnitShare], kept_bytes: int
) -> tuple[int, int]:
    """Bytes copied to host memory in a step, and bytes copied back."""
    to_host = to_device = 0
    if run.shard.activation_offload:
        to_host = to_device = run.num_micro_batches * kept_bytes
    if run.shard.cpu_offload:
        to_device += sum(share.num_gathers * share.stored_bytes for share in shares)
        num_reductions = max((share.num_reductions for share in shares), default=0)
        to_host += num_reductions * _trained_bytes(facts) // _num_owners(run)
    return to_host, to_device


def _memory_bytes(facts: ModelFacts, run: PlannedRun, shares: Sequence[UnitShare], activation_bytes: int) -> int:
    moved = 2 * run.num_micro_batches * activation_bytes  # written once, and read in the backward pass
    for share in shares:
        whole = share.num_chunks * share.gathered_bytes
        written = share.num_gathers + share.num_small_gathers if share.num_chunks > 1 else 0
        moved += (written + 2 * run.num_micro_batches) * whole
    trained = sum(prod(param.shape) for param in facts.params.values() if param.is_trained)
    moved += run.num_micro_batches * trained * sharding.itemsize(run.shard.param_dtype) // run.shard.tensor_parallel
    if not run.shard.cpu_offload:  # parameters and state are read and written, gradients read
        moved += (3 * _trained_bytes(facts) + 2 * facts.state_bytes(run.optim)) // _num_owners(run)
    return moved


def _num_owners(run: PlannedRun) -> int:
    """Number of ranks that share one replica of the model."""
    return run.num_shards * run.shard.tensor_parallel


def _trained_bytes(facts: ModelFacts) -> int:
    return sum(prod(param.shape) * param.itemsize for param in facts.params.values() if param.is_trained)


def _checkpoint_cost(facts: ModelFacts, run: PlannedRun) -> CheckpointCost:
    saves_all = run.adapter.trains_all
    saved = [param for param in facts.params.values() if saves_all or param.is_trained]
    trained = sum(prod(param.shape) for param in facts.params.values() if param.is_trained)
    return CheckpointCost(
        weights_bytes=sum(prod(param.shape) * param.itemsize for param in saved),
        optimizer_bytes=facts.state_bytes(run.optim) if run.saves_optimizer else 0,
        average_bytes=0 if run.train.ema_decay is None else _FLOAT32_BYTES * trained,
        base_bytes=0 if saves_all else facts.base_bytes,
        num_writers=_num_owners(run) if run.shard.is_sharded else run.num_ranks,
        num_readers=_num_owners(run),
    )
