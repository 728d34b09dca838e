"""Samples out of a source that is read while training: those of a plain loop, from any place, and no row too many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.kinds import running_text
from fsdp_shard.data.kinds.kind import plain_ids
from fsdp_shard.data.pipeline import open_samples, tokenize_all
from fsdp_shard.data.sources import source as source_module
from fsdp_shard.data.sources.readers import read_rows
from fsdp_shard.data.task import Task
from fsdp_shard.data.validate import check_data
from fsdp_shard.errors import CheckpointError, ConfigError, DataError
from fsdp_shard.evaluation import check_text
from fsdp_shard.models import MASKED_LM
from fsdp_shard.training import data_figures, describe_streams
from fsdp_shard.utils import check
from tests.data.conftest import byte_tokenizer, positions_of_rank
from tests.data.data_files import write
from tests.data.streams import WORDS, folder, json_lines, sample, settle, stream_of
from tests.support.prepared_data import in_order, prepare_data

KINDS: list[dict[str, Any]] = [
    {"sequence_length": 16},
    {"sequence_length": 64, "packing": True},
    {"sequence_length": 64, "kind": "pairs", "source_column": "text", "target_column": "text"},
]


@pytest.mark.long
@pytest.mark.parametrize("more", KINDS)
def test_it_goes_on_from_any_place(tmp_path: Path, tokenizer: Any, more: dict[str, Any]) -> None:
    config = DataConfig(path=folder(tmp_path / "d"), streaming=True, shuffle_buffer=8, **more)
    whole = stream_of(config, tokenizer)
    whole.prepare(5, 4)
    expected, places = [], []
    for index in range(120):
        expected.append(sample(whole, index))
        places.append(json.loads(json.dumps(whole.state_dict(index + 1))))
    assert whole.figures(120)["stream"]["epochs"] >= 2
    assert whole.describe_progress(0, None) == "stream at epoch 0, block 0, row 0"
    last = places[-1]
    told = f"stream at epoch {last['epoch']}, block {last['block']}, row {last['counts']['rows']}"
    assert whole.describe_progress(120, last) == told
    for index in range(0, 119, 3):
        again = stream_of(config, tokenizer)
        again.load_state_dict(places[index])
        assert [sample(again, number) for number in range(index + 1, min(index + 30, 120))] == expected[
            index + 1 : index + 30
        ]
    # On ranks, each of which asks for its own samples only.
    for num_ranks in (2, 4):
        ranks = [stream_of(config, tokenizer) for _ in range(num_ranks)]
        for first in range(0, 120, 8):
            for rank, dataset in enumerate(ranks):
                dataset.prepare(first, 8)
                for position in positions_of_rank(first, 8, rank, num_ranks):
                    assert sample(dataset, position) == expected[position]
    assert [sample(stream_of(config, tokenizer, seed=4), i) for i in range(20)] != expected[:20]


def test_text_in_order_is_that_of_the_whole_text(tmp_path: Path, tokenizer: Any) -> None:
    path = folder(tmp_path / "d")
    windows = in_order(prepare_data(DataConfig(path=path, sequence_length=16), tokenizer, tmp_path / "cache").train)
    stream = stream_of(DataConfig(path=path, sequence_length=16, streaming=True, shuffle_buffer=1), tokenizer)
    assert len(windows) > 20
    for index in range(len(windows) - 1):
        assert sample(stream, index) == sample(windows, index)


def test_rows_are_each_trained_once_an_epoch(tmp_path: Path, tokenizer: Any) -> None:
    given: dict[str, Any] = {
        "path": json_lines(tmp_path / "a.jsonl", [*WORDS, "", "y" * 90]),
        "sequence_length": 64,
        "kind": "pairs",
    }
    given |= {"source_column": "n_", "target_column": "text"}
    rows = [json.loads(line) | {"n_": "1"} for line in Path(given["path"]).read_text().splitlines()]
    write(Path(given["path"]), "".join(json.dumps(row) + "\n" for row in rows))
    plain = in_order(prepare_data(DataConfig(**given), tokenizer, tmp_path / "cache").train)
    stream = stream_of(DataConfig(**given, streaming=True, shuffle_buffer=10), tokenizer)
    once = [sample(stream, index) for index in range(2 * 42)]
    assert len(plain) == 42
    expected = [sample(plain, index) for index in range(42)]
    assert once[:42] != expected
    assert sorted(once[:42]) == sorted(once[42:]) == sorted(expected)
    assert once[:42] != once[42:]
    figures = data_figures(stream, 84, {})["stream"]
    assert (figures["epochs"], figures["rows"] >= 80, figures["truncated"]) == (1, True, 2)
    read = f"{figures['rows']} rows read, {figures['dropped']} left out (nothing to learn in the first 64 tokens)"
    assert describe_streams({"stream": figures}, 64) == [f"stream: {read}, 2 cut to 64 tokens"]
    # No row is further from its place than the buffer.
    places = [expected.index(found) for found in once[:40]]
    assert all(place // 10 == at // 10 for at, place in enumerate(places))
    packed = stream_of(DataConfig(**given, streaming=True, packing=True, shuffle_buffer=50), tokenizer)
    whole = in_order(prepare_data(DataConfig(**given, packing=True), tokenizer, tmp_path / "cache").train)
    num = len(whole)
    assert sum(packed.batch([i]).num_predictions for i in range(num)) == whole.num_predictions
    assert sum(packed.batch([i]).num_predictions for i in range(num, 2 * num)) == whole.num_predictions


def test_hidden_words_follow_the_sample(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    config = DataConfig(path=json_lines(tmp_path / "a.jsonl"), sequence_length=16, streaming=True, shuffle_buffer=6)
    first, second = (stream_of(config, tokenizer, task=Task(MASKED_LM)) for _ in range(2))
    expected = [sample(first, index) for index in range(100)]
    place = None
    for index in range(50):
        assert sample(second, index) == expected[index]
        place = second.state_dict(index + 1)
    third = stream_of(config, tokenizer, task=Task(MASKED_LM))
    third.load_state_dict(place)
    assert [sample(third, index) for index in range(50, 100)] == expected[50:]


def test_only_what_is_needed_is_read_and_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for i in range(40_000):
            file.write(json.dumps({"text": f"{i} " * 40}) + "\n")
        file.write("no JSON at all\n")
    read: list[int] = []

    def counted(*args: Any) -> Iterator[Any]:
        for row, place in read_rows(*args):
            read.append(place[1])
            yield row, place

    tokenizer, texts = byte_tokenizer(), list[str]()

    def noted(some: list[str], tokenizer: Any) -> Any:
        texts.extend(some)
        return plain_ids(some, tokenizer)

    monkeypatch.setattr(running_text, "plain_ids", noted)
    config = DataConfig(path=str(path), sequence_length=64, streaming=True, shuffle_buffer=20)
    check_data(config)
    monkeypatch.setattr(source_module, "read_rows", counted)
    stream = stream_of(config, tokenizer)
    assert read == []
    stream.batch(range(8))
    settle()
    assert read == list(range(1, len(read) + 1))
    assert len(read) <= 2 * 128, "one exchange ahead"
    assert sorted(texts) == sorted({f"{i} " * 40 for i in range(len(read))}), "each once"
    index = 8
    while stream.state_dict(index + 1)["block"] < 3:
        index += 1
        stream.batch([index])
    settle()
    again = stream_of(config, tokenizer)
    again.load_state_dict(stream.state_dict(index + 1))
    read.clear()
    assert sample(again, index) == sample(stream, index)
    settle()
    assert read == list(range(61, 61 + len(read))), "from the byte where the block begins"


def test_a_data_set_of_the_datasets_private(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of Parquet files that the library loads by its name, as it would one of the hub."""
    import pyarrow as arrow
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    parquet.write_table(arrow.Table.from_pylist([{"text": word} for word in WORDS]), tmp_path / "set/train.parquet")
    config = DataConfig(path="hub/set", sequence_length=16, streaming=True, shuffle_buffer=4)
    load = __import__("datasets").load_dataset
    monkeypatch.setattr("datasets.load_dataset", lambda name, *args, **more: load(str(tmp_path / "set"), *args, **more))
    check_data(config)
    whole = stream_of(config, tokenizer)
    expected, places = [], []
    for index in range(80):
        expected.append(sample(whole, index))
        places.append(json.loads(json.dumps(whole.state_dict(index + 1))))
    assert whole.state_dict(80)["epoch"] > 0
    for index in (0, 7, 30, 61):
        again = stream_of(config, tokenizer)
        again.load_state_dict(places[index])
        assert [sample(again, number) for number in range(index, 80)] == expected[index:]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"streaming": False, "shuffle_buffer": 5}, "shuffle_buffer=5 is for training with streaming=true"),
        ({"eval_fraction": 0.1}, "cannot be combined with eval_fraction=0.1, which needs the length"),
        ({"cache_dir": "x"}, "cannot be combined with cache_dir=x"),
        ({"packing": True, "shuffle_buffer": 1}, "packs the rows of shuffle_buffer"),
        ({"shuffle_buffer": 0}, "shuffle_buffer=0 is out of range"),
    ],
)
def test_what_needs_all_of_the_text_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(DataConfig(**{"path": "x", "streaming": True, **given}))
    with pytest.raises(ConfigError, match="for training"):
        check_text(DataConfig(path="x", streaming=True))


def test_what_cannot_be_streamed_is_named(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"streaming": True, "sequence_length": 8, "shuffle_buffer": 2}
    empty = stream_of(DataConfig(path=json_lines(tmp_path / "a.jsonl", ["", " "]), **given), tokenizer)
    with pytest.raises(DataError, match="has nothing to train on"):
        empty.batch([0])
    monkeypatch.setattr("fsdp_shard.data.sources.readers.LARGEST_DOCUMENT", 10)
    config = DataConfig(path=write(tmp_path / "a.txt", "eleven char"), **given)
    with pytest.raises(DataError, match=r"a\.txt has more than 10 B, .*set data\.sample_by=paragraph"):
        check_data(config)
    with pytest.raises(DataError, match="has more than 10 B"):
        stream_of(config, tokenizer)
    stream = stream_of(DataConfig(path=json_lines(tmp_path / "b.jsonl"), **given), tokenizer)
    begin = stream.state_dict(0)
    places: list[Any] = [  # as damaged files may have them
        {},
        {"epoch": 0},
        begin | {"first": -1},
        begin | {"counts": {"left_out": {"a": "b"}}},
        begin | {"counts": {"left_out": 1}},
        begin | {"carry": ["x"]},
        [],
        "x",
    ]
    for place in places:
        with pytest.raises(CheckpointError, match="no valid position in streamed data"):
            stream.load_state_dict(place)
    wrong: list[Any] = [[9, 0, 0], [0, -1, 0], [0, 0], {}, "x"]
    for rows in wrong:
        stream.load_state_dict(begin | {"rows": rows})
        with pytest.raises(CheckpointError, match=r"is not a position in the 1 files of data\.path="):
            stream.batch([0])
        stream.load_state_dict(None)


def test_identity_is_of_all_that_makes_the_samples(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl")

    def identity(**more: Any) -> str:
        given: dict[str, Any] = {"path": path, "streaming": True, "sequence_length": 8} | more
        return stream_of(DataConfig(**given), tokenizer).identity

    one = identity()
    others = [
        identity(sequence_length=9),
        identity(shuffle_buffer=9),
        identity(packing=True),
        identity(text_column="n"),
    ]
    json_lines(tmp_path / "a.jsonl", [*WORDS, "more"])
    assert len({one, *others, identity()}) == 6
    assert identity() == identity()


@pytest.mark.parametrize(
    ("task", "more"),
    [
        (Task("seq2seq", decoder_start=7, padding=9), {"kind": "pairs", "target_length": 6}),
        (Task("sequence_classification", num_labels=3, label_numbers={"high": 2, "low": 0}, padding=9), {}),
    ],
)
def test_tasks_that_are_not_causal(tmp_path: Path, tokenizer: Any, task: Task, more: dict[str, Any]) -> None:
    rows = [
        {"source": word, "target": word[:9], "text": word, "label": "high" if len(word) > 14 else "low"}
        for word in WORDS
    ]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    given = {"path": path, "sequence_length": 12, **more}
    tokenized = tokenize_all(DataConfig(**given, cache_dir=str(tmp_path / "cache")), tokenizer, task.name)
    plain = in_order(open_samples(DataConfig(**given), tokenized, task).train)
    config = DataConfig(**given, streaming=True, shuffle_buffer=1)
    stream = stream_of(config, tokenizer, 0, task)
    for index in range(2 * len(WORDS)):
        assert sample(stream, index) == sample(plain, index % len(WORDS))
    together, apart = stream.batch(range(82, 86)), plain.batch(range(4))
    assert together.labels.tolist() == apart.labels.tolist()
    assert together.input_ids.tolist() == apart.input_ids.tolist()


def test_orders_of_rows_and_of_files_follow_from_the_seed(tmp_path: Path, tokenizer: Any) -> None:
    pairs: dict[str, Any] = {
        "kind": "pairs",
        "source_column": "text",
        "target_column": "text",
        "sequence_length": 64,
        "streaming": True,
    }
    one = DataConfig(path=json_lines(tmp_path / "a.jsonl"), shuffle_buffer=10, **pairs)
    orders = {json.dumps([sample(stream_of(one, tokenizer, seed), i) for i in range(10)]) for seed in range(4)}
    assert len(orders) == 4
    several = DataConfig(path=folder(tmp_path / "d"), shuffle_buffer=10, **pairs)
    stream = stream_of(several, tokenizer)
    epochs = [[sample(stream, epoch * 41 + i) for i in range(41)] for epoch in range(4)]
    first = {json.dumps(sorted(samples[:10])) for samples in epochs}
    assert len(first) > 1, "not always the same file first"
    assert all(sorted(samples) == sorted(epochs[0]) for samples in epochs)
