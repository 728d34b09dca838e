"""Where ranks meet: a port that the run itself has is no fault, and neither is what a scheduler says of machines."""

from __future__ import annotations

from contextlib import closing
from socket import create_server

import pytest
from torch.distributed import TCPStore

from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.doctor.findings import PROBLEM, WARNING, Finding
from fsdp_shard.doctor.network import check_network

_OTHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_NTASKS",
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _OTHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _find(rendezvous: str) -> list[Finding]:
    return list(check_network(LaunchConfig(nodes="2", rendezvous=rendezvous)))


def test_the_rendezvous_of_another_launcher_of_the_run_is_no_fault() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (finding,) = _find(f"127.0.0.1:{store.port}")
    assert finding.mark == WARNING
    assert "is this machine for every machine" in finding.text


@pytest.mark.long
def test_a_program_that_is_no_rendezvous_is_one() -> None:
    with closing(create_server(("127.0.0.1", 0))) as server:
        found = _find(f"127.0.0.1:{server.getsockname()[1]}")
    assert [finding.mark for finding in found] == [WARNING, PROBLEM]


def test_a_scheduler_that_counts_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert list(check_network(LaunchConfig())) == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x"}, "RANK=x is not a number"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, "srun started SLURM_STEP_NUM_TASKS=2 tasks"),
    ],
    ids=["word", "rank", "slurm"],
)
def test_variables_that_cannot_be(variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (finding,) = check_network(LaunchConfig())
    assert finding.mark == PROBLEM
    assert said in finding.text


@pytest.mark.parametrize("port", ["abc", "99999", "-1"])
def test_a_port_that_is_none(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    (finding,) = check_network(LaunchConfig(device="cpu"))
    assert finding.mark == PROBLEM
    assert f"MASTER_ADDR:MASTER_PORT=localhost:{port}: {port} is not a port" in finding.text


def test_an_allocation_whose_tasks_nobody_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    (finding,) = check_network(LaunchConfig())
    assert finding.mark == WARNING
    assert "SLURM_NTASKS=2 tasks, for which this run waits, but srun has not started" in finding.text
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert list(check_network(LaunchConfig())) == []


def test_an_interface_by_its_beginning_is_for_nccl_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "l")  # of lo
    (finding,) = check_network(LaunchConfig(ranks=2, device="cpu"))
    assert "no such interface" in finding.text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert list(check_network(LaunchConfig(ranks=2, device="cpu"))) == []
