"""The kinds of evaluation: a new one is a class in its own file, and one line here."""

from collections.abc import Callable
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.evaluation.config import (
    CLASSIFICATION,
    GENERATION,
    LM_EVAL,
    PERPLEXITY,
    REWARD,
    SPEED,
    EvaluateSettings,
    Figures,
)
from fsdp_shard.evaluation.lm_eval import open_tasks
from fsdp_shard.evaluation.model_loader import LoadModel
from fsdp_shard.evaluation.perplexity_task.perplexity import open_perplexity
from fsdp_shard.evaluation.scored_rows.classification import open_classification
from fsdp_shard.evaluation.scored_rows.generated_answers import open_generation
from fsdp_shard.evaluation.scored_rows.reward_model import open_rewards
from fsdp_shard.evaluation.speed_task.speed import open_speed


class Evaluation(Protocol):
    """An evaluation with all that it needs except the model."""

    def describe(self) -> str:
        """A line about its text, questions or sizes."""
        ...

    def measure(self, load: LoadModel) -> Figures:
        """Evaluate the models, each loaded by `load`, with a progress bar; the figures are on rank 0.

        Raises:
            LossError, PlanError, RunError: There is no result.
        """
        ...


# Settings, run directory, seed, the model's tokenizer, and the ranks that divide the work.
_Open = Callable[[EvaluateSettings, str, int, PreTrainedTokenizerBase, DistributedContext | None], Evaluation]

# `task` -> the function that prepares it.
EVALUATIONS: dict[str, _Open] = {
    PERPLEXITY: open_perplexity,
    LM_EVAL: open_tasks,
    CLASSIFICATION: open_classification,
    REWARD: open_rewards,
    GENERATION: open_generation,
    SPEED: open_speed,
}
