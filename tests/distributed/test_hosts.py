"""Machines with addresses of their own, in network namespaces: slow links, and links that go down and come up again."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import StepStore, read_manifest, verify
from tests.support.commands import FSDP_SHARD, OWN_RECIPE
from tests.support.hosts import hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=f"hosts: {why_no_hosts()}")

_PORT = 29400


@pytest.mark.long
@pytest.mark.parametrize(("count", "delay_ms"), [(2, 30), pytest.param(4, 5, marks=pytest.mark.slow)])
def test_machines_meet_at_the_name_of_one(count: int, delay_ms: float, tmp_path: Path) -> None:
    """Their ranks too, which find each other's addresses by the names of their hosts."""
    (tmp_path / "text.txt").write_text("text")
    command: list[str | Path] = [sys.executable, OWN_RECIPE, "model.path=x", "data.path=text.txt", "launch.device=cpu"]
    command += [f"launch.nodes={count}", f"launch.rendezvous=host1:{_PORT}"]
    with hosts(count, tmp_path, delay_ms) as machines:
        started = [machine.start(command, tmp_path) for machine in machines]
        for process in started:
            said = process.communicate(timeout=200)[0]
            assert process.returncode == 0, said
    (made,) = (tmp_path / "outputs" / "finetune").iterdir()
    assert sorted(file.name for file in made.glob("rank-*")) == [f"rank-{rank}" for rank in range(count)]


_SLURM = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "host[0-1]", "SLURM_JOB_ID": "77"}
_TORCHRUN = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_ranks_of_other_launchers_join_across_machines(launcher: str, tmp_path: Path) -> None:
    """srun starts a task with its variables on each machine, torchrun a launcher that sets those of torch."""
    (tmp_path / "text.txt").write_text("text")
    own = _TORCHRUN if launcher == "torchrun" else ()
    rendezvous = (f"--rdzv-endpoint=host0:{_PORT}",) if own else ()
    command = [sys.executable, *own, *rendezvous, OWN_RECIPE, "model.path=x", "data.path=text.txt", "launch.device=cpu"]
    with hosts(2, tmp_path) as machines:
        started = []
        for task, machine in enumerate(machines):
            variables = {} if own else {**_SLURM, "SLURM_PROCID": str(task), "SLURM_LOCALID": "0"}
            started.append(machine.start(command, tmp_path, **variables))
        for process in started:
            said = process.communicate(timeout=200)[0]
            assert process.returncode == 0, said
    (made,) = (tmp_path / "outputs" / "finetune").iterdir()
    assert (made / "rank-1").read_text() == "1 of 2"


_STEPS = 12


def _world_sizes(run_dir: Path) -> list[int]:
    """How many ranks saved each step, in order, without repetitions."""
    store = StepStore(run_dir / "checkpoints")
    sizes = [manifest.world_size for step in store.steps() if (manifest := read_manifest(store.path(step)))]
    return [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]


def _wait_for(run_dir: Path, world_sizes: list[int]) -> None:
    """Until steps have been saved by these numbers of ranks, one after the other, whatever comes after."""
    deadline = time.monotonic() + 200
    while _world_sizes(run_dir)[: len(world_sizes)] != world_sizes:
        assert time.monotonic() < deadline, _world_sizes(run_dir)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_run_goes_on_without_a_machine_whose_link_is_down(
    count: int, tiny_model: Path, texts: Path, tmp_path: Path
) -> None:
    """Long before a save times out, which is where it is cut off: steps are saved all the time."""
    settings = [
        f"model.path={tiny_model}",
        f"data.path={texts}/train.txt",
        f"data.cache_dir={tmp_path}/tokens",
        "data.sequence_length=16",
        f"train.steps={_STEPS}",
        "train.global_batch_size=12",
        "train.micro_batch_size=1",
        "shard.param_dtype=float32",
        "checkpoint.every=1",
        "checkpoint.asynchronous=false",
        f"launch.nodes=1:{count}",
        "launch.max_restarts=5",
        f"launch.rendezvous=host0:{_PORT}",
        "launch.device=cpu",
        f"run_dir={(run_dir := tmp_path / 'run')}",
    ]
    with hosts(count, tmp_path, 5) as machines:
        *others, cut_off = started = [
            machine.start([*FSDP_SHARD, "finetune", *settings], tmp_path) for machine in machines
        ]
        _wait_for(run_dir, [count])
        machines[-1].set_link("down")
        _wait_for(run_dir, [count, count - 1])
        machines[-1].set_link("up")
        said = {process: process.communicate(timeout=250)[0] for process in started}
    assert [process.returncode for process in others] == [0] * (count - 1), said
    assert cut_off.returncode in (0, 1), said  # it has joined again, or was told that its round is over
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, _STEPS + 1))
    assert verify(run_dir).is_sound
