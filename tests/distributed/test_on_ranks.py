"""The ranks of these tests are started again only if they never met, and that is not done in silence."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.distributed import DistributedContext, init_distributed
from tests.support import ranks
from tests.support.ranks import on_ranks


def _counted(context: DistributedContext, calls: Path) -> int:
    (calls / f"{context.rank} {time.monotonic_ns()}").touch()
    return context.rank


def _failing(context: DistributedContext, calls: Path) -> None:
    _counted(context, calls)
    context.barrier()
    raise RuntimeError("Wait timeout, as of a group that only one rank makes: ProcessGroupGloo(")


def _late_once(calls: Path) -> Callable[..., Any]:
    """`init_distributed` with a short timeout; the first process that comes never meets the others."""

    def init(device: str, replicas: int, timeout_seconds: float, **options: Any) -> Any:
        try:
            (calls / "late").mkdir()
            time.sleep(60)
        except FileExistsError:
            pass
        return init_distributed(device, replicas, timeout_seconds=5, **options)

    return init


def test_what_the_function_raises_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="only one rank makes"):
        on_ranks(2, _failing, tmp_path)
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.long
def test_ranks_that_do_not_meet_are_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "init_distributed", _late_once(tmp_path))
    with pytest.warns(UserWarning, match="started once more: rank . waited for the others"):
        assert on_ranks(2, _counted, tmp_path) == [0, 1]
    assert len([*tmp_path.iterdir()]) == 3
