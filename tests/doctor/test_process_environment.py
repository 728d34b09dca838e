"""Environment variables of GPUs, which this machine need not have, and those that say nothing."""

from __future__ import annotations

import pytest

from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.doctor.findings import WARNING
from fsdp_shard.doctor.process_environment import check_environment


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "PYTORCH_NO_CUDA_MEMORY_CACHING"])
def test_what_makes_gpus_slow_is_told_where_there_are_some(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    (finding,) = check_environment(LaunchConfig(device="cuda"))
    assert finding.mark == WARNING
    assert finding.text.startswith(f"{name}=1 is slow")
    assert list(check_environment(LaunchConfig(device="cpu"))) == []
    monkeypatch.setenv(name, "0")
    assert list(check_environment(LaunchConfig(device="cuda"))) == []


def test_as_many_threads_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert list(check_environment(LaunchConfig(device="cpu", ranks=64))) == []
