"""Where a run stands survives a file, and nothing else is taken for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.training.seeding import derived_seed, seed_all
from fsdp_shard.training.trainer_state import TrainerState


def test_round_trip() -> None:
    state = TrainerState(seed=3, data="digest:9/4")
    state.advance(8, 31, {}, skipped=False)
    state.advance(8, 32, {}, skipped=False)
    state.record_evaluation(2.5)
    state.record_evaluation(2.5)
    assert (state.step, state.num_samples, state.num_tokens, state.best_loss, state.best_step) == (2, 16, 63, 2.5, 2)
    assert TrainerState.from_json(state.to_json().encode(), "x") == state
    state.advance(8, 9, {"books": 4, "web": 5}, skipped=False)
    state.advance(8, 3, {"books": 3, "web": 0}, skipped=False)
    assert state.source_tokens == {"books": 7, "web": 5}
    assert TrainerState.from_json(state.to_json().encode(), "x") == state
    epochs = [state.epoch]
    state.samples_per_epoch = 20
    assert [*epochs, state.epoch] == [None, 32 / 20]
    assert TrainerState.from_json(state.to_json().encode(), "x") == state
    fresh = TrainerState(seed=0, data="")
    assert "source_tokens" not in fresh.to_json()
    assert TrainerState.from_json(fresh.to_json().encode(), "x") == fresh


def test_changed_settings_are_kept_if_all_are_known() -> None:
    state = TrainerState(seed=0, data="", step=7)
    state.record_resume({})
    state.record_resume({"optim.lr": ("0.003", "1e-06")})
    assert state.changed_settings == [[7, "optim.lr", "0.003", "1e-06"]]
    assert TrainerState.from_json(state.to_json().encode(), "x") == state
    older = json.loads(TrainerState(seed=0, data="").to_json())
    assert older.pop("changed_settings") == []
    assert TrainerState.from_json(json.dumps(older).encode(), "x").changed_settings is None
    state.record_resume(None)
    state.record_resume({"optim.lr": ("1e-06", "0.1")})
    assert state.changed_settings is None


def test_the_loss_before_training_is_of_the_same_samples() -> None:
    state = TrainerState(seed=0, data="")
    state.record_held_out("a")
    state.loss_before = 0.0
    state.advance(1, 1, {}, skipped=False)
    assert not state.never_improved
    state.record_evaluation(0.0)
    assert (state.is_best, state.never_improved) == (True, True)
    assert TrainerState.from_json(state.to_json().encode(), "x") == state
    assert not state.record_held_out("a")
    assert state.loss_before == 0.0
    assert state.record_held_out("b")
    assert vars(state)["loss_before"] is None
    assert not state.never_improved


def test_the_held_out_loss_is_of_this_step() -> None:
    state = TrainerState(seed=0, data="")
    assert state.held_out_loss is None
    state.advance(1, 1, {}, skipped=False)
    state.record_evaluation(3.0)
    assert TrainerState.from_json(state.to_json().encode(), "x").held_out_loss == 3.0
    state.advance(1, 1, {}, skipped=False)
    losses = [state.held_out_loss]
    state.record_evaluation(4.0)
    state.record_held_out("a")
    losses.append(state.held_out_loss)
    state.record_held_out("b")
    losses.append(state.held_out_loss)
    assert losses == [None, 4.0, None], "the first samples that are named are those of the loss"
    sampled = TrainerState(seed=0, data="", step=4, evaluated_step=4)  # completions only
    sampled.record_held_out("a")
    assert sampled.evaluated_step == 0, "its loss is still to be computed"


def test_small_falls_add_up() -> None:
    state = TrainerState(seed=0, data="")
    stale = []
    for loss in (3.0, 2.9, 2.8, 2.7, 2.75, 2.7, 2.6):
        state.advance(1, 1, {}, skipped=False)
        state.record_evaluation(loss, min_delta=0.25)
        stale.append(state.num_stale)
    assert stale == [0, 1, 2, 0, 1, 2, 3]
    assert (state.best_loss, state.best_step, state.is_best) == (2.6, 7, True)
    assert state.stops_early(3)
    assert not state.stops_early(4)
    assert not state.stops_early(None)
    state.advance(1, 1, {}, skipped=True)
    assert (state.num_skipped, state.num_skipped_in_row, state.is_best) == (1, 1, False)
    state.advance(1, 1, {}, skipped=False)
    assert (state.num_skipped, state.num_skipped_in_row) == (1, 0)
    assert TrainerState.from_json(state.to_json().encode(), "x") == state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 2}, "format version 1"),
        ({"step": -1}, "step is -1"),
        ({"step": 1.5}, "step is 1.5"),
        ({"step": True}, "step is True"),
        ({"num_samples": None}, "num_samples is None"),
        ({"data": 7}, "data is 7"),
        ({"best_loss": "low"}, "best_loss is 'low'"),
        ({"loss_before": "low"}, "loss_before is 'low'"),
        ({"changed_settings": {}}, "changed_settings is {}"),
        ({"changed_settings": [[7, "optim.lr", 0.1, "0.2"]]}, "changed_settings has .*two values"),
        ({"extra": 1}, r"unknown \['extra'\]"),
        ({"source_tokens": [1]}, r"source_tokens is \[1\]; expected an object"),
        ({"samples_per_epoch": 1.5}, "samples_per_epoch is 1.5"),
        ({"owes_evaluation": 1}, "owes_evaluation is 1; expected true or false"),
        ({"source_tokens": {"web": -1}}, r"source_tokens\.web is -1"),
    ],
)
def test_damaged_entries_are_named(change: dict[str, Any], words: str) -> None:
    text = json.dumps(json.loads(TrainerState(seed=0, data="d").to_json()) | change)
    with pytest.raises(CheckpointError, match=f"trainer.json.*{words}"):
        TrainerState.from_json(text.encode(), "trainer.json")


def test_entries_that_are_named_differently_in_the_file() -> None:
    state = TrainerState(seed=0, data="", loss_to_beat=2.0, dataset_state={"row": 7}, evaluation_pending=True)
    entries = json.loads(state.to_json())
    assert (entries["reference_loss"], entries["place"], entries["owes_evaluation"]) == (2.0, {"row": 7}, True)
    assert entries.keys().isdisjoint({"loss_to_beat", "dataset_state", "evaluation_pending"})
    assert TrainerState.from_json(state.to_json().encode(), "x") == state


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format_version": 1}'])
def test_other_content_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        TrainerState.from_json(text.encode(), "trainer.json")


def test_a_resumed_run_must_be_the_same_run() -> None:
    state = TrainerState(seed=3, data="a")
    state.check_continues(3, "a", "step")
    with pytest.raises(ConfigError, match="Set seed=3"):
        state.check_continues(4, "a", "step")
    with pytest.raises(ConfigError, match="its position in the data is not valid"):
        state.check_continues(3, "b", "step")


def test_seeds_are_unrelated_and_fixed() -> None:
    seeds = {derived_seed(seed, step, rank) for seed in range(4) for step in range(50) for rank in range(4)}
    assert len(seeds) == 800
    assert derived_seed(0, 0, 0) == 3441634551923929197, "a resumed run must draw what it would have drawn"


def test_all_generators_are_seeded() -> None:
    import random

    import numpy
    import torch

    def draw() -> tuple[float, float, float]:
        seed_all(1 << 40)
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    assert draw() == draw()
