"""Figures of the training data for result.json and metrics.jsonl."""

import math
from collections.abc import Mapping
from typing import Any

from fsdp_shard.data import Dataset


def data_figures(dataset: Dataset, num_samples: int, tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the figures of the data for result.json.

    Args:
        dataset: The training data.
        num_samples: Number of samples that were trained.
        tokens: Number of tokens that were trained, by source.

    Returns:
        `sequence_length`, and `sources` of a mixture or `stream` of a stream.
    """
    figures = {"sequence_length": dataset.sequence_length, **dataset.figures(num_samples)}
    for name, source in figures.get("sources", {}).items():
        source["tokens"] = tokens.get(name, 0)
    return figures


def source_figures(dataset: Dataset, num_samples: int, tokens: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return samples, tokens and epochs of each source for metrics; the arguments are those of `data_figures`."""
    sources = data_figures(dataset, num_samples, tokens).get("sources", {})
    return {name: {key: source[key] for key in ("samples", "tokens", "epochs")} for name, source in sources.items()}


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures for JSON, which has neither NaN nor infinity: they become null."""
    return {name: None if value is None or not math.isfinite(value) else value for name, value in figures.items()}
