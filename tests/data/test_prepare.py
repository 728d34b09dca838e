"""From settings to windows, in one process and over ranks."""

from __future__ import annotations

import gzip
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.pipeline import prepare_on_ranks, tokenize_all
from fsdp_shard.data.samples.protocol import MapDataset
from fsdp_shard.data.samples.windows import WindowDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import DataError, ModelError
from tests.data.conftest import byte_tokenizer
from tests.data.data_files import write
from tests.support.prepared_data import in_order, prepare_data
from tests.support.ranks import on_ranks

TEXT = "".join(chr(ord("a") + i % 26) for i in range(101))


def _tokens(windows: MapDataset | None) -> list[int]:
    assert isinstance(windows, WindowDataset)
    return np.asarray(windows.tokens).tolist()


def test_all_of_it_is_trained_by_default(tmp_path: Path, tokenizer: Any) -> None:
    config = DataConfig(path=write(tmp_path / "a.txt", TEXT), sequence_length=8)
    windows = prepare_data(config, tokenizer, tmp_path / "cache")
    assert windows.held_out is None
    assert _tokens(in_order(windows.train)) == [*TEXT.encode()]
    assert windows.notes == ("train: 1 document, 101 tokens, 13 windows of 8, the last padded by 4",)


@pytest.mark.parametrize(("fraction", "num_held_out"), [(0.01, 1), (0.25, 3), (0.5, 6)])
def test_the_last_windows_are_held_out(tmp_path: Path, tokenizer: Any, fraction: float, num_held_out: int) -> None:
    config = DataConfig(path=write(tmp_path / "a.txt", TEXT), sequence_length=8, eval_fraction=fraction)
    windows = prepare_data(config, tokenizer, tmp_path / "cache")
    assert windows.held_out is not None
    assert (len(in_order(windows.train)), len(windows.held_out)) == (13 - num_held_out, num_held_out)
    assert in_order(windows.train).num_predictions + windows.held_out.num_predictions == 100
    assert _tokens(windows.held_out) == [*TEXT.encode()][(13 - num_held_out) * 8 :]
    assert "the last" in windows.notes[1]


def test_what_is_not_read_of_a_directory_is_told(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("a/a.txt", "a/b.TXT", "a/c.tar.gz", "a/deep/d.pdf", "a/LICENSE", "a/.git/e.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, TEXT)
    config = DataConfig(path=f"{tmp_path}/a", sequence_length=8, eval_path=f"{tmp_path}/a/a.txt")
    notes = prepare_data(config, tokenizer, tmp_path / "cache").notes
    assert notes[0] == f"{tmp_path}/a: 3 of its files are skipped because of their extensions (.gz, .pdf, no extension)"
    assert notes[1].startswith("train: 2 documents")
    assert len(notes) == 3


def test_what_is_not_read_of_a_streamed_directory_is_told(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("a/a.txt", "a/d.pdf"):
        write(tmp_path / name, TEXT)
    notes = tokenize_all(DataConfig(path=f"{tmp_path}/a", streaming=True), tokenizer).notes
    assert notes == (f"{tmp_path}/a: 1 of its files are skipped because of their extensions (.pdf)",)


def test_several_formats_in_a_directory_are_told(tmp_path: Path, tokenizer: Any) -> None:
    row = '{"text": "words of a row"}\n'
    for name, content in (("a.jsonl", row), ("b.jsonl.gz", gzip.compress(row.encode())), ("README.md", TEXT)):
        write(tmp_path / "a" / name, content)
    notes = prepare_data(DataConfig(path=f"{tmp_path}/a", sequence_length=8), tokenizer, tmp_path / "cache").notes
    assert notes[0].startswith(f"{tmp_path}/a: files of several formats are read (2 .jsonl, 1 .md)")
    for pattern in ("a/*.jsonl*", "a/*.md"):
        config = DataConfig(path=f"{tmp_path}/{pattern}", sequence_length=8)
        assert len(prepare_data(config, tokenizer, tmp_path / "cache").notes) == 1


def test_one_window_cannot_be_divided(tmp_path: Path, tokenizer: Any) -> None:
    config = DataConfig(path=write(tmp_path / "a.txt", TEXT), sequence_length=100, eval_fraction=0.5)
    with pytest.raises(DataError, match=r"a single window.* shorter windows, or data\.eval_path"):
        prepare_data(config, tokenizer, tmp_path / "cache")
    row = write(tmp_path / "a.jsonl", '{"instruction": "p", "output": "c"}')
    config = DataConfig(path=row, kind="instruction", sequence_length=100, eval_fraction=0.5)
    with pytest.raises(DataError, match=r"a single row is left to train on\. Give more rows, or data\.eval_path"):
        prepare_data(config, tokenizer, tmp_path / "cache")


def test_held_out_text_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    config = DataConfig(
        path=write(tmp_path / "a.txt", TEXT),
        eval_path=write(tmp_path / "b.jsonl", '{"text": "held"}\n{"text": ""}\n{"text": "out"}\n'),
        sequence_length=8,
        cache_dir=str(tmp_path / "own cache"),
    )
    windows = prepare_data(config, tokenizer)
    assert windows.held_out is not None
    assert _tokens(windows.held_out) == [*b"held", 256, *b"out"]
    assert windows.notes[1] == "held out: 2 documents (1 empty left out), 8 tokens, 1 window of 8, the last padded by 1"
    assert len(list((tmp_path / "own cache").iterdir())) == 2


def _prepare(context: DistributedContext, config: DataConfig, problem: str | None) -> Any:
    def open_tokenizer() -> Any:
        assert context.is_main, "only rank 0 needs a tokenizer"
        if problem is not None:
            raise ModelError(problem)
        return byte_tokenizer()

    try:
        windows = prepare_on_ranks(config, open_tokenizer, context)
    except (DataError, ModelError) as error:
        return type(error).__name__, str(error)
    return _tokens(in_order(windows.train)), windows.notes


def test_ranks_see_the_same_windows(tmp_path: Path) -> None:
    config = DataConfig(path=write(tmp_path / "a.txt", TEXT), sequence_length=8, cache_dir=str(tmp_path / "cache"))
    first, second = on_ranks(2, _prepare, config, None)
    assert first == second
    assert first[0] == [*TEXT.encode()]


def test_an_error_of_rank_0_is_raised_on_all(tmp_path: Path) -> None:
    config = DataConfig(path=str(tmp_path / "gone.txt"), cache_dir=str(tmp_path / "cache"))
    first, second = on_ranks(2, _prepare, config, None)
    assert first == second
    assert first[0] == "DataError"
    path = write(tmp_path / "a.txt", TEXT)
    assert on_ranks(2, _prepare, DataConfig(path=path), "no tokenizer") == [("ModelError", "no tokenizer")] * 2


def _prepare_slowly(context: DistributedContext, config: DataConfig) -> Any:
    """With a rank 0 that takes longer than the others wait for anything else."""

    def open_tokenizer() -> Any:
        time.sleep(6)
        return byte_tokenizer()

    hurried = replace(context, group=context.with_new_group(4.0).group)
    return _tokens(in_order(prepare_on_ranks(config, open_tokenizer, hurried).train))


@pytest.mark.long
def test_ranks_wait_for_long_texts(tmp_path: Path) -> None:
    config = DataConfig(path=write(tmp_path / "a.txt", TEXT), sequence_length=8, cache_dir=str(tmp_path / "cache"))
    assert on_ranks(2, _prepare_slowly, config) == [[*TEXT.encode()]] * 2
