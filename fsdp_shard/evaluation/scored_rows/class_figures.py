"""Figures of a classifier, from each text's class and the model's probabilities of all classes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fsdp_shard.data import Ints
from fsdp_shard.evaluation.significance import Floats
from fsdp_shard.utils import format_table

_MOST_IN_RESULT = 200  # maximum number of classes for a confusion matrix in result.json
_MOST_PRINTED = 20  # maximum number of classes with a line in the output


@dataclass(frozen=True)
class ClassFigures:
    """The figures.

    Attributes:
        names: The names of the model's classes [num_classes].
        labels: The class of each text in the data [num_texts].
        predictions: The model's most likely class for each text [num_texts].
        losses: The cross-entropy of each text in nats [num_texts].
    """

    names: Sequence[str]
    labels: Ints
    predictions: Ints
    losses: Floats

    @cached_property
    def confusion(self) -> Ints:
        """Number of texts by actual and predicted class [num_classes, num_classes]."""
        counts = np.zeros((len(self.names), len(self.names)), np.int64)
        np.add.at(counts, (self.labels, self.predictions), 1)
        return counts

    @property
    def correct(self) -> Floats:
        """1 for each correctly predicted text, else 0 [num_texts]."""
        return np.asarray(self.labels == self.predictions, np.float64)

    @cached_property
    def _by_class(self) -> tuple[Floats, Floats, Floats, Ints]:
        """Precision, recall, F1 and support of each class [num_classes each]; 0 for an empty denominator."""
        hits, support, predicted = np.diag(self.confusion), self.confusion.sum(1), self.confusion.sum(0)
        parts = [(hits, predicted), (hits, support), (2 * hits, support + predicted)]
        precision, recall, f1 = (part / np.maximum(of, 1) for part, of in parts)
        return precision, recall, f1, support

    @property
    def row(self) -> dict[str, Any]:
        """All figures except the interval, for result.json."""
        precision, recall, f1, support = self._by_class
        occurs = (support + self.confusion.sum(0)) > 0  # in the data or among predictions, as in scikit-learn
        classes = [
            {"name": name, "precision": float(p), "recall": float(r), "f1": float(f), "support": int(count)}
            for name, p, r, f, count in zip(self.names, precision, recall, f1, support, strict=True)
        ]
        row: dict[str, Any] = {
            "accuracy": float(self.correct.mean()),
            "f1_macro": float(f1[occurs].mean()),
            "f1_weighted": float((f1 * support).sum() / support.sum()),
            "cross_entropy": math.fsum(self.losses.tolist()) / len(self.losses),
            "num_texts": len(self.labels),
            "classes": classes,
            "confusion_matrix": self.confusion.tolist() if len(self.names) <= _MOST_IN_RESULT else None,
        }
        if row["confusion_matrix"] is None:
            row["confusion_matrix_note"] = f"left out: there are more than {_MOST_IN_RESULT} classes"
        return row

    def lines(self) -> list[str]:
        """The metrics of each class and the confusion matrix, as text tables."""
        precision, recall, f1, support = self._by_class
        shown = np.flatnonzero(support)[np.argsort(-support[support > 0], kind="stable")][:_MOST_PRINTED]
        header = ["class", "precision", "recall", "F1", "texts", "most often taken for"]
        rows = [
            [
                self.names[c],
                f"{precision[c]:.4f}",
                f"{recall[c]:.4f}",
                f"{f1[c]:.4f}",
                f"{support[c]:,}",
                self._taken(c),
            ]
            for c in shown
        ]
        more = int(np.count_nonzero(support)) - len(shown)
        return [*format_table([header, *rows]), *([f"and {more:,} other classes, in result.json"] if more else [])]

    def _taken(self, number: int) -> str:
        """The wrong class most often predicted for texts of a class, and how often."""
        wrong = self.confusion[number].copy()
        wrong[number] = 0
        return f"{self.names[int(wrong.argmax())]} ({wrong.max():,})" if wrong.any() else "-"
