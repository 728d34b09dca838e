"""One run in a run directory at a time."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.training.lock import check_free, run_lock
from tests.ranks import on_ranks


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
