"""launch.nodes=1:2: a run whose second machine leaves and comes back, and which learns what it would have learnt."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import FAULTS, StepStore, read_manifest, verify
from fsdp_shard.distributed import rendezvous
from tests.faults.counts import count
from tests.faults.saves import LONG
from tests.support.commands import free_port
from tests.support.runs import Started, run_recipe

_STEPS = 60


def _world_sizes(run_dir: Path) -> list[int]:
    """How many ranks saved each step, in order."""
    store = StepStore(run_dir / "checkpoints")
    return [manifest.world_size for step in store.steps() if (manifest := read_manifest(store.path(step)))]


def _wait_for(run_dir: Path, world_sizes: list[int]) -> None:
    """Until the steps have been saved by these numbers of ranks, one after the other, whatever comes after."""
    deadline = time.monotonic() + 90
    while _changes(_world_sizes(run_dir))[: len(world_sizes)] != world_sizes:
        assert time.monotonic() < deadline, _world_sizes(run_dir)
        time.sleep(0.05)


def _changes(values: list[int]) -> list[int]:
    return [value for at, value in enumerate(values) if at == 0 or values[at - 1] != value]


@pytest.mark.skipif(not LONG, reason="takes a minute, in the long form")
def test_a_machine_leaves_and_comes_back(
    tiny_model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [
        f"model.path={tiny_model}",
        f"data.path={texts}/train.txt",
        f"data.cache_dir={tmp_path}/tokens",
        "data.sequence_length=16",
        f"train.steps={_STEPS}",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "optim.lr=1e-3",
        "shard.param_dtype=float32",
        "launch.device=cpu",
    ]
    undisturbed = run_recipe("finetune", tmp_path / "undisturbed", *settings)
    assert undisturbed.status == 0, undisturbed.err

    monkeypatch.setattr(rendezvous, "_LAST_CALL_SECONDS", 1)  # how long a round waits for more machines
    monkeypatch.setattr(FAULTS, "hook", lambda point: time.sleep(0.15) if point == "begun" else None)
    settings += ["checkpoint.every=1", "checkpoint.asynchronous=false", "launch.max_restarts=3", "launch.nodes=1:2"]
    settings += [f"launch.rendezvous=localhost:{free_port()}", "launch.grace_seconds=20"]
    run_dir = tmp_path / "run"
    first = Started("finetune", run_dir, *settings)
    time.sleep(0.3)
    second = Started("finetune", run_dir, *settings)
    _wait_for(run_dir, [2])
    os.kill(second.pid, signal.SIGTERM)
    left = second.wait()
    assert left.status == 128 + signal.SIGTERM, left.err
    _wait_for(run_dir, [2, 1])
    back = Started("finetune", run_dir, *settings)
    ended = [first.wait(), back.wait()]
    assert [one.status for one in ended] == [0, 0], [one.err for one in ended]
    assert _changes(_world_sizes(run_dir)) == [2, 1, 2]
    assert ended[0].losses == pytest.approx(undisturbed.losses, rel=1e-6)
    assert verify(run_dir).is_sound
    count("machines that left and came back")
