"""What every task of an evaluation is given: the settings, the ranks, and how a model is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_shard.checkpoint import Location
from fsdp_shard.distributed import Communicator, DistributedContext, OnlyRank
from fsdp_shard.evaluation.config import EvaluateSettings
from fsdp_shard.inference import KVCacheBudget, OnPlan


class LoadModel(Protocol):
    """Loads a model: only once a task needs it, and again for a second one."""

    def __call__(
        self, source: Location, kv_cache: KVCacheBudget | None = None, on_plan: OnPlan | None = None
    ) -> PreTrainedModel:
        """Load the model in `source`; the other arguments are those of `dispatch_model`."""
        ...


@dataclass(frozen=True)
class EvaluationInputs:
    """What every task is given; the class of a task adds what it has read.

    Attributes:
        settings: The settings, as `check_evaluation` leaves them.
        run_dir: Directory of what the task writes, and goes on from.
        seed: Seed of resamples, or of random prompts.
        tokenizer: That of the model in `checkpoint`.
        context: The ranks, which each have the whole model, and divide the batches; None for a single process.
    """

    settings: EvaluateSettings
    run_dir: Path
    seed: int
    tokenizer: PreTrainedTokenizerBase
    context: DistributedContext | None = None

    @property
    def ranks(self) -> Communicator:
        """The ranks; of a single process, this one."""
        return self.context or OnlyRank()
