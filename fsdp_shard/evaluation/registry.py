"""The kinds of evaluation: a new one is a class in its own file, and one line here."""

from collections.abc import Callable
from typing import Protocol

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fsdp_shard.evaluation.config import LM_EVAL, PERPLEXITY, EvaluateSettings, Figures
from fsdp_shard.evaluation.lm_eval import open_tasks
from fsdp_shard.evaluation.perplexity import open_perplexity


class Evaluation(Protocol):
    """An evaluation with all that it needs except the model."""

    def describe(self) -> str:
        """A line about its text or questions."""
        ...

    def measure(self, model: PreTrainedModel) -> Figures:
        """Evaluate `model`, with a progress bar; raises LossError or RunError if there is no result."""
        ...


# `task` -> the function that prepares it, from settings, run directory, the model's config and its tokenizer.
EVALUATIONS: dict[str, Callable[[EvaluateSettings, str, PretrainedConfig, PreTrainedTokenizerBase], Evaluation]] = {
    PERPLEXITY: open_perplexity,
    LM_EVAL: open_tasks,
}
