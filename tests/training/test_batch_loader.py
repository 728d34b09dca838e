"""What a step needs is loaded while the step before it runs."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from fsdp_shard.data import (
    NO_WINDOW,
    Batch,
    DataConfig,
    Samples,
    ShuffledDataset,
    Task,
    open_samples,
    tokenize_all,
    with_extras,
)
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ModelError
from fsdp_shard.training.batch_loader import evaluation_batches, micro_batches, source_tokens, to_device
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.dataset_figures import data_figures, source_figures
from fsdp_shard.training.held_out.evaluator import evaluate_loss
from fsdp_shard.training.loop import train
from fsdp_shard.training.objectives.registry import OBJECTIVES
from tests.support.prepared_data import prepare_data
from tests.support.tiny import llama
from tests.training.conftest import Plain, stream
from tests.training.tiny_run import SEED, Run, losses

SFT = OBJECTIVES["sft"]()
CONFIG = TrainConfig(steps=3, global_batch_size=4, micro_batch_size=2)


class Watched(ShuffledDataset):
    """Keeps what it was asked for, and by which thread; `pause` delays each batch."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__(stream(), SEED)
        self.asked, self.threads, self.pause = list[int](), set[str](), pause

    def prepare(self, first: int, count: int) -> None:
        self.asked.append(first)
        super().prepare(first, count)

    def batch(self, positions: Any) -> Batch:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.pause)
        return super().batch(positions)


def run_on(context: DistributedContext, data: ShuffledDataset) -> Run:
    run = Run(context)
    run.dataset = data
    return run


def test_the_samples_of_the_next_step_are_loaded_in_a_thread(alone: DistributedContext) -> None:
    data = Watched()
    run, asked = run_on(alone, data), list[list[int]]()
    for report in train(run.of(CONFIG)):
        asked.append(list(data.asked))
        assert report.data_seconds >= 0
    assert asked == [[0, 4], [0, 4, 8], [0, 4, 8]], "one step ahead, and none after the last"
    assert len(data.threads) == 1
    assert threading.main_thread().name not in data.threads
    assert not [thread for thread in threading.enumerate() if thread.name in data.threads], "it has ended"


def test_the_time_waited_is_told(alone: DistributedContext) -> None:
    first = run_on(alone, Watched(pause=0.3)).go(CONFIG)[0]
    assert 0.6 <= first.data_seconds <= first.step_seconds, "two micro-batches, for which nothing else is done"


def test_an_error_in_the_thread_ends_the_run(alone: DistributedContext) -> None:
    class Broken(Watched):
        def batch(self, positions: Any) -> Batch:
            raise ValueError("row 3 cannot be read")

    with pytest.raises(ValueError, match="row 3 cannot be read"):
        run_on(alone, Broken()).go(CONFIG)


def test_held_out_tokens_of_another_model_are_named(alone: DistributedContext) -> None:
    model: Any = Plain(llama())
    with pytest.raises(ModelError, match="has a vocabulary of 257 tokens, but the tokenizer makes token 2"):
        evaluate_loss(model, stream(vocabulary=300), 2, alone)


def test_losses_do_not_depend_on_it(alone: DistributedContext) -> None:
    assert losses(run_on(alone, Watched()).go(CONFIG)) == losses(Run(alone).go(CONFIG))


@given(
    step=st.integers(0, 30),
    micro=st.integers(1, 3),
    ranks=st.integers(1, 6),
    repeats=st.integers(1, 4),
)
def test_a_global_batch_is_the_same_on_any_number_of_ranks(step: int, micro: int, ranks: int, repeats: int) -> None:
    size = micro * ranks * repeats
    samples = np.arange(step * size, (step + 1) * size)
    parts = [micro_batches(samples, micro, rank, ranks) for rank in range(ranks)]
    assert all(part.shape == (repeats, micro) for part in parts)
    together = np.stack(parts, axis=1).reshape(-1)  # micro-batch after micro-batch, rank after rank
    assert together.tolist() == samples.tolist()


def test_a_batch_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="6 samples in micro-batches of 2 on 2 ranks"):
        micro_batches(np.arange(6), 2, 0, 2)


@given(num_samples=st.integers(0, 60), micro=st.integers(1, 4), ranks=st.integers(1, 6))
def test_evaluation_sees_each_sample_once_with_equal_numbers_of_batches(
    num_samples: int, micro: int, ranks: int
) -> None:
    batches = [list(evaluation_batches(num_samples, micro, rank, ranks)) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    seen = [int(i) for of_rank in batches for batch in of_rank for i in batch]
    assert sorted(i for i in seen if i != NO_WINDOW) == list(range(num_samples))
    assert all(len(batch) == micro for of_rank in batches for batch in of_rank)


def test_predictions_and_figures_of_each_source(tmp_path: Path, tiny_model: Path) -> None:
    sources: dict[str, Any] = {"web": {}, "books": {"weight": 2}}
    for name, source in sources.items():
        source["path"] = str(tmp_path / f"{name}.jsonl")
        Path(source["path"]).write_text("".join(json.dumps({"text": f"{name} {n}. " * n}) + "\n" for n in range(20)))
    config = DataConfig(mixture=sources, sequence_length=7, cache_dir=str(tmp_path / "cache"))
    mixed = prepare_data(config, AutoTokenizer.from_pretrained(tiny_model)).train
    counts = np.zeros(2, int)
    for rank in range(2):  # in batches that are on several ranks
        parts = micro_batches(np.arange(24), 4, rank, 2)
        counts += source_tokens(mixed, parts, [SFT.trained_tokens(mixed.batch(part)) for part in parts])
    sources_of_each = mixed.sources_of(np.arange(24))
    for number in range(2):
        chosen = np.flatnonzero(sources_of_each == number)
        assert counts[number] == mixed.batch(chosen).num_predictions
    figures = mixed.figures(24)["sources"]
    assert (figures["books"]["samples"], figures["web"]["samples"]) == (16, 8)
    assert data_figures(mixed, 24, {"books": 11})["sources"] == {
        "books": figures["books"] | {"tokens": 11},
        "web": figures["web"] | {"tokens": 0},
    }
    assert source_figures(mixed, 24, {"web": 5})["web"] == {
        "samples": 8,
        "tokens": 5,
        "epochs": figures["web"]["epochs"],
    }


def test_a_source_alone_has_no_predictions_or_figures_of_its_own() -> None:
    alone = ShuffledDataset(stream(), SEED)
    assert source_tokens(alone, [np.arange(4)], [SFT.trained_tokens(alone.batch(range(4)))]) == []
    assert data_figures(alone, 60, {}) == {"sequence_length": alone.sequence_length}
    assert source_figures(alone, 60, {}) == {}


def pairs(directory: Path, tokenizer: Any) -> Samples:
    """A mixture of two sources, the first with longer answers."""
    mixture: dict[str, Any] = {}
    for name, answer in (("long", "yes indeed"), ("short", "y")):
        row = {"prompt": "ok?", "chosen": answer, "rejected": "no", "gap": 2}
        mixture[name] = {"path": str(directory / f"{name}.jsonl")}
        (directory / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    given: dict[str, Any] = {"kind": "preference", "margin_column": "gap", "cache_dir": str(directory)}
    config = DataConfig(path="", mixture=mixture, sequence_length=16, **given)
    return open_samples(config, tokenize_all(config, tokenizer), Task(samples="pairs"))


def test_pairs_and_their_values_on_the_device(tmp_path: Path, tiny_model: Path) -> None:
    dataset = pairs(tmp_path, AutoTokenizer.from_pretrained(tiny_model)).train
    dataset = dataset.with_sources([with_extras(one, "known", np.full((len(one), 2), 0.5)) for one in dataset.sources])
    positions = np.arange(4)
    batch = dataset.batch(positions)
    found = source_tokens(dataset, [positions], [SFT.trained_tokens(batch)])
    assert found == [2 * (11 + 3), 2 * (2 + 3)], "of both answers, with the tokens that end them"
    assert sum(found) == batch.num_predictions
    on_device = to_device(batch, torch.device("cpu"))
    assert on_device.inputs["input_ids"].shape == on_device.labels.shape == (8, 16)
    assert on_device.extras["margin"].tolist() == [2.0] * 4
    assert on_device.extras["known"].tolist() == [[0.5, 0.5]] * 4
    assert {tensor.dtype for tensor in on_device.extras.values()} == {torch.float32}
    assert any(tensor is on_device.extras["margin"] for tensor in on_device.tensors()), "streams of a GPU keep it"
