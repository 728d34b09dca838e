"""Several sources in one order: shares kept at every place, the same on any ranks, each source as it is on its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_shard.config import FinetuneConfig, compose_jobs, write_config
from fsdp_shard.data.config import DataConfig, mixture_of, sources_of
from fsdp_shard.data.pipeline import Samples, open_samples, tokenize_all
from fsdp_shard.data.samples.batch import IGNORE_INDEX, NO_WINDOW
from fsdp_shard.data.samples.mixture import Concatenation, Mixture, seed_of
from fsdp_shard.data.samples.mixture_schedule import (
    LONGEST_ROUND,
    counts_per_round,
)
from fsdp_shard.data.samples.protocol import ShuffledDataset
from fsdp_shard.data.samples.windows import WindowDataset
from fsdp_shard.data.task import Task, check_task
from fsdp_shard.data.validate import check_data
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.evaluation import check_text
from fsdp_shard.models import MASKED_LM
from fsdp_shard.training import micro_batches
from fsdp_shard.utils import check
from tests.data.conftest import byte_tokenizer
from tests.data.data_files import write
from tests.support.prepared_data import in_order, prepare_data

SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(shares=SHARES, lengths=st.lists(st.integers(1, 60), min_size=6, max_size=6))
def test_each_source_has_its_part_of_every_beginning(shares: list[int], lengths: list[int]) -> None:
    num, total = 2 * sum(shares) + 3, sum(shares)
    parts = {name: of_length(length) for name, length, _ in zip("abcdef", lengths, shares, strict=False)}
    mixed = Mixture(parts, dict(zip(parts, shares, strict=True)))
    sequence, before = (found(np.arange(num)).tolist() for found in (mixed.sources_of, mixed.counts_before))
    counts, until = np.zeros(len(shares), int), mixed.samples_until_repeat()
    for place, source in enumerate(sequence):
        assert before[place] == counts.tolist()
        counts[source] += 1
        off = [abs(count - share * (place + 1) / total) for count, share in zip(counts, shares, strict=True)]
        assert max(off) < 1
        if counts[source] == lengths[source]:
            assert until["abcdef"[source]] == place + 1


def of_length(num_samples: int, seed: int = 0) -> ShuffledDataset:
    return ShuffledDataset(WindowDataset(np.arange(8 * num_samples + 1), 8, "x"), seed)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"a": 2.0, "b": 1.0}, {"a": 2, "b": 1}),
        ({"a": 0.3, "b": 0.6}, {"a": 1, "b": 2}),
        ({"a": 7.0}, {"a": 1}),
        ({"a": 0.125, "b": 0.5, "c": 0.375}, {"a": 1, "b": 4, "c": 3}),
        ({"a": 1e9, "b": 1e-9}, {"a": LONGEST_ROUND, "b": 1}),
    ],
)
def test_weights_are_counts_per_round(weights: dict[str, float], shares: dict[str, int]) -> None:
    assert counts_per_round(weights) == shares


def test_weights_without_a_short_round_are_rounded() -> None:
    weights = {"a": 0.123456789, "b": 0.7654321, "c": 3.1415926}
    shares = counts_per_round(weights)
    assert sum(shares.values()) == LONGEST_ROUND
    for name, weight in weights.items():
        assert abs(shares[name] - weight / sum(weights.values()) * LONGEST_ROUND) < 1


def lines(path: Path, words: list[str]) -> str:
    return write(path, "".join(json.dumps({"text": word}) + "\n" for word in words))


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """14 and 5 windows, and chats beside them."""
    chats = [{"source": f"{i}", "target": f"{i}" * (i + 1)} for i in range(4)]
    sources = {
        "web": {"path": lines(tmp_path / "web.jsonl", ["".join(f"w{i:06d}," for i in range(14))])},
        "books": {"path": lines(tmp_path / "books.jsonl", ["".join(f"b{i:06d}," for i in range(5))]), "weight": 2},
        "asked": {
            "path": write(tmp_path / "asked.jsonl", "".join(json.dumps(row) + "\n" for row in chats)),
            "kind": "pairs",
        },
    }
    return DataConfig(mixture=sources, sequence_length=8, cache_dir=str(tmp_path / "cache"))


def test_its_order_is_that_of_a_plain_loop_over_the_sources(config: DataConfig, tokenizer: Any) -> None:
    samples = prepare_data(config, tokenizer)
    mixed = samples.train
    assert isinstance(mixed, Mixture)
    assert mixed.source_names == ("asked", "books", "web")
    assert mixed.counts == (1, 2, 1)
    # What each source gives on its own, one sample at a time, epoch after epoch.
    plain = {name: in_order(prepare_data(source, tokenizer).train) for name, source in sources_of(config).items()}
    epochs: dict[str, list[int]] = {name: [] for name in plain}
    drawn, at = [], dict.fromkeys(plain, 0)
    batch = mixed.batch(range(60))
    for row, number in enumerate(mixed.sources_of(np.arange(60))):
        name = mixed.source_names[number]
        inner = int(np.flatnonzero(_matches(plain[name], batch, row))[0])
        epochs[name].append(inner)
        at[name] += 1
        drawn.append(name)
    assert drawn.count("books") == 30
    for name, seen in epochs.items():
        size = len(plain[name])
        for start in range(0, len(seen), size):
            assert len(set(seen[start : start + size])) == min(size, len(seen) - start), "each once an epoch"
    assert epochs["books"][:5] != epochs["books"][5:10], "another order each time"
    assert mixed.figures(60)["sources"]["books"] == {"share": 0.5, "samples": 30, "epochs": 6.0}
    assert mixed.describe_progress(60, None) == (
        "asked 15 samples (epoch 3.75), books 30 samples (epoch 6), web 15 samples (epoch 1.07)"
    )
    assert samples.notes[0].startswith("train, web (1 of 4 samples): 1 document, 112 tokens, 14 windows")
    assert samples.notes[3] == ("samples of the mixture until a source repeats: asked 14, books 9, web 56")


def _matches(dataset: Any, batch: Any, row: int) -> list[bool]:
    """Which samples of `dataset` are row `row` of `batch`."""
    found = []
    for index in range(len(dataset)):
        one = dataset.batch([index])
        width = one.input_ids.shape[1]
        same = np.array_equal(one.input_ids[0], batch.input_ids[row, :width])
        same &= np.array_equal(one.labels[0], batch.labels[row, :width])
        found.append(same and bool((batch.labels[row, width:] == -100).all()))
    return found


def test_any_cut_of_the_order_and_any_ranks_give_the_same_samples(config: DataConfig, tokenizer: Any) -> None:
    tokenized = tokenize_all(config, tokenizer)
    mixed, other = (open_samples(config, tokenized, seed=seed).train for seed in (1, 2))
    whole = mixed.batch(range(96)).labels.tolist()
    assert [row for first in range(0, 96, 8) for row in mixed.batch(range(first, first + 8)).labels.tolist()] == whole
    assert other.batch(range(96)).labels.tolist() != whole
    for num_ranks in (1, 2, 4):
        parts = [micro_batches(np.arange(8, 16), 2, rank, num_ranks) for rank in range(num_ranks)]
        together = np.stack(parts, axis=1).reshape(-1)
        assert mixed.batch(together).labels.tolist() == whole[8:16]
    # The order of the settings does not matter, the weights do.
    turned = DataConfig(**{**vars(config), "mixture": dict(reversed(config.mixture.items()))})
    again = open_samples(turned, tokenize_all(turned, tokenizer), seed=1).train
    assert (again.identity, again.batch(range(96)).labels.tolist()) == (mixed.identity, whole)
    config.mixture["web"]["weight"] = 5
    assert prepare_data(config, tokenizer).train.identity != mixed.identity


def test_a_part_of_each_source_is_held_out(config: DataConfig, tokenizer: Any) -> None:
    config.eval_fraction = 0.4
    samples = prepare_data(config, tokenizer)
    assert isinstance(samples.train, Mixture)
    assert isinstance(samples.held_out, Concatenation)
    assert [part.num_samples for part in samples.train.parts] == [2, 3, 8]
    assert samples.train.num_samples == 13
    assert [len(part) for part in samples.held_out.parts.values()] == [2, 2, 6]
    batches = [samples.held_out.batch([index]) for index in range(10)]
    assert sum(batch.num_predictions for batch in batches) == samples.held_out.num_predictions
    assert [len(part) for part in samples.held_out.head(5).parts.values()] == [1, 1, 3]
    assert len(samples.held_out.head(1)) == 1
    assert [len(part) for part in samples.held_out.head(3).parts.values()] == [1, 1, 1], "none without any"
    nothing = samples.held_out.batch([9, NO_WINDOW])
    assert nothing.num_predictions == batches[9].num_predictions
    with pytest.raises(IndexError, match="sample 10 of 10"):
        samples.held_out.batch([10])


def test_what_is_hidden_differs_between_epochs(tmp_path: Path) -> None:
    sources = {name: {"path": write(tmp_path / f"{name}.txt", name * 60)} for name in ("ab", "cd")}
    config = DataConfig(mixture=sources, sequence_length=16, cache_dir=str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    samples: Samples = open_samples(config, tokenize_all(config, tokenizer, task=MASKED_LM), Task(MASKED_LM), seed=1)
    num = 8 * (samples.train.num_samples or 0)
    batch = samples.train.batch(range(num))
    assert batch.input_ids.shape == (num, 16)
    whole = np.where(batch.labels == IGNORE_INDEX, batch.input_ids, batch.labels)
    assert len({row.tobytes() for row in whole}) <= num // 8
    assert len({row.tobytes() for row in batch.input_ids}) > num // 2


def test_it_is_given_on_a_command_line_and_written_down(tmp_path: Path, config: DataConfig) -> None:
    path = config.mixture["web"]["path"]
    given = f"data.mixture={{books:{{path:'{path}',weight:2}},web:{{path:'{path}',kind:chat}}}}"
    arguments = ["model.path=org/name", given, f"run_dir={tmp_path / 'run'}"]
    (job,) = compose_jobs(FinetuneConfig, arguments, "fsdp-shard finetune")
    assert job.config.data.mixture == {"books": {"path": path, "weight": 2}, "web": {"path": path, "kind": "chat"}}
    parsed = mixture_of(job.config.data)
    assert {name: (source.path, source.weight, source.kind) for name, source in parsed.items()} == {
        "books": (path, 2, "text"),
        "web": (path, 1, "chat"),
    }
    write_config(job.config)
    rerun = ["--config-dir", str(tmp_path / "run"), "--config-name", "config"]
    (again,) = compose_jobs(FinetuneConfig, rerun, "fsdp-shard finetune")
    assert again.config == job.config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("data.mixture={a:{path:x,weigth:2}}", r"data\.mixture\.a\.weigth"),
        ("data.mixture={a:{weight:2}}", r"data\.mixture\.a\.path"),
        ("data.mixture={a:{path:x,weight:-1}}", r"data\.mixture\.a\.weight=-1 is out of range"),
        ("data.mixture={a:{path:x,weight:heavy}}", r"data\.mixture\.a\.weight='heavy' is str, expected a float"),
        ("data.mixture={a:{path:x,kind:chats}}", r"data\.mixture\.a\.kind=chats is not one of"),
        ("data.mixture={a:{path:x,messages_column:m}}", "messages_column is for kind=chat, not text"),
        ("data.mixture={}", r"data\.path is not set"),
        ("data.mixture=[a.jsonl]", r"data\.mixture=\['a.jsonl'\] is not a mapping"),
        ("data.mixture={a:x}", r"data\.mixture\.a=x is not a mapping"),
    ],
)
def test_what_is_wrong_with_it_is_named(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compose_jobs(FinetuneConfig, ["model.path=org/name", given], "fsdp-shard finetune")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"path": "x.txt"}, "both say what to train on"),
        ({"split": "test"}, "split=test is for path"),
        ({"subset": "raw"}, "subset=raw is for path"),
    ],
)
def test_settings_at_odds_with_it(config: DataConfig, more: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(DataConfig(**{**vars(config), "path": "", **more}))


def test_errors_name_the_source(config: DataConfig, tmp_path: Path) -> None:
    check(DataConfig(**{**vars(config), "path": ""}))
    check_data(config)
    with pytest.raises(ConfigError, match=r"data\.mixture\.web\.kind=text does not fit model\.task=seq2seq"):
        check_task("seq2seq", config)
    with pytest.raises(ConfigError, match="evaluate each of them separately"):
        check_text(config)
    config.mixture["web"]["split"] = "test"
    with pytest.raises(ConfigError, match=r"data\.mixture\.web\.split=test is for datasets on the hub"):
        check_data(config)
    config.mixture["web"] = {"path": str(tmp_path / "gone.jsonl")}
    with pytest.raises(DataError, match=r"data\.mixture\.web\.path=.*gone\.jsonl: there is no such file"):
        check_data(config)


def test_a_source_alone_is_as_without_a_mixture() -> None:
    windows = WindowDataset(np.arange(100), 8, "x")
    shuffled = ShuffledDataset(windows, 3)
    alone = Mixture({"x": shuffled}, {"x": 1})
    assert alone.num_samples == len(windows)
    assert np.array_equal(alone.batch(range(40)).labels, shuffled.batch(range(40)).labels)
    assert alone.describe([3, 14, 3]) == f"x {sorted([shuffled.index_of(3), shuffled.index_of(14)])}"
    assert np.array_equal(Concatenation({"x": windows}).batch([3, 12]).labels, windows.batch([3, 12]).labels)


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    mixed = Mixture({name: of_length(50, seed_of(0, name)) for name in "ab"}, {"a": 1, "b": 1})
    order, sources = mixed.batch(range(100)).labels, mixed.sources_of(np.arange(100))
    assert order[sources == 0].tolist() != order[sources == 1].tolist()
    assert sorted(order[sources == 0].tolist()) == sorted(order[sources == 1].tolist())
    assert mixed.state_dict(8) is None
