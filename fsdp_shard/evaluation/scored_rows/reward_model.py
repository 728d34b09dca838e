"""`task=reward`: how often a reward model gives the better answer of a pair the higher reward, on the data's pairs.

The pairs are those that training with objective=reward would read. Rewards of finished batches are stored in the run
directory, so that a killed evaluation can continue to the same figures.
"""

import math
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from fsdp_shard.data import ComparedPairs, Ints, open_compared_pairs
from fsdp_shard.distributed import run_on_all
from fsdp_shard.errors import LossError, ModelError
from fsdp_shard.evaluation.batch_log import BatchLog, BatchValues
from fsdp_shard.evaluation.config import REWARD, EvaluateSettings, Figures
from fsdp_shard.evaluation.data_rows import first_fields, skipped_lines
from fsdp_shard.evaluation.evaluation_base import EvaluationBase, LoadModel
from fsdp_shard.evaluation.logged_batches import open_batch_log, run_batches
from fsdp_shard.evaluation.scored_rows.reward_figures import RewardFigures
from fsdp_shard.evaluation.scored_rows.row_scores import (
    Intervals,
    classifier_task,
    interval_text,
    text_provenance,
    write_predictions,
)
from fsdp_shard.models import (
    SEQUENCE_CLASSIFICATION,
    check_model_task,
    check_vocabulary,
    config_file,
    context_length_of,
    load_config,
    model_run_errors,
    settle_length,
)
from fsdp_shard.training import check_classifier
from fsdp_shard.utils import format_count

_REWARDS_FILE = "rewards.jsonl"


@dataclass(frozen=True, kw_only=True)
class RewardEvaluation(EvaluationBase):
    """The rewards of the model in `settings.checkpoint` for both answers of `pairs`.

    `length` describes the length of texts and the context.
    """

    pairs: ComparedPairs
    length: str

    def describe(self) -> str:
        """Describe the length of texts and the context, the number of pairs, and the skipped rows."""
        found, lines = [pair for pair in self.pairs.pairs() if pair.sample is None], [self.length]
        for what in dict.fromkeys(pair.what for pair in found):
            lines += skipped_lines([(pair.where, pair.skip_reason) for pair in found if pair.what == what], what)
        count = format_count(len(self.pairs.samples), "pair")
        if num_truncated := int(self._is_truncated.sum()):
            count += f", {num_truncated:,} cut to {format_count(self.pairs.samples.sequence_length, 'token')}"
        return "\n".join([*lines, count])

    def measure(self, load: LoadModel) -> Figures:
        """Run all pairs without stored rewards, longest first.

        Args:
            load: Loads the model; not called if all rewards are stored.

        Returns:
            The figures, on rank 0.

        Raises:
            LossError: A reward is not finite.
            ModelError: The model does not have all tokens, or cannot be run.
            ConfigError: Another process uses the run directory.
        """
        batches = self._batches()
        log = run_on_all(self.ranks, lambda: self._open(batches) if self.ranks.is_main else None)
        source = self.settings.source
        run_batches(self.ranks, log, batches, lambda: load(source), self._rewards, "pairs", items_per_unit=2)
        return Figures("", {}) if log is None else self._figures(log.finished)

    @property
    def _is_truncated(self) -> Ints:
        return np.asarray((self.pairs.lengths > self.pairs.samples.sequence_length).any(axis=1))

    def _batches(self) -> list[list[int]]:
        """Batch the texts by similar length; pair i has texts 2i and 2i + 1."""
        order, size = np.argsort(-self.pairs.lengths.max(axis=1), kind="stable"), self.settings.batch_size
        texts = np.stack([2 * order, 2 * order + 1], axis=1)
        return [texts[first : first + size].ravel().tolist() for first in range(0, len(order), size)]

    def _open(self, batches: Sequence[list[int]]) -> BatchLog:
        """Open the file with rewards of finished batches."""
        known, names = self._provenance, ("texts", "rewards")
        return open_batch_log(
            self.run_dir / _REWARDS_FILE, names, batches, self.settings.source, known["weights"], known
        )

    def _rewards(self, model: PreTrainedModel, batches: Sequence[list[int]]) -> Generator[BatchValues]:
        """Run this rank's batches."""
        for texts in batches:
            start = time.perf_counter()
            rewards = self._run(model, np.asarray(texts[::2]) // 2)
            yield BatchValues(texts, rewards, time.perf_counter() - start)

    def _run(self, model: PreTrainedModel, numbers: Ints) -> list[float]:
        """Return the rewards of both answers of the given pairs [2 * num_pairs]."""
        batch = self.pairs.samples.batch(numbers)
        check_vocabulary(batch.input_ids, model.config)
        inputs = {name: torch.from_numpy(value) for name, value in batch.inputs.items()}
        with torch.inference_mode(), model_run_errors(model):
            logits = model(**inputs).logits.to("cpu", torch.float64)  # [2 * num_pairs, 1]
        is_finite = logits.isfinite().view(-1, 2).all(-1)
        if not bool(is_finite.all()):
            wrong = {int(number) for number in numbers[~is_finite.numpy()]}
            wheres = [pair.where for pair in self.pairs.pairs() if pair.sample in wrong]
            raise LossError(
                f"The rewards of {format_count(len(wheres), 'pair')} are not finite, the first at {wheres[0]}: weights "
                f"or activations are not finite. Verify the checkpoint, or load it with dispatch.dtype=float32."
            )
        rewards: list[float] = logits[:, 0].tolist()
        return rewards

    def _figures(self, batches: Sequence[BatchValues]) -> Figures:
        """Write the rows, and return the figures with their intervals."""
        rewards = np.zeros(2 * len(self.pairs.samples))
        for batch in batches:
            rewards[batch.items] = batch.values
        stated = self.pairs.margins
        figures = RewardFigures(rewards.reshape(-1, 2), None if stated is None else stated.astype(np.float64))
        rows, num_skipped = self._rows(figures)
        written = write_predictions(self, rows)
        intervals = Intervals(self.settings.scoring.num_resamples, self.seed)
        of = {"accuracy": figures.correct, "mean_margin": figures.margins, "preference_loss": figures.losses}
        ends = {name: intervals.of(values) for name, values in of.items()}
        row: dict[str, Any] = dict(figures.row)
        ties = f", {format_count(row['num_ties'], 'tie')} counted as wrong" if row["num_ties"] else ""
        lines = [
            f"accuracy {row['accuracy']:.4f} (95 % interval: {interval_text(ends['accuracy'])}) of "
            f"{format_count(row['num_pairs'], 'pair')}{ties}",
            f"mean margin {row['mean_margin']:.4f} (95 % interval: {interval_text(ends['mean_margin'])}): mean reward "
            f"{row['mean_reward_chosen']:.4f} of chosen answers, {row['mean_reward_rejected']:.4f} of rejected ones",
            f"loss {row['preference_loss']:.4f} (95 % interval: {interval_text(ends['preference_loss'])})",
            *written,
        ]
        row |= {"num_truncated": int(self._is_truncated.sum()), "left_out": num_skipped} | intervals.row(ends)
        row |= {"seconds": math.fsum(batch.seconds for batch in batches), "provenance": self._provenance}
        return Figures("\n".join(lines), row)

    def _rows(self, figures: RewardFigures) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Return the rows of predictions.jsonl, and the number of skipped rows by reason."""
        rewards, margins, losses = figures.rewards.tolist(), figures.margins.tolist(), figures.losses.tolist()
        is_truncated, rows, num_skipped = self._is_truncated, list[dict[str, Any]](), Counter[str]()
        for index, pair in enumerate(self.pairs.pairs()):
            row = first_fields(index, pair.where, pair.name) | pair.texts
            if (number := pair.sample) is None:
                row["left_out"] = f"{pair.what} {pair.skip_reason}".rstrip()
                num_skipped[row["left_out"]] += 1
            else:
                chosen, rejected = rewards[number]
                row |= {"reward_chosen": chosen, "reward_rejected": rejected, "margin": margins[number]}
                row |= {"loss": losses[number], "truncated": bool(is_truncated[number])}
            rows.append(row)
        return rows, dict(num_skipped)

    @cached_property
    def _provenance(self) -> dict[str, Any]:
        """The inputs of the figures, for result.json; reads all weights."""
        return text_provenance(self, self.pairs.digest)


def open_rewards(base: EvaluationBase) -> RewardEvaluation:
    """Tokenize the pairs.

    Raises:
        DataError: The data cannot be read, or has no pair.
    """
    task, length = classifier_task(base.settings)
    pairs = open_compared_pairs(base.settings.data, base.tokenizer, task, base.ranks)
    return RewardEvaluation(**vars(base), pairs=pairs, length=length)


def check_rewards(settings: EvaluateSettings) -> None:
    """Check that the model is a reward model, and determine `data.sequence_length`.

    Raises:
        ModelError: The model is not a sequence classifier with one output.
        ConfigError: `data.sequence_length` exceeds the model's context.
    """
    trust = settings.dispatch.trust_remote_code
    config = load_config(settings.source.config_directory, trust)
    needs = f"task={REWARD} needs a reward model, which is a sequence classifier with one output"
    give = "give a checkpoint that was trained with objective=reward"
    try:
        check_model_task(config, SEQUENCE_CLASSIFICATION)
    except ModelError as error:
        name = next(iter(config.architectures or ()), config.model_type)
        raise ModelError(f"{needs}, and {config_file(config)} is of a {name}; {give}.") from error
    if (num_labels := len(config.id2label or {})) != 1:
        raise ModelError(f"{needs}, and {config_file(config)} has num_labels={num_labels}; {give}.")
    check_classifier(config, is_reward_model=True)
    settle_length(settings.data, context_length_of(config, trust))
