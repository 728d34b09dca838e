"""Window losses of a model with any dispatch."""

import math
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fsdp_shard.data import IGNORE_INDEX
from fsdp_shard.errors import LossError
from fsdp_shard.evaluation.batch_log import BatchValues
from fsdp_shard.evaluation.perplexity_task.scored_text import ScoredText
from fsdp_shard.inference import Schedule
from fsdp_shard.models import check_vocabulary, model_run_errors


def window_losses(model: PreTrainedModel, text: ScoredText, windows: Sequence[int]) -> list[float]:
    """Run a batch of windows.

    Args:
        model: A causal language model.
        text: The scored text.
        windows: The indices of the windows.

    Returns:
        For each window, the sum over its scored tokens of their losses in nats: computed in float32, added in float64.

    Raises:
        LossError: A loss is not finite.
        ModelError: The model does not have all tokens, or cannot be run.
    """
    batch = text.windows.batch(windows)
    inputs = {name: torch.from_numpy(value) for name, value in batch.inputs.items()}
    check_vocabulary(batch.inputs["input_ids"], model.config)
    with torch.inference_mode():
        with model_run_errors(model):
            logits = model(**inputs, use_cache=False).logits
        losses = [_summed_loss(row, labels) for row, labels in zip(logits, torch.from_numpy(batch.labels), strict=True)]
    if not all(map(math.isfinite, losses)):
        total = sum(losses)
        raise LossError(f"The loss of {text.name_of(windows)} is {total}: weights or activations are not finite.")
    return losses


def batch_losses(
    model: PreTrainedModel, text: ScoredText, batches: Sequence[list[int]], schedule: Schedule, run_dir: Path
) -> Generator[BatchValues]:
    """Run batches of windows in a schedule's order.

    Args:
        model: A causal language model.
        text: The scored text.
        batches: The window indices of each batch.
        schedule: The schedule, made for the model and these batches.
        run_dir: Directory for temporary files.

    Yields:
        The losses of each batch, in order, with the seconds since the previous batch.

    Raises:
        LossError: A loss is not finite.
        ModelError: The model does not have all tokens, or cannot be run.
    """
    start = time.perf_counter()
    passes = [partial(window_losses, model, text, windows) for windows in batches]
    with closing(schedule.run(model, passes, run_dir)) as results:
        for windows, losses in zip(batches, results, strict=True):
            yield BatchValues(windows, losses, time.perf_counter() - start, schedule.name)
            start = time.perf_counter()


def _summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Sum the loss of `labels` [length] under `logits` [length, vocabulary]; masked labels' logits are not upcast."""
    labels = labels.to(logits.device)
    is_scored = labels != IGNORE_INDEX
    losses = torch.nn.functional.cross_entropy(logits[is_scored].float(), labels[is_scored], reduction="none")
    return float(losses.double().sum())
