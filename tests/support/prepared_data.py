"""The data of a causal language model, prepared in one process."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_shard.data import DataConfig, Dataset, Samples, ShuffledDataset, SourceDataset, open_samples, tokenize_all


def prepare_data(config: DataConfig, tokenizer: Any, cache: Path | None = None) -> Samples:
    """Tokenize the data, into `cache` if it is given, and open them."""
    config = config if cache is None else replace(config, cache_dir=str(cache))
    return open_samples(config, tokenize_all(config, tokenizer), open_tokenizer=lambda: deepcopy(tokenizer))


def in_order(train: Dataset) -> SourceDataset:
    """The samples of training data of one source, as they are before they are shuffled."""
    assert isinstance(train, ShuffledDataset)
    return train.dataset
