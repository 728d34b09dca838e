"""Several streams in one order: each as it is on its own, by its weight, from any place and on any ranks."""

from __future__ import annotations

import dataclasses
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_shard.data.config import DataConfig, sources_of
from fsdp_shard.data.pipeline import TokenizedData, open_samples
from fsdp_shard.data.samples.mixture import Mixture, seed_of
from fsdp_shard.data.validate import check_data
from fsdp_shard.errors import CheckpointError, ConfigError, DataError
from fsdp_shard.training import data_figures
from fsdp_shard.utils import check
from tests.data.conftest import positions_of_rank
from tests.data.data_files import write
from tests.data.streams import WORDS, folder, json_lines, sample, stream_of
from tests.support.prepared_data import prepare_data

NAMES = ("asked", "books", "web")


def config_of(directory: Path, **more: Any) -> DataConfig:
    pairs = [{"source": f"{i}", "target": word} for i, word in enumerate(WORDS[:13])]
    sources = {
        "web": {"path": folder(directory / "web")},
        "books": {"path": json_lines(directory / "books.jsonl", WORDS[::-1]), "weight": 2},
        "asked": {
            "path": write(directory / "asked.jsonl", "".join(json.dumps(row) + "\n" for row in pairs)),
            "kind": "pairs",
        },
    }
    given: dict[str, Any] = {
        "path": "",
        "mixture": sources,
        "sequence_length": 48,
        "streaming": True,
        "shuffle_buffer": 6,
    }
    config = DataConfig(**(given | more))
    check(config)
    check_data(config)
    return config


def mixture_of(config: DataConfig, tokenizer: Any, seed: int = 3) -> Mixture:
    found = open_samples(config, TokenizedData({}, {}), seed=seed, open_tokenizer=lambda: deepcopy(tokenizer)).train
    assert isinstance(found, Mixture)
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_it_is_its_sources_by_their_weights_from_any_place(tmp_path: Path, tokenizer: Any, packing: bool) -> None:
    num = 96
    config = config_of(tmp_path, packing=packing)
    whole = mixture_of(config, tokenizer)
    assert (whole.source_names, whole.counts) == (NAMES, (1, 2, 1))
    expected, places = [], []
    for index in range(num):
        expected.append(sample(whole, index))
        places.append(json.loads(json.dumps(whole.state_dict(index + 1))))
    # A plain loop: each source streamed alone, one sample after the other, whenever it has its turn.
    sources = sources_of(config)
    alone = {name: stream_of(sources[name], tokenizer, seed=seed_of(3, name)) for name in NAMES}
    at = dict.fromkeys(NAMES, 0)
    for index, number in enumerate(whole.sources_of(np.arange(num))):
        name = NAMES[number]
        assert sample(alone[name], at[name]) == expected[index]
        at[name] += 1
    figures = data_figures(whole, num, {"web": 7})["sources"]
    assert {name: (found["samples"], found["share"]) for name, found in figures.items()} == {
        "asked": (24, 0.25),
        "books": (48, 0.5),
        "web": (24, 0.25),
    }
    assert figures["asked"]["epochs"] >= 1
    assert [figures[name]["tokens"] for name in NAMES] == [0, 0, 7]
    assert all(found["stream"]["rows"] > 0 for found in figures.values())
    told = whole.describe_progress(num, places[-1])
    assert told.startswith("asked 24 samples (stream at epoch ")
    assert "), books 48 samples (stream at epoch " in told
    # From any place, read back from JSON.
    for index in range(0, num - 1, 7):
        again = mixture_of(config, tokenizer)
        again.load_state_dict(places[index])
        rest = range(index + 1, min(index + 20, num))
        assert [sample(again, number) for number in rest] == [expected[number] for number in rest]
    # On ranks that ask for their own samples only: on 4, each of them for those of one source.
    for num_ranks in (2, 4):
        ranks = [mixture_of(config, tokenizer) for _ in range(num_ranks)]
        for first in range(0, num, 4):
            for rank, dataset in enumerate(ranks):
                dataset.prepare(first, 4)
                for position in positions_of_rank(first, 4, rank, num_ranks):
                    assert sample(dataset, position) == expected[position]
                assert dataset.state_dict(first + 4) == places[first + 3], "the same on each rank"
        assert all(data_figures(dataset, num, {}) == data_figures(whole, num, {}) for dataset in ranks)
    other = mixture_of(config, tokenizer, seed=4)
    assert [sample(other, index) for index in range(20)] != expected[:20]


def test_a_whole_batch_is_padded_to_its_widest(tmp_path: Path, tokenizer: Any) -> None:
    mixed, again = (mixture_of(config_of(tmp_path), tokenizer) for _ in range(2))
    together = mixed.batch(range(8))
    apart = [again.batch([index]) for index in range(8)]
    assert together.num_predictions == sum(batch.num_predictions for batch in apart)
    assert together.input_ids.shape[1] == max(batch.input_ids.shape[1] for batch in apart)


def test_what_tells_one_from_another(tmp_path: Path, tokenizer: Any) -> None:
    config = config_of(tmp_path)
    turned = dataclasses.replace(config, mixture=dict(reversed(config.mixture.items())))
    one = mixture_of(config, tokenizer)
    same = mixture_of(turned, tokenizer)
    assert same.identity == one.identity, "the order of the settings does not matter"
    assert [sample(same, index) for index in range(12)] == [sample(one, index) for index in range(12)]
    config.mixture["web"]["weight"] = 5
    heavier = mixture_of(config, tokenizer).identity
    config.mixture["web"]["weight"] = 1
    json_lines(tmp_path / "books.jsonl")
    assert len({one.identity, heavier, mixture_of(config, tokenizer).identity}) == 3


def test_it_is_opened_like_any_other_data(tmp_path: Path, tokenizer: Any) -> None:
    held_out = write(tmp_path / "held.txt", "held out " * 20)
    samples = prepare_data(config_of(tmp_path, eval_path=held_out, sample_by="document"), tokenizer, tmp_path / "cache")
    assert isinstance(samples.train, Mixture)
    assert samples.held_out is not None
    assert samples.notes[0].startswith("train, web (1 of 4 samples): data.mixture.web.path=")
    assert samples.notes[0].endswith("is streamed, each 6 rows shuffled")
    assert samples.notes[3].startswith("held out: 1 document")


def test_what_is_no_place_in_it(tmp_path: Path, tokenizer: Any) -> None:
    mixed = mixture_of(config_of(tmp_path), tokenizer)
    sample(mixed, 0)
    good = mixed.state_dict(1)
    assert good is not None
    wrong: list[Any] = [{}, {"web": good["sources"]["web"]}, [], None, good["sources"] | {"more": {}}]
    for sources in wrong:
        with pytest.raises(CheckpointError, match=r"no valid position in streamed data of asked, books, web"):
            mixed.load_state_dict({"sources": sources})
        with pytest.raises(CheckpointError, match=r"no valid position in streamed data of asked, books, web"):
            mixed.describe_progress(1, {"sources": sources})
    with pytest.raises(CheckpointError, match="no valid position in streamed data"):
        mixed.load_state_dict({"sources": good["sources"] | {"web": {"epoch": -1}}})
    with pytest.raises(CheckpointError, match="no valid position in streamed data"):
        mixed.load_state_dict(good["sources"]["web"])  # that of a stream alone
    mixed.load_state_dict(good)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"eval_fraction": 0.1}, "streaming=true cannot be combined with eval_fraction=0.1"),
        ({"packing": True, "shuffle_buffer": 1}, "packs the rows of shuffle_buffer"),
        ({"path": "x.txt"}, "both say what to train on"),
    ],
)
def test_what_cannot_be_had_with_it_is_named(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(tmp_path, **given)


def test_errors_name_the_source(tmp_path: Path, tokenizer: Any) -> None:
    config = config_of(tmp_path)
    config.mixture["web"] = {"path": json_lines(tmp_path / "empty.jsonl", ["", " "])}
    mixed = mixture_of(config, tokenizer)
    with pytest.raises(DataError, match=r"data\.mixture\.web\.path=.*empty\.jsonl has nothing to train on"):
        mixed.batch(range(8))
