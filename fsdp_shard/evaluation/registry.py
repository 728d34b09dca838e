"""The kinds of evaluation: a new one needs a class in its own file, a line here, and its name in TASKS of config.py."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

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
from fsdp_shard.evaluation.evaluation_base import EvaluationBase, LoadModel
from fsdp_shard.evaluation.lm_eval import open_tasks
from fsdp_shard.evaluation.perplexity_task.perplexity import open_perplexity, settle_windows
from fsdp_shard.evaluation.scored_rows.classification import check_classification, open_classification
from fsdp_shard.evaluation.scored_rows.generated_answers import check_answering, open_generation
from fsdp_shard.evaluation.scored_rows.reward_model import check_rewards, open_rewards
from fsdp_shard.evaluation.speed_task.speed import check_sizes, open_speed


class Evaluation(Protocol):
    """An evaluation with everything it needs except the model."""

    def describe(self) -> str:
        """Describe its text, questions or sizes in a line."""
        ...

    def measure(self, load: LoadModel) -> Figures:
        """Evaluate the models, each loaded by `load`, with a progress bar; rank 0 has the figures.

        Raises:
            LossError, PlanError, RunError: There is no result.
        """
        ...


class EvaluationTask(NamedTuple):
    """The functions of a task.

    Attributes:
        open: Prepares the task; with ranks, a collective.
        check: Checks the files in the settings, and sets lengths left to the model; None if there is nothing to do.
    """

    open: Callable[[EvaluationBase], Evaluation]
    check: Callable[[EvaluateSettings], None] | None = None


# By `task`.
EVALUATIONS: dict[str, EvaluationTask] = {
    PERPLEXITY: EvaluationTask(open_perplexity, settle_windows),
    LM_EVAL: EvaluationTask(open_tasks),
    CLASSIFICATION: EvaluationTask(open_classification, check_classification),
    REWARD: EvaluationTask(open_rewards, check_rewards),
    GENERATION: EvaluationTask(open_generation, check_answering),
    SPEED: EvaluationTask(open_speed, check_sizes),
}
