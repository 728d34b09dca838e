"""The groups of ranks and their devices."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_shard.distributed import (
    Communicator,
    DistributedContext,
    LaunchConfig,
    OnlyRank,
    init_distributed,
    join_ranks,
    variables_for_torch,
)
from fsdp_shard.distributed.hardware import init_device
from fsdp_shard.distributed.started_ranks import check_started
from fsdp_shard.errors import ConfigError
from tests.support.ranks import on_ranks


def _joined(context: DistributedContext) -> int | None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # as in a process group that another library has made
    with join_ranks(LaunchConfig(device="cpu")) as ranks:
        return None if ranks is None else ranks.world_size


def test_ranks_are_joined_in_a_process_group_of_others() -> None:
    """Else each would do all the work, and write the same files."""
    assert on_ranks(2, _joined) == [2, 2]
    assert on_ranks(1, _joined) == [None]


@pytest.mark.parametrize(
    ("settings", "world_size", "words"),
    [
        ({"nodes": "1:1"}, 1, None),
        ({"ranks": 2}, 1, r"launch\.ranks=2 has no effect: this process is the only rank"),
        ({"nodes": "2:3", "rendezvous": "a:1"}, 1, r"launch\.nodes='?2:3'? has no effect"),
        ({"max_restarts": 1}, 1, r"launch\.max_restarts=1 has no effect"),
        ({"ranks": 2}, 2, None),
        ({"ranks": 2, "nodes": "1:2", "rendezvous": "a:1"}, 2, None),
        ({"ranks": 3}, 2, r"launch\.ranks=3, but 2 ranks have been started"),
    ],
)
def test_ranks_are_those_of_the_settings(
    settings: dict[str, Any], world_size: int, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        check_started(LaunchConfig(**settings), world_size)


_SECONDS = 60.0  # of `on_ranks`; that of a backend is half an hour (gloo) or ten minutes (NCCL)


def _groups(context: DistributedContext) -> list[tuple[str, list[int], timedelta]]:
    """Name, ranks and timeout of the group of each dimension of each mesh."""
    found = []
    for mesh in filter(None, (context.mesh, context.expert_mesh)):
        for name in mesh.mesh_dim_names or ():
            group = mesh.get_group(name)
            backend = group._get_backend(torch.device("cpu"))
            found.append((name, dist.get_process_group_ranks(group), backend.options._timeout))
    return found


def test_every_group_of_a_mesh_has_the_timeout_of_the_settings() -> None:
    found = on_ranks(4, _groups, replicas=2, tensor_parallel=2)
    timeout = timedelta(seconds=_SECONDS)
    assert found[3] == [("replicate", [1, 3], timeout), ("shard", [3], timeout), ("tensor", [2, 3], timeout)]
    experts = on_ranks(4, _groups, replicas=1, expert_parallel=2)
    assert [(name, ranks) for name, ranks, _ in experts[2]] == [
        *[("replicate", [2]), ("shard", [0, 1, 2, 3])],
        *[("replicate", [2]), ("shard", [0, 2]), ("expert", [2, 3]), ("tensor", [2])],
    ]
    assert {seconds for _, _, seconds in experts[2]} == {timeout}


def test_a_rank_makes_only_the_groups_that_it_is_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under NCCL each group that a rank helps to make splits the communicator of all; gloo connects nobody yet."""
    made: list[list[int]] = []
    new_group = dist.new_group

    def counted(ranks: list[int], **options: Any) -> Any:
        made.append(ranks)
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", counted)
    for name, value in {"RANK": "21", "WORLD_SIZE": "64", "LOCAL_RANK": "0", "TORCH_GLOO_LAZY_INIT": "1"}.items():
        monkeypatch.setenv(name, value)
    with init_distributed("cpu", 2, rendezvous=f"file://{tmp_path}/store", tensor_parallel=4) as context:
        assert made == [[21, 53], list(range(1, 32, 4)), [20, 21, 22, 23]]
        assert dist.get_process_group_ranks(context.mesh.get_group("replicate")) == [21, 53]


def _num_sockets(context: DistributedContext) -> int:
    """Sockets of this rank after the collectives of a step and of a save."""
    others = context.with_new_group(_SECONDS)
    for group in (context, others):
        group.all_reduce([1.0])
        group.broadcast_object("x")
    others.barrier()
    opened = os.listdir("/proc/self/fd")
    links = [os.readlink(f"/proc/self/fd/{number}") for number in opened if os.path.exists(f"/proc/self/fd/{number}")]
    return sum(link.startswith("socket:") for link in links)


def test_ranks_connect_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables_for_torch(LaunchConfig(device="cpu")).items():
        monkeypatch.setenv(name, value)
    few, many = (max(on_ranks(ranks, _num_sockets)) for ranks in (4, 16))
    assert many <= few + 2 * 6, "two more levels of a tree in each of two groups; with all others, 24 more"


@pytest.mark.parametrize(("num_visible", "local_rank", "index"), [(8, 3, 3), (1, 3, 0), (1, 0, 0), (2, 2, None)])
def test_a_rank_that_sees_one_gpu_takes_it(
    monkeypatch: pytest.MonkeyPatch, num_visible: int, local_rank: int, index: int | None
) -> None:
    """As under `srun --gpus-per-task=1`, or with CUDA_VISIBLE_DEVICES for each worker; torch.cuda is stood in for."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    if index is None:
        with pytest.raises(ConfigError, match="LOCAL_RANK=2 has no GPU: it sees 2"):
            init_device("auto", local_rank)
        return
    assert init_device("auto", local_rank) == torch.device("cuda", index)
    assert taken == [index]


def test_ranks_per_machine_are_those_that_were_started_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Communicator(rank=5, world_size=8).local_world_size == 4
    assert OnlyRank().local_world_size == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert Communicator(rank=5, world_size=8).local_world_size == 8, "nobody says otherwise"


@pytest.mark.parametrize(
    ("variables", "arguments", "words"),
    [
        ({}, {"replicas": 2}, "replicas=2, tensor_parallel=1, .* do not divide 1 ranks"),
        ({}, {"tensor_parallel": 2}, "tensor_parallel=2, .* do not divide 1 ranks"),
        ({}, {"replicas": 0}, "numbers of at least 1"),
        ({}, {"replicas": "2"}, "replicas='2' is str, expected an int"),
        ({}, {"expert_parallel": True}, "expert_parallel=True is bool, expected an int"),
        ({}, {"device": "gpu"}, "device=gpu is not one of auto, cpu, cuda"),
        ({}, {"device": "CPU"}, "device=CPU is not one of auto, cpu, cuda"),
        ({}, {"device": "cuda:1"}, "device=cuda:1 is not one of auto, cpu, cuda"),
        ({}, {"timeout_seconds": -1}, "timeout_seconds=-1 is out of range: it must be more than 0"),
        ({}, {"timeout_seconds": math.nan}, "timeout_seconds=nan is out of range: it must be more than 0"),
        ({}, {"timeout_seconds": "5"}, "timeout_seconds='5' is str, expected a float"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, {}, "RANK=3 is not one of WORLD_SIZE=2 ranks, which are numbered from 0"),
        ({"RANK": "1"}, {}, "RANK=1 is not one of WORLD_SIZE=1 ranks"),
        ({"RANK": "abc"}, {}, "RANK=abc is not a number"),
        ({"WORLD_SIZE": "2"}, {}, "WORLD_SIZE=2, but RANK is not set; start the ranks with torchrun"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            {},
            "MASTER_PORT is not set, so the ranks cannot",
        ),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, {}, "srun has started 2 tasks, but RANK is not set"),
    ],
)
def test_ranks_that_cannot_be_are_an_error(
    variables: dict[str, str], arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words), init_distributed(**{"device": "cpu"} | arguments):
        pass
