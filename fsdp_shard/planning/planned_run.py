"""The settings that a run's memory and time depend on, and values derived from them."""

from dataclasses import dataclass, field
from typing import Protocol, Self

from fsdp_shard import models, sharding
from fsdp_shard.checkpoint import CheckpointConfig
from fsdp_shard.data import PAIRS, ROWS, DataConfig
from fsdp_shard.planning.config import PlanDataConfig, PlanSavingConfig
from fsdp_shard.planning.step.recording.fake_attention import FULL, PACKED, PADDED
from fsdp_shard.training import AdapterConfig, ObjectiveConfig, OptimConfig, TrainConfig


class RunSections(Protocol):
    """The config sections that determine a run's memory: those of `finetune`, `doctor` and `plan`."""

    model: models.ModelConfig
    shard: sharding.ShardConfig
    train: TrainConfig
    optim: OptimConfig
    adapter: AdapterConfig
    objective: ObjectiveConfig

    @property
    def data(self) -> DataConfig | PlanDataConfig:
        """The data settings."""

    @property
    def checkpoint(self) -> CheckpointConfig | PlanSavingConfig:
        """The checkpoint settings."""


@dataclass(frozen=True)
class PlannedRun:
    """The settings of the planned run, as in `finetune`.

    Attributes:
        model: As in `finetune`, like the other attributes that are not described here.
        sequence_length: The sequence length in tokens.
        num_ranks: Number of ranks.
        saves_asynchronously: Whether saves may copy the state into host memory.
        saves_optimizer: Whether checkpoints have the optimizer state.
        saves_every: Number of steps between saves, or between evaluations whose best is saved; 0 saves the last step
            only.
        resumes: Whether the run continues from a step and reads its optimizer state.
        is_streamed: Whether samples are streamed, so not known in advance.
        on_gpu: Whether ranks have GPUs, whose collectives do not copy what they reduce, unlike gloo's.
        is_packed: Whether rows hold several documents, or pairs that share prompts, separated by a mask in sdpa.
        target_length: Number of tokens per target of a seq2seq model; None for `sequence_length`.
        mask_fraction: Fraction of the tokens that a masked language model predicts; None for other models.
    """

    model: models.ModelConfig
    shard: sharding.ShardConfig
    train: TrainConfig
    optim: OptimConfig
    sequence_length: int
    num_ranks: int
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    saves_asynchronously: bool = True
    saves_optimizer: bool = True
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    is_streamed: bool = False
    on_gpu: bool = False
    is_packed: bool = False
    saves_every: int = 0
    resumes: bool = False
    target_length: int | None = None
    mask_fraction: float | None = None

    @classmethod
    def of(cls, config: RunSections, sequence_length: int, num_ranks: int, *, on_gpu: bool, resumes: bool) -> Self:
        """Return the run of a config; the other arguments are values that the config leaves open."""
        return cls(
            model=config.model,
            shard=config.shard,
            train=config.train,
            optim=config.optim,
            sequence_length=sequence_length,
            num_ranks=num_ranks,
            adapter=config.adapter,
            saves_asynchronously=config.checkpoint.asynchronous,
            saves_optimizer=config.checkpoint.optimizer,
            objective=config.objective,
            is_streamed=config.data.streaming,
            on_gpu=on_gpu,
            is_packed=config.data.packing,
            saves_every=config.checkpoint.every or (config.train.eval_every if config.checkpoint.save_best else 0),
            resumes=resumes,
            target_length=config.data.target_length if config.model.task == models.SEQ2SEQ else None,
            mask_fraction=config.data.mask_fraction if config.model.task == models.MASKED_LM else None,
        )

    @property
    def decoder_length(self) -> int:
        """Number of tokens per sequence that a rank has labels for; for a seq2seq model, target tokens."""
        return self.target_length or self.padded_length

    @property
    def num_shards(self) -> int:
        """Number of ranks that one replica is sharded over."""
        return sharding.num_shards(self.shard, self.num_ranks)

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model."""
        return self.shard.replicas if self.shard.is_sharded else self.num_ranks

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per rank and step."""
        return -(-self.train.global_batch_size // (self.train.micro_batch_size * self.num_data_ranks))

    @property
    def num_reductions(self) -> int:
        """Number of times that gradients are reduced in a step."""
        return self.num_micro_batches if self.shard.sync_every_micro_batch else 1

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks, or of groups of ranks that divide sequences, with different samples."""
        return sharding.num_data_ranks(self.shard, self.num_ranks)

    @property
    def num_rows(self) -> int:
        """Number of sequences in a micro-batch kept for the backward pass: both answers of each pair.

        A packed sequence holds several pairs.
        """
        return self.train.micro_batch_size * (2 if self.objective.samples == PAIRS and not self.is_packed else 1)

    @property
    def num_read_rows(self) -> int:
        """Number of sequences in a micro-batch; a sample that is compared or has another answer counts as two."""
        is_one = self.objective.samples == ROWS or (self.objective.samples == PAIRS and self.is_packed)
        return self.train.micro_batch_size * (1 if is_one else 2)

    @property
    def rows(self) -> str:
        """Kind of a micro-batch's rows: FULL, PADDED or PACKED. Causal models need not know the padding."""
        return PACKED if self.is_packed else FULL if self.model.task == models.CAUSAL else PADDED

    @property
    def has_sharded_reference(self) -> bool:
        """Whether a frozen copy of the model is sharded alongside it."""
        return self.reference_kind == "sharded"

    @property
    def reference_kind(self) -> str | None:
        """The source of a preference objective's reference model."""
        begins_at_base = self.adapter.begins_at_base
        return self.objective.reference_kind(begins_at_base=begins_at_base, is_streamed=self.is_streamed)

    @property
    def part_length(self) -> int:
        """Number of tokens of each sequence on a rank."""
        return -(-self.sequence_length // self.shard.context_parallel)

    @property
    def padded_length(self) -> int:
        """The same, padded so that all ranks have two chunks of equal length."""
        return self.part_length + (self.part_length % 2 if self.shard.context_parallel > 1 else 0)
