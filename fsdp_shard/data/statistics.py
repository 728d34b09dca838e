"""What was trained of the data, for metrics and result.json, where there is more to say than a number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.mixture import Mixture
from fsdp_shard.data.samples.protocol import Dataset
from fsdp_shard.data.samples.windows import MASKED, Batch
from fsdp_shard.data.streaming.dataset import StreamDataset
from fsdp_shard.data.streaming.streaming_mixture import StreamMixture


def source_names(dataset: Dataset) -> tuple[str, ...]:
    """Of a mixture, its sources; nothing of other data."""
    return dataset.names if isinstance(dataset, (Mixture, StreamMixture)) else ()


def source_predictions(
    dataset: Dataset, samples: Iterable[npt.NDArray[np.int64]], batches: Sequence[Batch]
) -> list[int]:
    """Labels that count in `batches` of `samples`, of each of `source_names`."""
    if not isinstance(dataset, (Mixture, StreamMixture)):
        return []
    counts = np.zeros(len(dataset.names), np.int64)
    for indices, batch in zip(samples, batches, strict=True):
        of_each = (batch.labels != MASKED).reshape(len(batch.labels), -1).sum(axis=1)
        np.add.at(counts, dataset.owners(indices), of_each)
    return [int(count) for count in counts]


def sources_seen(dataset: Dataset, num_samples: int, tokens: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Samples, tokens and epochs of each source in the first `num_samples`; `tokens` by source are counted already."""
    if not isinstance(dataset, (Mixture, StreamMixture)):
        return {}
    return {
        name: {"samples": seen["samples"], "tokens": tokens.get(name, 0), "epochs": seen["epochs"]}
        for name, seen in dataset.seen(num_samples).items()
    }


def data_figures(dataset: Dataset, num_samples: int, tokens: Mapping[str, int]) -> dict[str, Any]:
    """The parts of each source of a mixture in the first `num_samples` samples, of which `tokens` by source were
    trained; what was read of a stream.
    """
    if isinstance(dataset, (Mixture, StreamMixture)):
        seen = dataset.seen(num_samples)
        return {"sources": {name: {**seen[name], "tokens": tokens.get(name, 0)} for name in seen}}
    if isinstance(dataset, StreamDataset):
        return {"stream": dataset.seen()}
    return {}
