"""Token-weighted perplexity over fixed windows: exp of the mean cross-entropy of every token but the first.

The windows are those of training's held-out evaluation, so the two figures agree. A token is predicted from those
before it in its own window. Knows nothing of ranks; the model may be dispatched in any way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.data import DataConfig
from fsdp_shard.errors import ConfigError, LossError
from fsdp_shard.evaluation.config import EvaluateSettings, Figures

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from fsdp_shard.data import HeldOut

_LARGEST_LOSS = 700.0  # exp of more is no double


@dataclass(frozen=True)
class Perplexity:
    """`loss` is the mean over `num_tokens` predicted tokens, in nats."""

    loss: float
    num_tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@dataclass(frozen=True)
class PerplexityEvaluation:
    """Of `windows`, `batch_size` of them at a time."""

    windows: HeldOut
    batch_size: int

    def describe(self) -> str:
        windows = self.windows
        return f"{windows.num_predictions} tokens in {len(windows)} windows of {windows.sequence_length}"

    def measure(self, model: PreTrainedModel) -> Figures:
        from tqdm import tqdm

        with tqdm(total=len(self.windows), unit="window", desc="evaluate", disable=None) as bar:
            found = perplexity(model, self.windows, self.batch_size, bar.update)
        text = f"perplexity {found.perplexity:.4f} (loss {found.loss:.4f}) over {found.num_tokens} tokens"
        return Figures(text, {"perplexity": found.perplexity, **asdict(found)})


def open_perplexity(
    settings: EvaluateSettings, _: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PerplexityEvaluation:
    """The perplexity of `settings.data`; raises ConfigError or DataError when there is none."""
    check_context(config, settings.data.sequence_length)
    return PerplexityEvaluation(evaluation_windows(settings.data, tokenizer), settings.batch_size)


def check_context(config: PretrainedConfig, sequence_length: int) -> None:
    """Raise ConfigError when the windows are longer than the context of the model."""
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    if room is not None and sequence_length > room:
        raise ConfigError(
            f"data.sequence_length={sequence_length} exceeds the model's context of {room} tokens; give at most {room}."
        )


def evaluation_windows(data: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None = None) -> HeldOut:
    """What training would hold out, cut into windows; all of data.path when it would hold out nothing.

    That is data.eval_path when it is given, or the last part of data.path by data.eval_fraction. Raises DataError.
    """
    from fsdp_shard.data import prepare_held_out

    return prepare_held_out(data, tokenizer, cache_dir)


def perplexity(
    model: PreTrainedModel,
    windows: HeldOut,
    batch_size: int,
    progress: Callable[[int], object] | None = None,
) -> Perplexity:
    """Run every window through `model` once; `progress(num_windows)` is called after each batch.

    Raises LossError when a loss is not finite.
    """
    import torch

    start, total, num_tokens = time.perf_counter(), 0.0, 0
    with torch.inference_mode():
        for first in range(0, len(windows), batch_size):
            indices = range(first, min(first + batch_size, len(windows)))
            batch = windows.batch(indices)
            logits = model(**{k: torch.from_numpy(v) for k, v in batch.inputs.items()}, use_cache=False).logits
            loss = _summed_loss(logits, torch.from_numpy(batch.labels))
            if not math.isfinite(loss):
                raise LossError(
                    f"The loss of windows {first} to {indices[-1]} is {loss}: weights or activations are not finite."
                )
            total, num_tokens = total + loss, num_tokens + batch.num_predictions
            if progress is not None:
                progress(len(indices))
    if (loss := total / num_tokens) > _LARGEST_LOSS:
        raise LossError(
            f"The loss is {loss:.4g}, which is beyond any perplexity: the weights are not a trained model's."
        )
    return Perplexity(loss, num_tokens, time.perf_counter() - start)


def _summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Sum over `labels` [rows, length] under `logits` [rows, length, vocabulary], upcast a row at a time."""
    from torch.nn.functional import cross_entropy

    from fsdp_shard.data import MASKED

    return sum(
        float(cross_entropy(row.float(), of_row.to(row.device), ignore_index=MASKED, reduction="sum"))
        for row, of_row in zip(logits, labels, strict=True)
    )
