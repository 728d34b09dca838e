"""What every evaluation has: the settings, the tokenizer and the ranks; and the function that loads models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_shard.checkpoint import Location
from fsdp_shard.distributed import Communicator, DistributedContext, OnlyRank
from fsdp_shard.evaluation.config import EvaluateSettings
from fsdp_shard.inference import KVCacheBudget, OnPlan


class LoadModel(Protocol):
    """Loads a model when a task needs it, and again for a second one."""

    def __call__(
        self, source: Location, kv_cache: KVCacheBudget | None = None, on_plan: OnPlan | None = None
    ) -> PreTrainedModel:
        """Load the model at `source`; the other arguments are those of `dispatch_model`."""
        ...


@dataclass(frozen=True)
class EvaluationBase:
    """What every evaluation has; the class of a task extends it with what it has read.

    Attributes:
        settings: The settings, as `check_evaluation` leaves them.
        run_dir: Directory for the task's files, from which it can continue.
        seed: Seed of resamples or random prompts.
        tokenizer: The tokenizer of the model in `checkpoint`.
        context: The ranks, which each hold the whole model and divide the batches; None for a single process.
    """

    settings: EvaluateSettings
    run_dir: Path
    seed: int
    tokenizer: PreTrainedTokenizerBase
    context: DistributedContext | None = None

    @property
    def ranks(self) -> Communicator:
        """The ranks; in a single process, this one."""
        return self.context or OnlyRank()
