"""The stages of an evaluation: what can be checked before a model is loaded, and the evaluation itself."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from fsdp_shard.checkpoint import Location
from fsdp_shard.evaluation.config import EvaluateSettings, check_inputs
from fsdp_shard.evaluation.perplexity_task.perplexity import settle_windows
from fsdp_shard.evaluation.registry import EVALUATIONS
from fsdp_shard.evaluation.speed import check_sizes
from fsdp_shard.inference import KVCacheBudget, OnPlan, check_checkpoint, dispatch_model
from fsdp_shard.models import check_causal, check_packing, load_config, load_tokenizer
from fsdp_shard.utils import say


def check_evaluation(settings: EvaluateSettings) -> None:
    """Check what `settings` name, and set the length of windows if they leave it to the model's context.

    Args:
        settings: The settings.

    Raises:
        InputError: A checkpoint or the data cannot be read, a package is missing, or windows or prompts are too long
            for a model.

    Example:
        >>> import fsdp_shard as fs
        >>> config = fs.EvaluateConfig(checkpoint=model, data=data)
        >>> fs.check_evaluation(config)
        >>> config.data.sequence_length
        128
    """
    check_inputs(settings)
    for source in settings.sources:
        check_checkpoint(source)
    settle_windows(settings)
    check_sizes(settings)


def run_evaluation(settings: EvaluateSettings, run_dir: str, seed: int = 0) -> Mapping[str, Any]:
    """Evaluate the model in `checkpoint`, and then the one in `against`, and print the figures.

    Args:
        settings: The settings, as `check_evaluation` leaves them.
        run_dir: Directory for the losses of finished batches, documents.jsonl, samples and speed.svg.
        seed: Seed of the resamples of documents, and of the prompts whose speed is measured.

    Returns:
        The figures, for result.json.

    Raises:
        FsdpShardError: The models do not suit the evaluation or each other, or a loss is not finite.

    Example:
        >>> import fsdp_shard as fs
        >>> config = fs.EvaluateConfig(checkpoint=model, data=data)
        >>> fs.check_evaluation(config)
        >>> figures = fs.run_evaluation(config, "runs/evaluate")  # doctest: +ELLIPSIS
        data.sequence_length=128 of a context of 128 tokens
        ...
        perplexity ... (loss ...) over 3,999 tokens
    """
    trust = settings.dispatch.trust_remote_code
    for source in settings.sources:
        config = load_config(source.directory, trust)
        check_causal(config)
        if settings.data.packing:
            check_packing(config)
    tokenizer = load_tokenizer(settings.source.tokenizer, trust)
    evaluation = EVALUATIONS[settings.task](settings, run_dir, seed, tokenizer)
    say(evaluation.describe())

    def load(source: Location, kv_cache: KVCacheBudget | None = None, on_plan: OnPlan | None = None) -> PreTrainedModel:
        its_config = load_config(source.directory, trust)
        return dispatch_model(source, its_config, settings.dispatch, kv_cache, log=say, on_plan=on_plan)

    figures = evaluation.measure(load)
    say(figures.text)
    return figures.row
