"""The start of a run: ranks wait for one that downloads the step to resume from, however long it takes."""

from __future__ import annotations

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
from fsdp_shard.training.stop_signal import StopSignal
from tests.support.ranks import on_ranks


def _start(context: DistributedContext, config: FinetuneConfig) -> Path | None:
    impatient = replace(context, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=1)))
    return run_setup._find_start(config, impatient, StopSignal()).step


def test_ranks_wait_for_one_that_downloads_a_step(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large step comes from a remote store in more than `launch.timeout_seconds`."""
    monkeypatch.setattr(resume, "find_step", lambda *_, **__: time.sleep(3))
    config = FinetuneConfig(
        model=ModelConfig(path=str(tiny_model)),
        run_dir=str(tmp_path),
        resume="auto",
        checkpoint=CheckpointConfig(remote="memory://store/run"),
    )
    assert on_ranks(2, _start, config) == [None, None]
