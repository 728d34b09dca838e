"""Saving behind the training: what is saved is the state of its step, whatever training does meanwhile."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_shard.blocks import tied_names
from fsdp_shard.checkpoint import points, staging
from fsdp_shard.checkpoint.base import CheckpointConfig
from fsdp_shard.checkpoint.checks.verify import verify
from fsdp_shard.checkpoint.index import open_checkpoint
from fsdp_shard.checkpoint.optimizer import optimizer_shards
from fsdp_shard.checkpoint.state import load_shards
from fsdp_shard.checkpoint.store import Store
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import SaveError, StorageError
from fsdp_shard.training.saving import Saver, open_saver
from fsdp_shard.training.setup import LoadedModel, LoadFigures
from fsdp_shard.training.state import TrainerState
from tests.ranks import on_ranks
from tests.sharding.test_wrappers import WRAPPERS, sharded
from tests.tiny import llama, token_batch


class Training:
    """A tiny model that is trained and saved; `told` is what a user would see."""

    def __init__(self, context: DistributedContext, run_dir: Path, wrapper: str = "fsdp2", **settings: Any) -> None:
        self.context, self.told, self.store = context, list[str](), Store(run_dir / "checkpoints")
        self.model = sharded(WRAPPERS[wrapper](param_dtype="float32"), context)
        self.optimizer = torch.optim.AdamW(self.model.module.train().parameters(), lr=1e-2)
        self.state = TrainerState(0, "none")
        loaded = LoadedModel(self.model, 0, 0, tied_names(llama()), LoadFigures(0, 0, 0, 0))
        config = CheckpointConfig(**settings)
        beside = {"config.json": b"{}"}
        self.saver: Saver = open_saver(str(run_dir), config, context, loaded, self.optimizer, beside, self)

    def note(self, lines: str) -> None:
        self.told.append(lines)

    def saved(self, checkpoint: Path) -> None:
        self.told.append(f"saved {checkpoint.name}")

    def step(self) -> None:
        rows = token_batch(self.state.step).chunk(self.context.world_size)[self.context.rank]
        self.model.module(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.advance(len(rows), rows.numel())

    def held(self) -> dict[str, torch.Tensor]:
        shards = self.model.local_shards()
        states = optimizer_shards(self.optimizer, shards)
        return {name: shard.data.clone() for name, shard in {**shards, **states}.items()}

    def stored(self, step: int) -> dict[str, torch.Tensor]:
        """What `held` is to be after this step is loaded, read over what is held now."""
        shards = self.model.local_shards()
        states = optimizer_shards(self.optimizer, shards)
        with (
            open_checkpoint(self.store.path(step)) as weights,
            open_checkpoint(self.store.path(step) / "optimizer") as moments,
        ):
            load_shards(weights, shards)
            load_shards(moments, states)
        return self.held()


def behind(context: DistributedContext, run_dir: Path, wrapper: str, layout: str) -> None:
    """Two saves, each of which is slow to copy and slower to write, while training goes on."""
    run = Training(context, run_dir, wrapper, layout=layout, keep_last=1)
    real, writing = staging._copy, threading.Event()

    def slow(job: Any) -> None:
        time.sleep(0.004)
        real(job)

    staging._copy = slow
    points.hook = lambda point: writing.wait(60) and None if point == "created" else None
    run.step()
    first = run.held()
    run.saver.save(run.state)
    run.step()  # the weights change while nothing is written yet
    run.saver.poll()
    assert run.store.steps() == []
    assert not all(torch.equal(run.held()[name], first[name]) for name in first)
    writing.set()
    second = run.held()
    run.saver.save(run.state)  # waits for the first one
    assert run.store.steps() == [1] or run.store.steps() == [2]
    run.step()
    third = run.held()
    run.saver.finish()
    assert run.store.steps() == [2], "retention comes after the commit"
    assert run.told == [
        "saving step 1 in the background",
        "saved step-00000001",
        "saving step 2 in the background",
        "saved step-00000002",
    ]
    restored = run.stored(2)
    assert all(torch.equal(restored[name], second[name]) for name in second)
    assert not all(torch.equal(restored[name], third[name]) for name in third)


@pytest.mark.parametrize(("wrapper", "layout"), [("fsdp1", "sharded"), ("fsdp2", "gathered")])
def test_what_is_saved_is_the_state_of_its_step(wrapper: str, layout: str, tmp_path: Path) -> None:
    on_ranks(2, behind, tmp_path, wrapper, layout)
    assert verify(tmp_path).is_sound


def failing(context: DistributedContext, run_dir: Path) -> list[str]:
    """A disk of rank 1 that is full for one save, then for good; then a rank that is late."""
    run = Training(context, run_dir, max_failures=2)
    run.step()
    run.saver.save(run.state)
    run.saver.wait()

    def full(point: str) -> None:
        if point == "weights-written" and context.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "shard-1")

    points.hook = full
    run.step()
    run.saver.save(run.state)
    while not any("not be saved" in line for line in run.told):
        run.saver.poll()  # as after each step
    assert run.store.steps() == [1]
    assert not list(run.store.root.glob(".*")), "nothing half-written stays"
    with pytest.raises(StorageError, match=r"Step 2 could not be saved. Rank 1: shard-1: No space left .*ENOSPC"):
        run.saver.finish()
    points.hook = None
    run.step()
    run.saver.save(run.state)
    run.saver.finish()
    assert run.store.latest() == 3, "the disk has space again"
    points.hook = full
    run.step()
    run.saver.save(run.state)
    run.step()
    run.saver.save(run.state)
    with pytest.raises(StorageError, match=r"Step 5 could not be saved. Rank 1"):
        run.saver.wait()
    assert run.store.steps() == [1, 3]
    return run.told


def test_a_full_disk_stops_training_only_when_it_stays_full(tmp_path: Path) -> None:
    told = on_ranks(2, failing, tmp_path)
    assert told[0] == told[1]
    assert sum("Training goes on (failure 1 of checkpoint.max_failures=2 in a row)" in line for line in told[0]) == 2
    assert all(verify(Store(tmp_path / "checkpoints").path(step)).is_sound for step in (1, 3))


def late(context: DistributedContext, run_dir: Path) -> None:
    run = Training(context, run_dir, timeout_seconds=1.0)
    if context.rank == 1:
        points.hook = lambda point: time.sleep(3) if point == "created" else None
    run.step()
    run.saver.save(run.state)
    run.step()  # training's own group has another timeout
    with pytest.raises(SaveError, match=r"checkpoint\.timeout_seconds=1"):
        run.saver.finish()
    assert run.store.steps() == []


def test_a_rank_that_is_late_with_a_save_fails_the_save(tmp_path: Path) -> None:
    on_ranks(2, late, tmp_path)
