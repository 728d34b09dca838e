"""The kinds of evaluation: a new one is a class in its own file, and one line here."""

from collections.abc import Callable
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from fsdp_shard.evaluation.config import LM_EVAL, PERPLEXITY, SPEED, EvaluateSettings, Figures
from fsdp_shard.evaluation.lm_eval import open_tasks
from fsdp_shard.evaluation.perplexity_task.perplexity import open_perplexity
from fsdp_shard.evaluation.speed import LoadModel, open_speed


class Evaluation(Protocol):
    """An evaluation with all that it needs except the model."""

    def describe(self) -> str:
        """A line about its text, questions or sizes."""
        ...

    def measure(self, load: LoadModel) -> Figures:
        """Evaluate the models, each loaded by `load`, with a progress bar.

        Raises:
            LossError, PlanError, RunError: There is no result.
        """
        ...


# `task` -> the function that prepares it, from settings, run directory, seed and the model's tokenizer.
EVALUATIONS: dict[str, Callable[[EvaluateSettings, str, int, PreTrainedTokenizerBase], Evaluation]] = {
    PERPLEXITY: open_perplexity,
    LM_EVAL: open_tasks,
    SPEED: open_speed,
}
