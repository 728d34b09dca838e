"""The start of a run: ranks wait for one that downloads the step to resume from, and its peak memory is its own."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_shard.checkpoint import CheckpointConfig
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import ModelConfig
from fsdp_shard.training import run_setup
from fsdp_shard.training.checkpoints import resume
from fsdp_shard.training.checkpoints.run_lock import RunLock
from fsdp_shard.training.stop_signal import StopSignal
from tests.support.commands import run
from tests.support.ranks import on_ranks


def _start(context: DistributedContext, config: FinetuneConfig) -> Path | None:
    impatient = replace(context, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=4)))
    return run_setup._find_start(config, impatient, StopSignal(), RunLock()).resume_from


@pytest.mark.long
def test_ranks_wait_for_one_that_downloads_a_step(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large step comes from a remote store in more than `launch.timeout_seconds`."""
    monkeypatch.setattr(resume, "find_step", lambda *_, **__: time.sleep(6))
    config = FinetuneConfig(
        model=ModelConfig(path=str(tiny_model)),
        run_dir=str(tmp_path),
        resume="auto",
        checkpoint=CheckpointConfig(remote="memory://store/run"),
    )
    assert on_ranks(2, _start, config) == [None, None]


def _run_dirs(context: DistributedContext) -> tuple[str, str]:
    config = FinetuneConfig()
    own = config.run_dir
    run_setup._share_run_dir(config, context)
    return own, config.run_dir


@pytest.mark.long
def test_ranks_share_a_run_dir_that_is_named_by_date() -> None:
    (first, shared), (second, same) = on_ranks(2, _run_dirs)
    assert first != second
    assert shared == same == first


_AFTER_ANOTHER = """
import sys
import torch
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import LaunchConfig
from fsdp_shard.models import ModelConfig
from fsdp_shard.training import start_run
from fsdp_shard.utils import device_peak_bytes

torch.ones(400 << 20, dtype=torch.uint8)
before = device_peak_bytes("cpu")
config = FinetuneConfig(
    model=ModelConfig(sys.argv[1]), data=DataConfig(path="text.txt"), run_dir="run", launch=LaunchConfig(device="cpu")
)
with start_run(config):
    print(before - device_peak_bytes("cpu"))
"""


@pytest.mark.long
def test_the_peak_memory_of_a_run_is_not_that_of_one_before_it_in_its_process(tmp_path: Path, tiny_model: Path) -> None:
    done = run([sys.executable, "-c", _AFTER_ANOTHER, tiny_model], tmp_path)
    assert int(done.out) > 300 << 20, done.err
