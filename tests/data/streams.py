"""Rows in files, streams that read them, and their samples."""

from __future__ import annotations

import json
import threading
from copy import deepcopy
from pathlib import Path
from threading import Lock
from typing import Any

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.streaming.stream import StreamDataset, open_stream
from fsdp_shard.data.task import SpecialTokens, Task
from fsdp_shard.models import MASKED_LM
from fsdp_shard.utils import check
from tests.data.data_files import write

WORDS = [f"row {i} " + "x" * (7 * i % 23) for i in range(41)]


def stream_of(config: DataConfig, tokenizer: Any, seed: int = 3, task: Task | None = None) -> StreamDataset:
    """The stream of a config, with a tokenizer of its own."""
    check(config)
    special = SpecialTokens.of(tokenizer) if task and task.name == MASKED_LM else None
    return open_stream(SampleFactory(config, task or Task(), special, seed), deepcopy(tokenizer), Lock())


def sample(dataset: Any, index: int) -> Any:
    """A sample as lists: its tokens, its labels and what else the model is given."""
    batch = dataset.batch([index])
    return [array.tolist() for array in (batch.input_ids, batch.labels, *list(batch.inputs.values())[1:])]


def json_lines(path: Path, words: list[str] = WORDS) -> str:
    """Write a row for each of `words`; the path as a setting has it."""
    return write(path, "".join(json.dumps({"text": word, "n": 1}) + "\n" for word in words))


def folder(path: Path) -> str:
    """Write the rows of `WORDS` as four files; the path of their directory."""
    for part in range(4):
        json_lines(path / f"{part}.jsonl", WORDS[part * 10 : part * 10 + 10 + (part == 3)])
    return str(path)


def settle() -> None:
    """Wait for what is tokenized ahead."""
    for thread in threading.enumerate():
        if thread.name == "tokenize ahead":
            thread.join()
