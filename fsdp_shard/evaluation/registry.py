"""The kinds of evaluation: a new one is a class in a file of its own, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fsdp_shard.evaluation.config import LM_EVAL, PERPLEXITY, EvaluateSettings, Evaluation
from fsdp_shard.evaluation.lm_eval import open_tasks
from fsdp_shard.evaluation.perplexity import open_perplexity

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# `task` -> what makes all of it but the model: (settings, run_dir, the model's config, its tokenizer).
EVALUATIONS: dict[str, Callable[[EvaluateSettings, str, PretrainedConfig, PreTrainedTokenizerBase], Evaluation]] = {
    PERPLEXITY: open_perplexity,
    LM_EVAL: open_tasks,
}
