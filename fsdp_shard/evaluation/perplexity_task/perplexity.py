"""`task=perplexity`: the token-weighted perplexity of one model, or of two, over windows of a text or over documents.

Perplexity is exp of the mean loss of all scored tokens: each token counts once, whatever its window or document. By
default the windows are those of held-out evaluation in training, so the two figures agree. The run directory records
the losses of finished batches, so an interrupted evaluation resumes and yields the same figures.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from fsdp_shard.checkpoint import Location, describe_model
from fsdp_shard.distributed import run_on_all
from fsdp_shard.errors import ConfigError, LossError
from fsdp_shard.evaluation.batch_log import BatchLog, BatchValues
from fsdp_shard.evaluation.config import DOCUMENTS, EvaluateSettings, Figures
from fsdp_shard.evaluation.earlier_results import DOCUMENTS as DOCUMENTS_FILE
from fsdp_shard.evaluation.evaluation_base import EvaluationBase, LoadModel
from fsdp_shard.evaluation.logged_batches import open_batch_log, run_batches
from fsdp_shard.evaluation.perplexity_task.document_figures import MAX_LOSS, DocumentFigures
from fsdp_shard.evaluation.perplexity_task.scored_text import (
    ScoredText,
    TextSize,
    open_documents,
    open_windows,
)
from fsdp_shard.evaluation.perplexity_task.tokenizer_match import check_same_tokens
from fsdp_shard.evaluation.perplexity_task.window_losses import batch_losses
from fsdp_shard.evaluation.provenance import provenance
from fsdp_shard.evaluation.significance import Difference, Floats
from fsdp_shard.inference import BATCH_MAJOR, Schedule, plan_schedule
from fsdp_shard.models import (
    ContextLength,
    load_context_length,
    load_tokenizer,
    settle_length,
)
from fsdp_shard.utils import format_count, say

LOSSES_FILE, OTHER_LOSSES_FILE = "losses.jsonl", "losses_against.jsonl"


@dataclass(frozen=True)
class Perplexity:
    """The figures of one model.

    Attributes:
        loss: The mean over `num_tokens` scored tokens, in nats.
        num_tokens: Number of scored tokens.
        size: The size of their text; see `scored_text`.
        seconds: Run time of the model.
        schedule: The order of blocks and batches; both orders, if the evaluation was resumed with the other one.
    """

    loss: float
    num_tokens: int
    size: TextSize
    seconds: float
    schedule: str = BATCH_MAJOR

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """The losses of all scored tokens in bits, per UTF-8 byte of their text; None without text."""
        return self._bits_per(self.size.num_bytes)

    @property
    def bits_per_character(self) -> float | None:
        """The same per character (code point)."""
        return self._bits_per(self.size.num_characters)

    def _bits_per(self, count: int) -> float | None:
        return self.loss * self.num_tokens / math.log(2) / count if count else None

    @property
    def row(self) -> dict[str, Any]:
        """All figures, for result.json."""
        return {
            "perplexity": self.perplexity,
            "loss": self.loss,
            "num_tokens": self.num_tokens,
            "num_bytes": self.size.num_bytes,
            "num_characters": self.size.num_characters,
            "bits_per_byte": self.bits_per_byte,
            "bits_per_character": self.bits_per_character,
            "seconds": self.seconds,
            "schedule": self.schedule,
        }


class _ScoredWindows(NamedTuple):
    """The loss of each window [num_windows], the figures, and the evaluated weights."""

    losses: Floats
    figures: Perplexity
    weights: dict[str, Any]


class _OpenedLog(NamedTuple):
    """The recorded losses of a model, and its weights."""

    log: BatchLog
    weights: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PerplexityEvaluation(EvaluationBase):
    """The perplexity on `text` of the models in `settings`.

    `lengths` describes the lengths of windows and contexts.
    """

    text: ScoredText
    lengths: tuple[str, ...]

    def describe(self) -> str:
        """The length of windows and the context, the number of tokens, and the tokens left out or not scored."""
        text = self.text
        tokens, count = format_count(text.windows.num_predictions, "token"), format_count(len(text.windows), "window")
        most = "up to " if text.num_unscored is None else ""  # each row has its own window, as long as the row
        lines = [*self.lengths, *text.notes, f"{tokens} in {count} of {most}{text.windows.sequence_length}"]
        if text.documents is not None:
            used = len(text.documents) - sum(text.num_skipped.values())
            lines[-1] = f"{format_count(used, 'document')}, {lines[-1]}"
            lines += text.skipped_lines
        if text.num_unscored and (text.documents is not None or self.settings.stride is not None):
            lines.append(f"{format_count(text.num_unscored, 'token')} not scored: nothing is before them")
        return "\n".join(lines)

    def measure(self, load: LoadModel) -> Figures:
        """Run each model on all windows whose losses the run directory does not have yet.

        Args:
            load: Loads a model; not called if all its losses are recorded.

        Returns:
            The figures, on rank 0.

        Raises:
            LossError: A loss is not finite, or too large for a perplexity.
            ConfigError: Another process works in the run directory.
        """
        settings, other_source = self.settings, self.settings.other_source
        scored = self._score(load, settings.source, LOSSES_FILE)
        other = None if other_source is None else self._score(load, other_source, OTHER_LOSSES_FILE)
        if scored is None:
            return Figures("", {})
        own = scored.figures
        lines = [
            f"perplexity {own.perplexity:.4f} (loss {own.loss:.4f}) over {format_count(own.num_tokens, 'token')}",
        ]
        row = own.row | self._layout
        documents = None
        if self.text.documents is not None:
            documents = DocumentFigures(self.text, scored.losses, settings.perplexity.num_resamples, self.seed)
            lines += documents.lines(own.bits_per_byte)
            row |= documents.row
        else:
            row |= {"num_documents": None, "confidence_interval": None}
            row["confidence_interval_note"] = "windows are not of single documents; set perplexity.by=documents"
        if other_source is not None and other is not None:
            loss = own.loss - other.figures.loss
            found = Difference(loss, None, None) if documents is None else documents.against(other.losses)
            lines.append(found.sentence(other_source.path, own.loss, other.figures.loss))
            row["against"] = other.figures.row | {"difference": found.row, "weights": other.weights}
        if documents is not None:
            documents.write(self.run_dir / DOCUMENTS_FILE, None if other is None else other.losses)
        return Figures("\n".join(lines), row | {"provenance": self.provenance})

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the figures, for result.json; reads all weights."""
        settings = self.settings
        settled = {
            "by": settings.perplexity.by,
            "sequence_length": settings.data.window_length,
            "stride": settings.stride,
            "num_resamples": settings.perplexity.num_resamples,
        }
        return provenance(self, settled, self.text.digest)

    @property
    def _layout(self) -> dict[str, Any]:
        """The division of the text, for result.json."""
        return {
            "sequence_length": self.text.windows.sequence_length,
            "stride": self.settings.stride,
            "by": self.settings.perplexity.by,
            "num_windows": len(self.text.windows),
            "num_unscored_tokens": self.text.num_unscored,
            "notes": list(self.text.notes),
        }

    def _score(self, load: LoadModel, source: Location, name: str) -> _ScoredWindows | None:
        """Score all windows that the log does not have; a collective. Rank 0 receives the result."""
        batches = self.text.batches(self.settings.batch_size)
        opened = run_on_all(self.ranks, lambda: self._open(source, name, batches) if self.ranks.is_main else None)
        log = None if opened is None else opened.log
        run_batches(self.ranks, log, batches, lambda: load(source), self._losses, "windows")
        if opened is None:
            return None
        done = opened.log.finished
        losses = np.zeros(len(self.text.windows))
        for batch in done:
            losses[batch.items] = batch.values
        seconds = math.fsum(batch.seconds for batch in done)
        schedules = ", ".join(sorted({batch.schedule for batch in done}))
        return _ScoredWindows(losses, self._figures(losses, seconds, schedules), opened.weights)

    def _open(self, source: Location, name: str, batches: list[list[int]]) -> _OpenedLog:
        """Digest the weights of a model, and open the log of its losses."""
        weights = self.provenance["weights"] if source is self.settings.source else describe_model(source)
        names = ("windows", "losses")
        return _OpenedLog(
            open_batch_log(self.run_dir / name, names, batches, source, weights, self.provenance), weights
        )

    def _losses(self, model: PreTrainedModel, batches: Sequence[list[int]]) -> Generator[BatchValues]:
        """Run the batches of this rank."""
        return batch_losses(model, self.text, batches, self._schedule(model, batches), self.run_dir)

    def _schedule(self, model: PreTrainedModel, batches: Sequence[list[int]]) -> Schedule:
        length = self.text.windows.sequence_length
        shapes = [(len(windows), length) for windows in batches]
        schedule = plan_schedule(
            model, self.settings.dispatch, shapes, directory=self.run_dir, num_ranks=self.ranks.local_world_size
        )
        if self.ranks.is_main and (text := schedule.describe()):
            say(text)
        return schedule

    def _figures(self, losses: Floats, seconds: float, schedule: str) -> Perplexity:
        num_tokens = self.text.windows.num_predictions
        loss = math.fsum(losses.tolist()) / num_tokens
        if loss > MAX_LOSS:
            raise LossError(
                f"The loss is {loss:.4g}, too large for a perplexity: the weights are not those of a trained model."
            )
        return Perplexity(loss, num_tokens, self.text.size, seconds, schedule)


def open_perplexity(base: EvaluationBase) -> PerplexityEvaluation:
    """Prepare the scored text; with ranks, a collective.

    Raises:
        ConfigError: The windows are longer than a model has positions, or the models have different tokenizers.
        DataError: The text cannot be read, or contains no token to score.
    """
    settings, tokenizer, ranks = base.settings, base.tokenizer, base.ranks
    trust = settings.dispatch.trust_remote_code
    contexts = [load_context_length(source.config_directory, trust) for source in settings.sources]
    lengths = dict.fromkeys(context_length.describe(settings.data.window_length) for context_length in contexts)
    opened = open_documents if settings.perplexity.by == DOCUMENTS else open_windows
    # Rank 0 tokenizes; other ranks read the tokens from the cache.
    first = run_on_all(ranks, lambda: opened(settings.data, settings.stride, tokenizer) if ranks.is_main else None)
    text = run_on_all(ranks, lambda: first or opened(settings.data, settings.stride, tokenizer))
    if settings.other_source is not None:
        other = load_tokenizer(settings.other_source.tokenizer_directory, trust)
        check_same_tokens(text.windows, tokenizer, other, settings.source, settings.other_source)
    return PerplexityEvaluation(**vars(base), text=text, lengths=tuple(lengths))


def settle_windows(settings: EvaluateSettings) -> None:
    """Set `data.sequence_length`, if it is null, from the contexts of the models.

    Raises:
        ConfigError: The windows are longer than a model has positions, or than their stride allows.
    """
    trust = settings.dispatch.trust_remote_code

    def length_of(context_length: ContextLength) -> float:
        return math.inf if context_length.length is None else context_length.length

    found = [load_context_length(source.config_directory, trust) for source in settings.sources]
    for context_length in sorted(found, key=length_of):
        settle_length(settings.data, context_length)
    length, stride = settings.data.window_length, settings.stride
    if stride is not None and (stride > length or length < 2):
        raise ConfigError(
            f"stride={stride} and data.sequence_length={length} leave tokens that no window has: windows have at least "
            f"2 tokens, and advance by at most their length."
        )
