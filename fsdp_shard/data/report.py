"""What was trained of the data, for result.json, where there is more to say of it than the number of tokens."""

from __future__ import annotations

from typing import Any

from fsdp_shard.data.dataset import Dataset
from fsdp_shard.data.mixture import Mixture
from fsdp_shard.data.stream import StreamDataset
from fsdp_shard.data.stream_mixture import StreamMixture


def data_figures(dataset: Dataset, num_samples: int) -> dict[str, Any]:
    """The parts of each source of a mixture in the first `num_samples` samples; what was read of a stream."""
    if isinstance(dataset, (Mixture, StreamMixture)):
        return {"sources": dataset.seen(num_samples)}
    if isinstance(dataset, StreamDataset):
        return {"stream": dataset.seen()}
    return {}
