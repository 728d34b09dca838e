"""One run in a run directory at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.training.checkpoints.run_lock import check_free, run_lock
from tests.support.ranks import on_ranks


def lock_twice(context: DistributedContext, run_dir: str) -> tuple[int, str]:
    """What the second run in a directory is told, while the first is in it; then a third one comes in."""
    said = ""
    with run_lock(run_dir, context):
        try:
            with run_lock(run_dir, context):
                pass
        except ConfigError as error:
            said = str(error)
    with run_lock(run_dir, context):
        return os.getpid(), said


def test_a_second_run_is_told_who_is_there(tmp_path: Path) -> None:
    (first, said), (_, other) = on_ranks(2, lock_twice, str(tmp_path / "run"))
    assert f"is in use by another run (process {first} on {socket.gethostname()}, since " in said
    assert said == other


def take_turns(context: DistributedContext, run_dir: str) -> int:
    """How often this rank was in a directory that both want, each for itself; never at once."""
    group = dist.new_group([context.rank], use_local_synchronization=True)
    alone, marker, mine = replace(context, rank=0, world_size=1, group=group), Path(run_dir) / "inside", 0
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        try:
            with run_lock(run_dir, alone):
                with marker.open("x"):
                    mine += 1
                marker.unlink()
        except ConfigError:
            pass
    return mine


@pytest.mark.long
def test_a_lock_that_goes_with_its_run_is_never_had_twice(tmp_path: Path) -> None:
    counts = on_ranks(2, take_turns, str(tmp_path))
    assert min(counts) > 10


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not check_free(str(tmp_path), may_join=False)
    ((_, said),) = on_ranks(1, lock_twice, str(tmp_path))
    assert said == ""


def look(context: DistributedContext, run_dir: str) -> tuple[bool, str]:
    """Whether a machine may come to the run in a directory, and what another run is told."""
    assert not check_free(run_dir, may_join=False)
    context.barrier()
    with run_lock(run_dir, context):
        try:
            check_free(run_dir, may_join=False)
        except ConfigError as error:
            return check_free(run_dir, may_join=True), str(error)
    return False, ""


def test_who_is_there_can_be_asked_before_anything_is_written(tmp_path: Path) -> None:
    joins, said = on_ranks(1, look, str(tmp_path / "run"))[0]
    assert joins
    assert "is in use by another run (process" in said


def test_what_a_dead_run_left_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"host": "gone", "pid": 1, "since": "long ago"}')
    on_ranks(1, lock_twice, str(tmp_path))
    assert not (tmp_path / ".lock").exists(), "it is gone with the run"
