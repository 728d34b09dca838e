"""The stages of an evaluation: the checks before a model is loaded, and the evaluation itself."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fsdp_shard.checkpoint import Location
from fsdp_shard.distributed import LONGEST_TIMEOUT_SECONDS, DistributedContext
from fsdp_shard.evaluation.config import LM_EVAL, PERPLEXITY, SCORED_ROWS, EvaluateSettings, check_inputs
from fsdp_shard.evaluation.evaluation_base import EvaluationBase
from fsdp_shard.evaluation.registry import EVALUATIONS
from fsdp_shard.inference import KVCacheBudget, OnPlan, check_checkpoint, dispatch_model
from fsdp_shard.models import check_causal, check_left_to_right, check_packing, load_config, load_tokenizer
from fsdp_shard.utils import check, refuse_remote, say


def check_evaluation(settings: EvaluateSettings) -> None:
    """Check `settings` and their files, and set the window length if the settings leave it to the model's context.

    Args:
        settings: The settings.

    Raises:
        InputError: A setting is wrong, a checkpoint or the data cannot be read, a package is missing, or windows or
            prompts are too long for a model.

    Example:
        >>> import fsdp_shard as fs
        >>> config = fs.EvaluateConfig(checkpoint=model, data=data)
        >>> fs.check_evaluation(config)
        >>> config.data.sequence_length
        128
    """
    check(settings)
    check_inputs(settings)
    for source in settings.sources:
        check_checkpoint(source)
    _check_task(settings)


def _check_task(settings: EvaluateSettings) -> None:
    """Check the settings against the models, and set lengths that are left to them."""
    if (check_task := EVALUATIONS[settings.task].check) is not None:
        check_task(settings)


def run_evaluation(
    settings: EvaluateSettings, run_dir: str, seed: int = 0, context: DistributedContext | None = None
) -> Mapping[str, Any]:
    """Evaluate the model in `checkpoint`, then the one in `against`, and print the figures.

    Args:
        settings: The settings; lengths that are left to the model are filled in.
        run_dir: Directory for the losses of finished batches, documents.jsonl, samples and speed.svg.
        seed: Seed of document resamples, and of the prompts for speed measurements.
        context: The ranks, which each hold the whole model and divide the batches; None for a single process.

    Returns:
        The figures for result.json on rank 0; empty on other ranks.

    Raises:
        FsdpShardError: A setting is wrong, the models do not suit it or each other, or a loss is not finite.

    Example:
        >>> import fsdp_shard as fs
        >>> config = fs.EvaluateConfig(checkpoint=model, data=data)
        >>> fs.check_evaluation(config)
        >>> figures = fs.run_evaluation(config, "runs/evaluate")  # doctest: +ELLIPSIS
        data.sequence_length=128 of a context of 128 tokens
        ...
        perplexity ... (loss ...) over ... tokens
    """
    check(settings)
    refuse_remote(run_dir, "run_dir", "give a local directory.")
    trust = settings.dispatch.trust_remote_code
    for source in settings.sources:
        config = load_config(source.config_directory, trust)
        if settings.task not in SCORED_ROWS:  # their models are of other kinds
            check_causal(config)
        if settings.task in (PERPLEXITY, LM_EVAL):
            check_left_to_right(config)
        if settings.data.packing:
            check_packing(config)
    _check_task(settings)
    tokenizer = load_tokenizer(settings.source.tokenizer_directory, trust)
    if context is not None:  # weight digests, and batches of large models, take longer than a training step
        context = context.with_new_group(LONGEST_TIMEOUT_SECONDS)
    is_main = context is None or context.is_main
    log: Callable[[str], object] = say if is_main else lambda text: None
    base = EvaluationBase(settings, Path(run_dir), seed, tokenizer, context)
    evaluation = EVALUATIONS[settings.task].open(base)
    if is_main:  # it reads all rows
        say(evaluation.describe())

    def load(source: Location, kv_cache: KVCacheBudget | None = None, on_plan: OnPlan | None = None) -> PreTrainedModel:
        its_config = load_config(source.config_directory, trust)
        return dispatch_model(
            source, its_config, settings.dispatch, kv_cache, log=log, context=context, on_plan=on_plan
        )

    figures = evaluation.measure(load)
    log(figures.text)
    return figures.row
