"""The planned memory of each rank and of the host."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fsdp_shard import models
from fsdp_shard.inference import QUANTIZATIONS
from fsdp_shard.planning.step.snapshot import EVA, Snapshot
from fsdp_shard.planning.step.unit_holdings import UnitHolding, UnitShards

_BITS = {"float32": 32, "bfloat16": 16, **{name: quantization.bits for name, quantization in QUANTIZATIONS.items()}}


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        rank: The rank.
        parameters_bytes: Its shard of the parameters.
        gradients_bytes: Its shard of the gradients; the padding of uneven shards under FSDP2 counts in the peak only.
        optimizer_bytes: Its shard of the optimizer state.
        unsharded_bytes: Maximum bytes of unsharded parameters and gradients, including the buffers of their
            collectives.
        activations_bytes: Maximum bytes of activations and the loss; None if they could not be measured.
        host_bytes: Bytes of the state in host memory, with CPU offload.
        staging_bytes: Bytes of the copy in host memory that asynchronous saves write from. It counts in the peak of a
            CPU rank that continues training after a save.
        needed_host_bytes: For a GPU rank, maximum host memory for the state, activations and that copy, with pinned
            memory as torch allocates it. Python and libraries are not counted.
        reference_bytes: Its shard of the reference model of a preference objective.
        average_bytes: Its shard of the average of the trained weights (`train.ema_decay`).
        teacher_bytes: Bytes that a teacher running alongside holds on the device.
        shared_snapshots: The snapshots of a run without rank-specific bytes; shared by ranks.
        highest_snapshots: Those of them with the most bytes in their phase. What a rank adds is constant within a
            phase, so its peak is one of them.
        rank_bytes: Bytes by term that this rank adds at each point from the first step on.
        rank_bytes_by_phase: The same for bytes in one phase only, by phase.
    """

    rank: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    unsharded_bytes: int
    activations_bytes: int | None
    host_bytes: int
    staging_bytes: int = 0
    needed_host_bytes: int = 0
    reference_bytes: int = 0
    average_bytes: int = 0
    teacher_bytes: int = 0
    shared_snapshots: tuple[Snapshot, ...] = ()
    highest_snapshots: tuple[Snapshot, ...] = ()
    rank_bytes: Mapping[str, int] = field(default_factory=dict)
    rank_bytes_by_phase: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and averages, on the device or the host."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.average_bytes

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The device memory at each point of a run."""
        return tuple(self._complete(snapshot) for snapshot in self.shared_snapshots)

    @cached_property
    def peak(self) -> Snapshot | None:
        """The snapshot with the most bytes on the device; None if activations could not be measured."""
        if self.activations_bytes is None or not self.highest_snapshots:
            return None
        return self._complete(max(self.highest_snapshots, key=lambda snapshot: sum(self._terms(snapshot).values())))

    @property
    def peak_bytes(self) -> int | None:
        """The maximum bytes of tensors on the device; None if activations could not be measured."""
        return None if self.peak is None else self.peak.total_bytes

    def _complete(self, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, terms=self._terms(snapshot))

    def _terms(self, snapshot: Snapshot) -> dict[str, int]:
        """Bytes by term at a point, including this rank's own."""
        rank_bytes = {} if snapshot.phase in ("load", EVA, "resume") else self.rank_bytes
        return {**rank_bytes, **snapshot.terms, **self.rank_bytes_by_phase.get(snapshot.phase, {})}


@dataclass(frozen=True)
class HostMemory:
    """The host memory of a machine.

    Attributes:
        num_bytes: Bytes of host memory.
        num_ranks: Number of ranks that share the machine.
    """

    num_bytes: int
    num_ranks: int

    def needed_by(self, plan: "MemoryPlan") -> int:
        """The bytes that the ranks of the fullest machine need."""
        sizes = [rank.needed_host_bytes for rank in plan.per_rank]
        return max(sum(sizes[first : first + self.num_ranks]) for first in range(0, len(sizes), self.num_ranks))

    def fits(self, plan: "MemoryPlan") -> bool:
        """Whether each machine has enough memory for its ranks."""
        return self.needed_by(plan) <= self.num_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a run needs.

    Attributes:
        model_class: Name of the model's class.
        num_params: Number of parameters, including an adapter's.
        num_trained: Number of parameters that are not frozen.
        blocks: The no-split blocks.
        per_rank: The memory of each rank.
        problem: Why activations could not be measured, if so.
        tree: The table of units, with `shard.explain`.
        overhead: Bytes of GPU memory outside of tensors, by term; empty on CPUs.
        shards: The shards of each unit; None if the plan was made without them.
        tensor_ranks: Number of neighboring ranks that have the same rows.
        uncounted: Why a phase outside the step could not be measured, by phase; the peak does not include it.
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
    uncounted: Mapping[str, str] = field(default_factory=dict)

    @property
    def fullest(self) -> RankMemory:
        """The rank with the highest peak; without peaks, the rank with the most state."""
        return max(self.per_rank, key=lambda rank: (rank.peak_bytes or 0, rank.state_bytes))

    def units_of(self, rank: int) -> tuple[UnitHolding, ...]:
        """What a rank holds of each unit for the whole run."""
        if self.shards is None:
            return ()
        return self.shards.held(rank // self.tensor_ranks % len(self.shards.local_shapes))

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of all parameters, for each of several dtypes."""
        return {name: -(-self.num_params * bits // 8) for name, bits in _BITS.items()}

    @property
    def balance(self) -> float:
        """State of the fullest rank divided by the mean; 1.0 is perfectly even."""
        sizes = [rank.state_bytes for rank in self.per_rank]
        return max(sizes) * len(sizes) / sum(sizes)

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the fullest rank; None if activations could not be measured."""
        peaks = [rank.peak_bytes for rank in self.per_rank]
        return None if None in peaks else max(peak for peak in peaks if peak is not None)

    def fits(self, memory_bytes: int | None) -> bool | None:
        """Whether `memory_bytes` can hold every rank's peak and a GPU's overhead; None if unknown."""
        if memory_bytes is None or self.peak_bytes is None:
            return None
        return self.needed_bytes <= memory_bytes

    @property
    def needed_bytes(self) -> int:
        """The device memory required: the peak, which must be known, plus a GPU's overhead."""
        assert self.peak_bytes is not None, "there is no peak; see problem"
        return self.peak_bytes + self.overhead_bytes

    @property
    def overhead_bytes(self) -> int:
        """Bytes of GPU memory outside of tensors."""
        return sum(self.overhead.values())
