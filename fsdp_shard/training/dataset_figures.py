"""Statistics of the training data for result.json and metrics.jsonl."""

import math
from collections.abc import Mapping
from typing import Any

from fsdp_shard.data import Dataset
from fsdp_shard.utils import format_count


def data_figures(dataset: Dataset, num_samples: int, tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the statistics of the data for result.json.

    Args:
        dataset: The training data.
        num_samples: Number of samples trained.
        tokens: Number of tokens trained, by source.

    Returns:
        `sequence_length`, and for a mixture `sources`, for a stream `stream`.
    """
    figures = {"sequence_length": dataset.sequence_length, **dataset.figures(num_samples)}
    for name, source in figures.get("sources", {}).items():
        source["tokens"] = tokens.get(name, 0)
    return figures


def source_figures(dataset: Dataset, num_samples: int, tokens: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return samples, tokens and epochs of each source for metrics; the arguments are those of `data_figures`."""
    sources = data_figures(dataset, num_samples, tokens).get("sources", {})
    return {name: {key: source[key] for key in ("samples", "tokens", "epochs")} for name, source in sources.items()}


def describe_streams(figures: Mapping[str, Any], length: int) -> list[str]:
    """Describe how much of each stream was skipped and cut, from a result of `data_figures`.

    Args:
        figures: The result of `data_figures`.
        length: Tokens per window.
    """
    sources = figures.get("sources", {"": figures})
    return [
        f"stream{f' {name}' if name else ''}: {_stream_counts(source['stream'], length)}"
        for name, source in sources.items()
        if "stream" in source
    ]


def _stream_counts(counts: Mapping[str, Any], length: int) -> str:
    parts = [f"{format_count(counts['rows'], 'row')} read"]
    if dropped := counts["dropped"]:
        reasons = [f"{what}: {number:,}" for what, number in counts.get("left_out", {}).items()]
        why = ", ".join(reasons) or f"nothing to learn in the first {length} tokens"
        parts.append(f"{dropped:,} left out ({why})")
    if truncated := counts["truncated"]:
        parts.append(f"{truncated:,} cut to {length} tokens")
    return ", ".join(parts)


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with null in place of NaN and infinity, which JSON cannot represent."""
    return {name: None if value is None or not math.isfinite(value) else value for name, value in figures.items()}
