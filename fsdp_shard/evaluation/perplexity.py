"""Token-weighted perplexity over fixed windows: exp of the mean cross-entropy of every token but the first.

The windows are those of training's held-out evaluation, so the two figures agree. A token is predicted from those
before it in its own window. The model may be dispatched in any way.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fsdp_shard.data import MASKED, MapDataset, prepare_held_out
from fsdp_shard.errors import LossError
from fsdp_shard.evaluation.config import PERPLEXITY, EvaluateSettings, Figures
from fsdp_shard.models import check_vocabulary, context_of, load_context, running, settle_length
from fsdp_shard.utils import format_count, report_progress

_MAX_LOSS = 700.0  # exp of more overflows a double


@dataclass(frozen=True)
class Perplexity:
    """`loss` is the mean over `num_tokens` predicted tokens, in nats."""

    loss: float
    num_tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)


@dataclass(frozen=True)
class PerplexityEvaluation:
    """The perplexity of a model on `windows`, `batch_size` of them at a time; `length` says how long they are."""

    windows: MapDataset
    batch_size: int
    length: str

    def describe(self) -> str:
        """The length of windows and the model's context, and the number of tokens and windows."""
        windows = self.windows
        tokens, count = format_count(windows.num_predictions, "token"), format_count(len(windows), "window")
        return f"{self.length}\n{tokens} in {count} of {windows.sequence_length}"

    def measure(self, model: PreTrainedModel) -> Figures:
        """Run all windows; raises LossError if a loss is not finite."""
        with report_progress(len(self.windows), "evaluate", "windows") as count:
            found = perplexity(model, self.windows, self.batch_size, count)
        text = (
            f"perplexity {found.perplexity:.4f} (loss {found.loss:.4f}) over {format_count(found.num_tokens, 'token')}"
        )
        length = {"sequence_length": self.windows.sequence_length}
        return Figures(text, {"perplexity": found.perplexity, **asdict(found), **length})


def open_perplexity(
    settings: EvaluateSettings, run_dir: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PerplexityEvaluation:
    """Prepare the windows: what training would hold out of `settings.data`, or all of data.path if that is nothing.

    Args:
        settings: The data and the batch size.
        run_dir: Not used.
        config: The model's config.
        tokenizer: The model's tokenizer.

    Raises:
        ConfigError: The windows are longer than the model has positions.
        DataError: The text cannot be read.
    """
    length = context_of(config, settings.dispatch.trust_remote_code).describe(settings.data.window_length)
    return PerplexityEvaluation(prepare_held_out(settings.data, tokenizer), settings.batch_size, length)


def settle_windows(settings: EvaluateSettings) -> None:
    """Set `data.sequence_length`, if windows are evaluated and it is null, by the model's context.

    Raises:
        ConfigError: The windows are longer than the model has positions.
    """
    if settings.task == PERPLEXITY:
        context = load_context(settings.source.directory, settings.dispatch.trust_remote_code)
        settle_length(settings.data, context)


def perplexity(
    model: PreTrainedModel, windows: MapDataset, batch_size: int, progress: Callable[[int], object] = lambda count: None
) -> Perplexity:
    """Run every window through `model` once.

    Args:
        model: A causal language model.
        windows: The tokens and labels.
        batch_size: Windows per batch.
        progress: Called with the number of windows after each batch.

    Returns:
        The mean loss over all predicted tokens.

    Raises:
        LossError: A loss is not finite, or too large for a perplexity.
    """
    start, total, num_tokens = time.perf_counter(), 0.0, 0
    with torch.inference_mode():
        for first in range(0, len(windows), batch_size):
            indices = range(first, min(first + batch_size, len(windows)))
            batch = windows.batch(indices)
            inputs = {name: torch.from_numpy(value) for name, value in batch.inputs.items()}
            check_vocabulary(batch.inputs["input_ids"], model.config)
            with running(model):
                logits = model(**inputs, use_cache=False).logits
            loss = _summed_loss(logits, torch.from_numpy(batch.labels))
            if not math.isfinite(loss):
                raise LossError(
                    f"The loss of windows {first} to {indices[-1]} is {loss}: weights or activations are not finite."
                )
            total, num_tokens = total + loss, num_tokens + batch.num_predictions
            progress(len(indices))
    if (loss := total / num_tokens) > _MAX_LOSS:
        raise LossError(
            f"The loss is {loss:.4g}, too large for a perplexity: the weights are not those of a trained model."
        )
    return Perplexity(loss, num_tokens, time.perf_counter() - start)


def _summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Sum over `labels` [rows, length] under `logits` [rows, length, vocabulary], upcast a row at a time."""
    return sum(
        float(
            torch.nn.functional.cross_entropy(row.float(), of_row.to(row.device), ignore_index=MASKED, reduction="sum")
        )
        for row, of_row in zip(logits, labels, strict=True)
    )
