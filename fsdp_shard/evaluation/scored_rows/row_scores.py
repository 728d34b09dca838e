"""Shared code of the tasks that score rows: intervals, and the predictions file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_shard.data import Task
from fsdp_shard.evaluation.config import EvaluateSettings
from fsdp_shard.evaluation.earlier_results import PREDICTIONS
from fsdp_shard.evaluation.evaluation_base import EvaluationBase
from fsdp_shard.evaluation.provenance import provenance
from fsdp_shard.evaluation.significance import LEVEL, Floats, bootstrap_interval
from fsdp_shard.models import SEQUENCE_CLASSIFICATION, ModelConfig, load_context_length
from fsdp_shard.training import data_task
from fsdp_shard.utils import write_atomically


@dataclass(frozen=True)
class Intervals:
    """Computes 95 % percentile bootstrap intervals over rows, all with the same draws."""

    num_resamples: int
    seed: int

    def of(self, values: Floats, sizes: Floats | None = None) -> tuple[float, float] | None:
        """Return the interval of sum(values) / sum(sizes), by default the mean; None for fewer than two rows.

        Args:
            values: One value per row [num_rows].
            sizes: The denominators [num_rows].
        """
        return bootstrap_interval(
            values, np.ones(len(values)) if sizes is None else sizes, self.num_resamples, self.seed
        )

    def row(self, found: Mapping[str, tuple[float, float] | None]) -> dict[str, Any]:
        """The intervals of several figures by name, for result.json."""
        if None in found.values():
            return {"confidence_interval": None, "confidence_interval_note": "it needs at least two rows"}
        method = {"level": LEVEL, "method": "percentile bootstrap over rows", "num_resamples": self.num_resamples}
        return {"confidence_interval": method | {name: list(ends) for name, ends in found.items() if ends}}


def interval_text(ends: tuple[float, float] | None) -> str:
    """The interval, as text."""
    return "none for a single row" if ends is None else f"{ends[0]:.4f} to {ends[1]:.4f}"


def write_predictions(evaluation: EvaluationBase, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write RUN_DIR/predictions.jsonl atomically, and return a line about it, if the file is left for the user."""
    file = evaluation.run_dir / PREDICTIONS
    evaluation.run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return [f"written to {file}"] if evaluation.settings.leaves_files else []


def text_provenance(evaluation: EvaluationBase, data_digest: str) -> dict[str, Any]:
    """Return the inputs of a classifier's figures, for result.json; reads all weights."""
    settings = evaluation.settings
    settled = {"sequence_length": settings.data.window_length, "num_resamples": settings.scoring.num_resamples}
    return provenance(evaluation, settled, data_digest)


def classifier_task(settings: EvaluateSettings) -> tuple[Task, str]:
    """Return the task of the classifier in `settings.checkpoint`, and a note on text lengths and its context."""
    trust, source = settings.dispatch.trust_remote_code, settings.source
    task = data_task(ModelConfig(source.path, task=SEQUENCE_CLASSIFICATION, trust_remote_code=trust), source)
    context_length = load_context_length(source.config_directory, trust)
    return task, context_length.describe(settings.data.window_length)
