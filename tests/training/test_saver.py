"""Saving behind the training: what is saved is the state of its step, whatever training does meanwhile."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp_shard.checkpoint import (
    FAULTS,
    StepStore,
    check_content,
    verify,
)
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError, ConfigError, SaveError, StorageError
from fsdp_shard.training.checkpoints.resume import check_optimizer, find_step
from fsdp_shard.training.optim.torch_optim import AdamWConfig
from tests.support.ranks import on_ranks
from tests.support.saved_training import Training


def behind(context: DistributedContext, run_dir: Path, wrapper: str, layout: str, held_at: str) -> None:
    """Two saves, each slow to copy and held up while training goes on: before anything is written, or halfway."""
    run = Training(context, run_dir, wrapper, layout=layout, keep_last=1)
    copy = "fsdp_shard.checkpoint.sharded_state.staging._Part.copy"
    real, writing, held = resolve_name(copy), threading.Event(), threading.Event()

    def slow(part: Any) -> None:
        time.sleep(0.004)
        real(part)

    pytest.MonkeyPatch().setattr(copy, slow)

    def hold(point: str) -> None:
        if point == held_at:
            held.set()
            writing.wait(60)

    FAULTS.hook = hold
    run.step()
    first = run.held()
    run.saver.save(run.state)
    held.wait(60)
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


@pytest.mark.parametrize("held_at", ["created", "weights-written"])
@pytest.mark.parametrize(("wrapper", "layout"), [("fsdp1", "sharded"), ("fsdp2", "gathered")])
def test_what_is_saved_is_the_state_of_its_step(wrapper: str, layout: str, held_at: str, tmp_path: Path) -> None:
    on_ranks(2, behind, tmp_path, wrapper, layout, held_at)
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

    FAULTS.hook = full
    run.step()
    run.saver.save(run.state)
    while not any("not be saved" in line for line in run.told):
        run.saver.poll()  # as after each step
    assert run.store.steps() == [1]
    assert not list(run.store.root.glob(".*")), "nothing half-written stays"
    with pytest.raises(StorageError, match=r"Step 2 could not be saved. Rank 1: shard-1: No space left .*ENOSPC"):
        run.saver.finish()
    FAULTS.hook = None
    run.step()
    run.saver.save(run.state)
    run.saver.finish()
    assert run.store.latest() == 3, "the disk has space again"
    FAULTS.hook = full
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
    assert sum("Training continues (failure 1 of checkpoint.max_failures=2 in a row)" in line for line in told[0]) == 2
    assert all(verify(StepStore(tmp_path / "checkpoints").path(step)).is_sound for step in (1, 3))


def best_after_a_belated_evaluation(context: DistributedContext, run_dir: Path) -> int | None:
    run = Training(context, run_dir, save_best=False)
    run.state.record_held_out("some")
    run.step()
    run.saver.save(run.state)
    run.saver.wait()
    run.state.record_evaluation(3.0)
    run.saver.note_best(run.state)
    for loss, is_saved in ((1.0, False), (2.0, True)):
        run.step()
        run.state.record_evaluation(loss)
        if is_saved:
            run.saver.save(run.state)
    run.saver.finish()
    return run.store.best()


def test_a_step_that_was_evaluated_after_its_save_is_compared_by_that_loss(tmp_path: Path) -> None:
    """The best of the saved steps is the third one, although the second, which is not saved, was better."""
    assert on_ranks(1, best_after_a_belated_evaluation, tmp_path) == [3]


def step_of(context: DistributedContext, run_dir: Path, layout: str) -> None:
    run = Training(context, run_dir, layout=layout, asynchronous=False)
    run.step()
    run.saver.save(run.state)
    run.saver.finish()


@pytest.fixture(scope="module", params=["sharded", "gathered"])
def saved_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    on_ranks(2, step_of, run_dir, request.param)
    return run_dir


def test_a_step_that_lacks_any_file_is_not_resumed_from(saved_run: Path, tmp_path: Path) -> None:
    names = [str(path.relative_to(saved_run)) for path in saved_run.rglob("*") if path.is_file()]
    names = [name for name in names if not name.endswith("latest")]
    assert len(names) >= 6
    assert find_step("auto", str(saved_run)) is not None
    for name in names:
        damaged = tmp_path / "run"
        shutil.copytree(saved_run, damaged)
        (damaged / name).unlink()
        for resume in ("auto", str(damaged), str(damaged / "checkpoints" / "step-00000001")):
            with pytest.raises(CheckpointError, match=Path(name).name):
                find_step(resume, str(damaged))
        shutil.rmtree(damaged)


@pytest.mark.parametrize("resume", ["never", "PATH"])
def test_a_run_that_is_started_again_goes_on_from_its_own_steps(resume: str, saved_run: Path, tmp_path: Path) -> None:
    run, own = tmp_path / "run", StepStore(saved_run / "checkpoints")
    resume = resume.replace("PATH", str(saved_run))
    begun = None if resume == "never" else own.path(own.latest() or 0)
    assert find_step(resume, str(run), is_restart=True) == begun, "nothing of its own is there yet"
    shutil.copytree(saved_run, run)
    assert find_step(resume, str(run), is_restart=True) == StepStore(run / "checkpoints").path(own.latest() or 0)
    with pytest.raises(ConfigError, match="already holds"):
        find_step(resume, str(run))


def test_a_flipped_bit_anywhere_is_found_before_resuming(saved_run: Path) -> None:
    step = StepStore(saved_run / "checkpoints").path(1)
    files = sorted(path for path in step.rglob("*") if path.is_file())
    drawn = random.Random(0)
    for number in range(150):
        path = files[number % len(files)]
        content = path.read_bytes()
        at, bit = drawn.randrange(len(content)), drawn.randrange(8)
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match=path.name):
            check_shares(step)
        assert not verify(step).is_sound, (path, at, bit)
        path.write_bytes(content)
    check_shares(step)


def check_shares(step: Path) -> None:
    for share in range(2):
        check_content(step, share, 2)


def slimming(context: DistributedContext, run_dir: Path) -> None:
    """Optimizer state of the last step only; a crash while it is taken from the others; then a step that is damaged."""
    run = Training(context, run_dir, keep_optimizer_last=1, verify=True)
    for _ in range(2):
        run.step()
        run.saver.save(run.state)
    run.saver.wait()
    sizes = [sorted(path.name for path in run.store.path(step).iterdir()) for step in (1, 2)]
    assert set(sizes[1]) - set(sizes[0]) == {"optimizer"}

    def crash(point: str) -> None:
        if point == "slimmed":
            raise OSError(errno.EIO, os.strerror(errno.EIO), "optimizer")

    FAULTS.hook = crash
    run.step()
    run.saver.save(run.state)
    run.saver.wait()
    assert run.told[-2:] == [
        "saved step-00000003",
        "Step 3 is saved, but the best step could not be marked, or older ones could not be deleted. Rank 0: "
        "optimizer: Input/output error (EIO).",
    ]
    assert (run.store.path(2) / "optimizer").is_dir()

    def damage(point: str) -> None:
        if point == "committed":
            path = run.store.path(4) / "optimizer" / "shard-00001-of-00002.safetensors"
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    FAULTS.hook = damage
    run.step()
    run.saver.save(run.state)
    with pytest.raises(SaveError, match=r"does not read back .*step-00000004/optimizer/shard-00001"):
        run.saver.wait()


def test_older_steps_stay_as_weights_and_new_ones_are_read_back(tmp_path: Path) -> None:
    on_ranks(2, slimming, tmp_path)
    store = StepStore(tmp_path / "checkpoints")
    assert (store.path(2) / "optimizer").is_dir()
    store.clean_leftovers()
    assert not (store.path(2) / "optimizer").exists()
    for step in (1, 2):
        assert verify(store.path(step)).is_sound
        with pytest.raises(CheckpointError, match=r"no optimizer/.*keep_optimizer_last"):
            check_optimizer(find_step(str(store.path(step)), str(tmp_path / "other")), AdamWConfig())
    assert verify(store.path(3)).is_sound
    assert not verify(store.path(4)).is_sound


def late(context: DistributedContext, run_dir: Path) -> None:
    run = Training(context, run_dir, timeout_seconds=4.0)
    if context.rank == 1:
        FAULTS.hook = lambda point: time.sleep(6) if point == "created" else None
    run.step()
    run.saver.save(run.state)
    run.step()  # training's own group has another timeout
    with pytest.raises(SaveError, match=r"checkpoint\.timeout_seconds=4"):
        run.saver.finish()
    assert run.store.steps() == []


@pytest.mark.long
def test_a_rank_that_is_late_with_a_save_fails_the_save(tmp_path: Path) -> None:
    on_ranks(2, late, tmp_path)


class _Counting(torch.optim.SGD):
    """Counts its steps in its parameter group."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


class _Global(torch.optim.SGD):
    """Keeps a state that is of no parameter."""

    def step(self, closure: Any = None) -> Any:
        cast("dict[Any, Any]", self.state)["global"] = {"steps": torch.ones(())}
        return super().step(closure)


class _Outer(torch.optim.SGD):
    """Has another optimizer in it."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        super().__init__(params, lr=lr)
        self.inner = torch.optim.SGD(params, lr=lr, momentum=0.9)


class _Local(torch.optim.SGD):
    """Keeps a number of each rank."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["norm"] = cast("DTensor", param.grad).to_local().norm()
        return found


def lossy(context: DistributedContext, run_dir: Path) -> list[str]:
    said = []
    for optimizer in (_Counting, _Global, _Outer, _Local):
        run = Training(context, run_dir, optimizer=optimizer)
        run.step()
        with pytest.raises(SaveError) as raised:
            run.saver.poll() if optimizer is not _Local else run.saver.save(run.state)
        said.append(str(raised.value))
    return said


def test_an_optimizer_that_would_lose_state_in_a_resume_is_refused(tmp_path: Path) -> None:
    for found in on_ranks(2, lossy, tmp_path):
        assert "_Counting cannot be saved: its steps change count=1 in a parameter group" in found[0]
        assert "_Global cannot be saved: it has a state under the key 'global'" in found[1]
        assert "_Outer cannot be saved: there is another optimizer in it" in found[2]
        assert "_Local cannot be saved: the ranks differ in states of _Local for" in found[3]
