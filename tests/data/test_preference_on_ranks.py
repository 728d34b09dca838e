"""Pairs and labeled answers on real ranks: the batches of one process, of files and of streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.pipeline import prepare_on_ranks
from fsdp_shard.data.task import Task
from fsdp_shard.distributed import DistributedContext
from tests.data.chat_templates import CHATML
from tests.data.chat_tokenizers import chat_tokenizer
from tests.data.preference_rows import ROWS, rows_file
from tests.support.ranks import on_ranks


def tokenizer() -> Any:
    return chat_tokenizer(CHATML)


def first_batches(context: DistributedContext, config: DataConfig, samples: str) -> list[list[Any]]:
    """Each sample of this rank among the first 24, with its position and all of its arrays."""
    train = prepare_on_ranks(config, tokenizer, context, Task(samples=samples), seed=3).train
    found: list[list[Any]] = []
    for first in range(0, 24, 4):
        train.prepare(first, 4)
        for position in range(first + context.rank, first + 4, context.world_size):
            batch = train.batch([position])
            arrays: list[np.ndarray[Any, Any]] = [*batch.inputs.values(), batch.labels, *batch.extras.values()]
            found.append([position, *(array.tolist() for array in arrays)])
    return found


@pytest.mark.parametrize("samples", ["pairs", "labeled"])
@pytest.mark.parametrize("streaming", [False, True])
def test_ranks_share_the_samples_of_one_process(tmp_path: Path, samples: str, streaming: bool) -> None:
    margins: dict[str, Any] = {"margin_column": "m"} if samples == "pairs" else {}
    chats = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
            "m": number,
        }
        for number, row in enumerate(ROWS)
    ]
    own: dict[str, Any] = {"streaming": True, "shuffle_buffer": 5} if streaming else {"cache_dir": str(tmp_path)}
    path, length = rows_file(tmp_path / "rows.jsonl", chats), 96
    config = DataConfig(path=path, kind="preference", sequence_length=length, workers=2, **own, **margins)
    (alone,) = on_ranks(1, first_batches, config, samples)
    assert len(alone) == 24
    assert np.asarray(alone[0][1]).shape[0] == 2
    together = on_ranks(2, first_batches, config, samples)
    assert sorted([*together[0], *together[1]]) == alone
