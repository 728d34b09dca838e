"""Rows of preferences: in a file, and opened as samples."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.kinds.kind import PAIRS
from fsdp_shard.data.pipeline import Samples, open_samples, tokenize_all
from fsdp_shard.data.samples.protocol import SourceDataset
from fsdp_shard.data.task import Task, check_task
from fsdp_shard.data.validate import check_data
from fsdp_shard.utils import check
from tests.data.conftest import byte_tokenizer
from tests.data.data_files import write

ROWS = [{"prompt": f"{name}?", "chosen": f"yes {name}", "rejected": f"n{name}"} for name in "abcdefghijk"]


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as JSON lines; the path as a setting has it."""
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def opened(tmp_path: Path, rows: Any, samples: str = PAIRS, task: str = "causal_lm", **settings: Any) -> Samples:
    """The samples of rows, or of what `settings` name, with byte tokens."""
    path = rows_file(tmp_path / "rows.jsonl", rows) if isinstance(rows, list) else ""
    cache = {} if settings.get("streaming") else {"cache_dir": str(tmp_path / "cache")}
    config = DataConfig(**{"kind": "preference", "sequence_length": 32, "path": path, **cache, **settings})
    check(config)
    check_task(task, config, samples)
    check_data(config, task, samples)
    what, tokenizer = Task(task, samples=samples, padding=7), byte_tokenizer()
    return open_samples(config, tokenize_all(config, tokenizer, task=task), what, 3, byte_tokenizer)


def source(tmp_path: Path, rows: Any, samples: str = PAIRS, task: str = "causal_lm", **settings: Any) -> SourceDataset:
    """The only source of the samples that are trained on."""
    (found,) = opened(tmp_path, rows, samples, task, **settings).train.sources
    return found


def random_rows(count: int = 60) -> list[dict[str, Any]]:
    """Pairs with prompts and answers of random lengths, the same each time."""
    draw = random.Random(3)

    def text(fewest: int, most: int) -> str:
        return "".join(draw.choice("ab ") for _ in range(draw.randint(fewest, most)))

    return [
        {"prompt": text(0, 25), "chosen": f"{text(0, 12)}c{number}", "rejected": f"{text(0, 12)}r{number}"}
        for number in range(count)
    ]
