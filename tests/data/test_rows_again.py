"""Evaluated rows are read twice: to tokenize them, and with the results. A file that has changed is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.data import (
    PAIRS,
    DataConfig,
    Task,
    open_compared_pairs,
    open_labeled_texts,
    prepare_documents,
)
from fsdp_shard.distributed import OnlyRank
from fsdp_shard.errors import DataError
from fsdp_shard.models import SEQUENCE_CLASSIFICATION
from tests.data.conftest import byte_tokenizer
from tests.data.data_files import write

ALONE = OnlyRank(rank=0, world_size=1)


def documents(config: DataConfig) -> Iterator[Any]:
    return prepare_documents(config, byte_tokenizer()).rows()


def labeled_texts(config: DataConfig) -> Iterator[Any]:
    task = Task(SEQUENCE_CLASSIFICATION, num_labels=2, label_numbers={"no": 0, "yes": 1}, padding=0)
    return open_labeled_texts(config, byte_tokenizer(), task, ALONE).rows()


def compared_pairs(config: DataConfig) -> Iterator[Any]:
    task = Task(SEQUENCE_CLASSIFICATION, samples=PAIRS, padding=0)
    return open_compared_pairs(config, byte_tokenizer(), task, ALONE).pairs()


@pytest.mark.parametrize("read", [documents, labeled_texts, compared_pairs])
@pytest.mark.parametrize("num_rows", [3, 2, 4, 0])
def test_rows_are_as_many_as_before(read: Callable[[DataConfig], Iterator[Any]], num_rows: int, tmp_path: Path) -> None:
    is_pair = read is compared_pairs
    row = {"prompt": "a", "chosen": "b", "rejected": "c"} if is_pair else {"text": "abc", "label": "yes"}
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row | {"id": number}) + "\n" for number in range(3)))
    kind = "preference" if is_pair else "text"
    config = DataConfig(path=path, kind=kind, sequence_length=16, cache_dir=str(tmp_path / "cache"))
    found = read(config)
    write(tmp_path / "a.jsonl", "".join(json.dumps(row | {"id": number}) + "\n" for number in range(num_rows)))
    if num_rows == 3:
        assert [one.name for one in found] == [0, 1, 2]
        return
    with pytest.raises(DataError, match=r"a\.jsonl was changed while it was read; start again"):
        list(found)
