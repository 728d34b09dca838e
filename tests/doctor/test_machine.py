"""Versions against what is declared, and what makes a machine slow."""

from __future__ import annotations

import resource
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from fsdp_shard.distributed import LaunchConfig, num_cores
from fsdp_shard.doctor import machine as module
from fsdp_shard.doctor.findings import OK, PROBLEM, WARNING
from fsdp_shard.doctor.machine import check_hardware, check_software
from fsdp_shard.doctor.process_environment import check_environment
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import Fsdp2Config


def test_what_this_package_asks_for_is_installed() -> None:
    (finding,) = check_software()
    assert finding.mark == OK
    assert f"torch {version('torch')}" in finding.text


def test_versions_that_do_not_fit_are_named() -> None:
    first, second = check_software(["torch>=99.1", "no-such-package>=1", "numpy", 'wandb>=99; extra == "wandb"'])
    assert first.mark == PROBLEM
    assert f"torch {version('torch')} is installed, but torch>=99.1 is required" in first.text
    assert "no-such-package is not installed" in first.text
    assert "wandb" not in first.text
    assert second.mark == OK


def test_a_machine_with_a_place_for_each_rank() -> None:
    findings = list(check_hardware(LaunchConfig(device="cpu"), Fsdp2Config(param_dtype="float32")))
    assert [finding.mark for finding in findings] == [OK]
    assert f"{num_cores()} cores" in findings[0].text


def test_more_ranks_than_cores_are_warned_of() -> None:
    found = list(check_hardware(LaunchConfig(device="cpu", ranks=4096), Fsdp2Config(param_dtype="float32")))
    assert [finding.mark for finding in found] == [OK, WARNING]
    assert "launch.ranks=4096 is more than" in found[1].text


def test_few_files_are_warned_of() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = list(check_environment(LaunchConfig(device="cpu")))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "only 512 files" in "\n".join(finding.text for finding in found)


@pytest.mark.parametrize(("flags", "warned"), [("fpu avx2", True), ("fpu avx512_bf16", False), ("amx_bf16", False)])
def test_a_cpu_that_has_to_emulate_bfloat16(
    flags: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(module, "_CPUINFO", tmp_path / "cpuinfo")
    found = list(check_hardware(LaunchConfig(device="cpu"), Fsdp2Config(param_dtype="bfloat16")))
    assert any("shard=float32" in finding.text for finding in found) == warned


def test_gpus_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="finds no GPU"):
        list(check_hardware(LaunchConfig(device="cuda"), Fsdp2Config()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds the GPUs of this machine")
def test_gpus_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = LaunchConfig(device="auto")
    assert not any("driver" in finding.text for finding in check_hardware(cpu, Fsdp2Config(param_dtype="float32")))
    (tmp_path / "version").write_text("NVRM version: 570.86\n")
    monkeypatch.setattr(module, "_DRIVER", tmp_path / "version")
    first = next(iter(check_hardware(cpu, Fsdp2Config(param_dtype="float32"))))
    assert first.mark == WARNING
    assert ("built without CUDA" if torch.version.cuda is None else "older than CUDA") in first.text
