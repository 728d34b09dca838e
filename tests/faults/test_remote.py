"""SIGKILL at each point of an upload and of a deletion on a remote store: what readers find there is whole or absent.

One store is used from kill to kill, so that each run begins with what the one before left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import (
    REMOTE_POINTS,
    RemoteStore,
    StepStore,
    catch_up,
    fetch_latest,
    fetch_step,
    prune_remote,
    save_step,
    upload_step,
)
from fsdp_shard.distributed import DistributedContext, run_on_all, run_on_main
from tests.checkpoint.remotes import Shelf, s3_server, shelf
from tests.faults.counts import count
from tests.faults.saves import Ranks, State, kill_at, problems

_KEEP_LAST = 2


def save_and_upload(context: DistributedContext, root: Path, url: str) -> None:
    """Save and upload steps for ever, from the last one there is on."""
    store, remote, state = StepStore(root), RemoteStore(url), State(context.rank, small=True)
    beside = context.with_new_group(60)
    run_on_main(context, lambda: [store.clean_leftovers(), fetch_latest(remote, store)])
    catch_up(beside, remote, store)
    first = run_on_main(context, store.latest) or 0
    for step in range(first + 1, first + 1000):
        directory = save_step(beside, store, step, state.set(step), layout="sharded", max_shard_bytes=None)
        upload_step(beside, remote, step, directory)

        def tidy(step: int = step) -> None:
            store.prune(_KEEP_LAST)
            prune_remote(remote, step, _KEEP_LAST, None)

        run_on_all(beside, lambda: tidy() if context.is_main else None)


@pytest.fixture(params=["shelf", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "shelf":
        yield shelf(tmp_path) + "/run"
        return
    with s3_server() as bucket:
        yield f"{bucket}/run"


def read_back(url: str, place: Path) -> list[int]:
    """The steps that readers find, each of which must be whole and of one save."""
    shutil.rmtree(place, ignore_errors=True)
    remote, copies = RemoteStore(url), StepStore(place)
    for step in remote.steps():
        fetch_step(remote, step, copies.path(step), replace=False)
    assert problems(place) == []
    assert remote.latest() == copies.latest()
    return copies.steps()


@pytest.mark.long
def test_a_kill_at_each_point_of_an_upload(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, newest = tmp_path / "checkpoints", 0
    kills = [(point, number % 2) for number, point in enumerate(REMOTE_POINTS[:2])]
    kills += [(point, 0) for point in REMOTE_POINTS]
    for number, (point, victim) in enumerate(kills):
        kill_at(monkeypatch, point, victim)
        if number == 3:
            shutil.rmtree(root)  # the machine is lost, too: go on from what the store has
        assert 0 not in Ranks(tmp_path, save_and_upload, root, url).wait(40)
        found = read_back(url, tmp_path / "read")
        count(f"SIGKILL at a point of an upload, {url.partition(':')[0]}", failed=max(found, default=0) < newest)
        assert found, point
        assert found[-1] >= max(newest, 1), "what was committed stays"
        assert len(found) <= _KEEP_LAST + 2, "one uploaded late and one not tidied after, at most"
        newest = found[-1]
    assert newest >= len(kills)


def test_a_kill_within_an_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each single file, the manifest too, and after a file that came only in part."""
    url, root = shelf(tmp_path) + "/run", tmp_path / "checkpoints"
    newest = 0
    for victim, operation, nth in [(0, "put", 2), (1, "put", 1), (1, "put", 3), (0, "pipe", 1), (0, "pipe", 2)]:
        reached: list[str] = []

        def kill(
            name: str, path: str, victim: int = victim, op: str = operation, nth: int = nth, told: list[str] = reached
        ) -> None:
            told.append(name)
            if name == op and os.environ["RANK"] == str(victim) and told.count(op) == nth:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_bytes(b"{") if op == "put" else None
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(Shelf, "before", staticmethod(kill))
        assert 0 not in Ranks(tmp_path, save_and_upload, root, url).wait(40)
        monkeypatch.setattr(Shelf, "before", None)
        found = read_back(url, tmp_path / "read")
        assert (found or [0])[-1] >= newest
        newest = (found or [0])[-1]
    assert newest >= 1
