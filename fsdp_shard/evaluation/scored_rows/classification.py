"""`task=classification`: how often a sequence classifier predicts a text's class, on rows read as in training."""

import time
from collections import ChainMap, Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard.data import Ints, LabeledTexts, open_labeled_texts
from fsdp_shard.distributed import run_on_all
from fsdp_shard.errors import LossError, ModelError
from fsdp_shard.evaluation.config import CLASSIFICATION, EvaluateSettings, Figures
from fsdp_shard.evaluation.data_rows import first_fields, skipped_lines
from fsdp_shard.evaluation.earlier_results import remove_earlier
from fsdp_shard.evaluation.evaluation_base import EvaluationBase, LoadModel
from fsdp_shard.evaluation.scored_rows.class_figures import ClassFigures
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
from fsdp_shard.utils import format_count, report_progress


class _Prediction(NamedTuple):
    """The model's output for a text: the most likely class, its probability, and the loss of the actual class."""

    number: int
    probability: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Classification(EvaluationBase):
    """The predictions of the model in `settings.checkpoint` for `texts`; `names` are its class names.

    `length` describes the length of texts and the context.
    """

    texts: LabeledTexts
    names: tuple[str, ...]
    length: str

    def describe(self) -> str:
        """Describe the length of texts and the context, the number of texts, and the skipped rows."""
        skipped = [(row.where, row.skip_reason) for row in self.texts.rows() if row.skip_reason]
        texts = f"{format_count(len(self.texts.samples), 'text')}, {len(self.names)} classes"
        if num_truncated := int(self._is_truncated.sum()):
            texts += f", {num_truncated:,} cut to {format_count(self.texts.samples.sequence_length, 'token')}"
        return "\n".join([self.length, *skipped_lines(skipped), texts])

    def measure(self, load: LoadModel) -> Figures:
        """Run all texts, longest first.

        Args:
            load: Loads the model.

        Returns:
            The figures, on rank 0.

        Raises:
            LossError: A logit is not finite.
            ModelError: The model does not have all tokens, or cannot be run.
        """
        ranks = self.ranks
        if ranks.is_main:
            remove_earlier(self.run_dir)
        model, start = load(self.settings.source), time.perf_counter()
        own = run_on_all(ranks, lambda: self._predict(model))
        found: Mapping[int, _Prediction] = ChainMap(*ranks.gather_object(own))
        if not ranks.is_main:
            return Figures("", {})
        seconds = time.perf_counter() - start
        ordered = [found[number] for number in range(len(self.texts.samples))]
        figures = ClassFigures(
            self.names,
            self.texts.labels,
            np.array([one.number for one in ordered]),
            np.array([one.loss for one in ordered]),
        )
        rows, num_skipped = self._rows(ordered)
        written = write_predictions(self, rows)
        intervals = Intervals(self.settings.scoring.num_resamples, self.seed)
        interval = intervals.of(figures.correct)
        row = figures.row
        lines = [
            f"accuracy {row['accuracy']:.4f} (95 % interval: {interval_text(interval)}) of "
            f"{format_count(len(ordered), 'text')}",
            f"macro F1 {row['f1_macro']:.4f}, weighted F1 {row['f1_weighted']:.4f}, "
            f"cross-entropy {row['cross_entropy']:.4f}",
            *figures.lines(),
            *written,
        ]
        row |= {"num_truncated": int(self._is_truncated.sum()), "left_out": num_skipped}
        row |= intervals.row({"accuracy": interval})
        return Figures(
            "\n".join(lines), row | {"seconds": seconds, "provenance": text_provenance(self, self.texts.digest)}
        )

    @property
    def _is_truncated(self) -> Ints:
        return np.asarray(self.texts.lengths > self.texts.samples.sequence_length)

    def _predict(self, model: PreTrainedModel) -> dict[int, _Prediction]:
        """Run this rank's batches: the longest texts first, with similar lengths in a batch."""
        order, size = np.argsort(-self.texts.lengths, kind="stable"), self.settings.batch_size
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        own, found = batches[self.ranks.rank :: self.ranks.world_size], dict[int, _Prediction]()
        with report_progress(sum(map(len, own)), "evaluate", "texts") as count:
            for numbers in own:
                found |= self._predict_batch(model, numbers)
                count(len(numbers))
        return found

    def _predict_batch(self, model: PreTrainedModel, numbers: Ints) -> dict[int, _Prediction]:
        batch = self.texts.samples.batch(numbers)
        check_vocabulary(batch.input_ids, model.config)
        inputs = {name: torch.from_numpy(value) for name, value in batch.inputs.items()}
        with torch.inference_mode(), model_run_errors(model):
            logits = model(**inputs).logits.to("cpu", torch.float64)  # [num_texts, num_classes]
        if not bool(logits.isfinite().all()):
            wrong = {int(numbers[row]) for row in (~logits.isfinite().all(-1)).nonzero()[:, 0]}
            wheres = [row.where for row in self.texts.rows() if row.sample in wrong]
            raise LossError(
                f"The logits of {format_count(len(wheres), 'text')} are not finite, the first at {wheres[0]}: weights "
                f"or activations are not finite. Verify the checkpoint, or load it with dispatch.dtype=float32."
            )
        likely = logits.log_softmax(-1)
        best = likely.max(-1)
        losses = -likely.gather(-1, torch.from_numpy(batch.labels)[:, None])[:, 0]
        columns = (best.indices.tolist(), best.values.exp().tolist(), losses.tolist())
        return {
            int(number): _Prediction(*values)
            for number, values in zip(numbers, zip(*columns, strict=True), strict=True)
        }

    def _rows(self, predictions: list[_Prediction]) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Return the rows of predictions.jsonl, and the number of skipped rows by reason."""
        labels, is_truncated, rows = self.texts.labels, self._is_truncated, list[dict[str, Any]]()
        num_skipped = Counter[str]()
        for index, text in enumerate(self.texts.rows()):
            row = first_fields(index, text.where, text.name) | {"text": text.text}
            if text.sample is None:
                row["left_out"] = text.skip_reason
                num_skipped[text.skip_reason] += 1
            else:
                one = predictions[text.sample]
                row |= {
                    "label": self.names[labels[text.sample]],
                    "prediction": self.names[one.number],
                    "probability": one.probability,
                    "loss": one.loss,
                    "truncated": bool(is_truncated[text.sample]),
                }
            rows.append(row)
        return rows, dict(num_skipped)


def open_classification(base: EvaluationBase) -> Classification:
    """Tokenize the texts.

    Raises:
        DataError: The data cannot be read, has no text with a label, or has a class unknown to the model.
    """
    settings = base.settings
    config = load_config(settings.source.config_directory, settings.dispatch.trust_remote_code)
    task, length = classifier_task(settings)
    texts = open_labeled_texts(settings.data, base.tokenizer, task, base.ranks)
    named: dict[Any, str] = dict(config.id2label or {})
    names = tuple(str(named.get(number, number)) for number in range(task.num_labels))
    return Classification(**vars(base), texts=texts, names=names, length=length)


def check_classification(settings: EvaluateSettings) -> None:
    """Check that the model is a classifier, and determine `data.sequence_length`.

    Raises:
        ModelError: The model does not classify texts with one class each.
        ConfigError: `data.sequence_length` exceeds the model's context.
    """
    trust = settings.dispatch.trust_remote_code
    config: PretrainedConfig = load_config(settings.source.config_directory, trust)
    try:
        check_model_task(config, SEQUENCE_CLASSIFICATION)
    except ModelError as error:
        name = next(iter(config.architectures or ()), config.model_type)
        raise ModelError(
            f"task={CLASSIFICATION} needs a sequence classifier, and {config_file(config)} is of a {name}; give a "
            f"checkpoint that was trained with model.task={SEQUENCE_CLASSIFICATION}."
        ) from error
    check_classifier(config)
    settle_length(settings.data, context_length_of(config, trust))
