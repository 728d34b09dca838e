"""Ranks of one run that several commands started: they meet and agree on its directory and settings, or say why not."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import OWN_RECIPE, environment, free_port


def _start(place: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(OWN_RECIPE), "model.path=x", "data.path=text.txt", "launch.device=cpu", *arguments]
    return subprocess.Popen(command, cwd=place, env=environment() | variables, stderr=subprocess.PIPE, text=True)


def _one_run(place: Path, *ranks: subprocess.Popen[str]) -> None:
    """All ranks end well, worked in one directory, which is named by the time, and one of them wrote the config."""
    for rank in ranks:
        assert rank.communicate(timeout=100)[1] == ""
        assert rank.returncode == 0
    (made,) = (place / "outputs" / "finetune").iterdir()
    assert sorted(file.name for file in made.iterdir()) == ["config.yaml", *(f"rank-{r}" for r in range(len(ranks)))]
    assert (made / "rank-0").read_text() == f"0 of {len(ranks)}"


@pytest.mark.long
def test_two_machines_meet(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    machines = ["launch.nodes=2", "launch.ranks=1", f"launch.rendezvous=localhost:{free_port()}"]
    first = _start(tmp_path, *machines)
    time.sleep(1.1)  # so that each would name its directory by another second
    second = _start(tmp_path, *machines)
    _one_run(tmp_path, first, second)


@pytest.mark.long
def test_the_tasks_of_srun_are_ranks(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    slurm = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    slurm["MASTER_PORT"] = str(free_port())
    first = _start(tmp_path, SLURM_PROCID="0", SLURM_LOCALID="0", **slurm)
    time.sleep(1.1)
    second = _start(tmp_path, SLURM_PROCID="1", SLURM_LOCALID="1", **slurm)
    _one_run(tmp_path, first, second)


@pytest.mark.long
def test_a_rank_says_that_rank_0_is_gone(tmp_path: Path) -> None:
    """Rank 0 is killed before it has said which settings and directory it has."""
    (tmp_path / "text.txt").write_text("text")
    port = free_port()
    serving = (
        f"import time, torch.distributed as dist\n"
        f"store = dist.TCPStore('127.0.0.1', {port}, 2, True, multi_tenant=True)\n"  # returns once both are there
        f"time.sleep(1)"
    )
    with subprocess.Popen([sys.executable, "-c", serving], env=environment()):
        second = _start(
            tmp_path, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        said = second.communicate(timeout=100)[1]
    assert re.search(
        r"error: rank 1: Rank 1 of 2 lost rank 0 before the run began \(.*\); see why rank 0 ended\.\n", said
    ), said
    assert second.returncode == 1


@pytest.mark.long
@pytest.mark.parametrize("starter", ["srun", "machines"])
def test_ranks_with_other_settings_are_refused(starter: str, tmp_path: Path) -> None:
    """Each would train with its own; what belongs to a machine may differ."""
    (tmp_path / "text.txt").write_text("text")
    machines = ["launch.nodes=2", f"launch.rendezvous=localhost:{free_port()}"] if starter == "machines" else []
    slurm = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    slurm["MASTER_PORT"] = str(free_port())

    def start(rank: int, *settings: str) -> subprocess.Popen[str]:
        task = {} if machines else {**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        return _start(tmp_path, *machines, *settings, **task)

    first, second = start(0, "optim.lr=1e-2"), start(1, "optim.lr=1e-5", "data.cache_dir=b", "launch.ranks=1")
    said, status = first.communicate(timeout=200)[1], first.returncode
    if not machines:
        second.kill()  # it would say the same later
    second.communicate(timeout=200)
    rates = r"optim\.lr=(0\.01|1e-05)"
    assert re.fullmatch(
        rf"error: Rank 1 on \S+ has {rates}, but rank 0 has {rates}; start all ranks with the same settings\.\n", said
    )
    assert status == 2
    assert not (tmp_path / "outputs").exists()
