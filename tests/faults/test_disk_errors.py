"""A disk that fails at each operation of a save, on either rank: one error on all ranks, and earlier steps stay."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import StepStore, save_step
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import SaveError
from tests.faults.counts import count
from tests.faults.disk import layer
from tests.faults.saves import LONG, Ranks, State, problems

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EFBIG)
_FILE_LIMIT = 1000

Outcome = tuple[str, str, str, list[str]]  # what failed, with which errno, what was raised, what is broken now


def _failing_saves(place: Path, layout: str, victim: int) -> list[list[Outcome]]:
    """Step 1, and then step 2 again and again: it fails at the first operation of the victim, the second, and so on."""
    root = place / "checkpoints"

    def work(context: DistributedContext) -> None:
        store, state, outcomes = StepStore(root), State(context.rank, small=True), []
        save_step(context, store, 1, state.set(1), layout=layout)
        for wanted in range(1000):
            seen, failed = 0, ("", "")

            def fail(name: str, path: str, wanted: int = wanted) -> int | None:
                nonlocal seen, failed
                seen += 1
                if context.rank != victim or seen != wanted + 1:
                    return None
                number = errno.EIO if name == "fsync" else _ERRORS[wanted % len(_ERRORS)]
                failed = f"{name} {Path(path).name}", errno.errorcode[number]
                return number

            raised = ""
            try:
                with layer(root, fail=fail):
                    save_step(context, store, 2, state.set(2), layout=layout)
            except SaveError as error:
                raised = str(error)
            failed = context.broadcast_object(failed, source=victim)
            if not failed[0]:  # the save has fewer operations than that
                break
            broken = problems(root, at_least=1) if context.is_main else []
            outcomes.append((*failed, raised, broken))
            context.barrier()
            if context.is_main:  # it may have failed after the commit
                shutil.rmtree(store.path(2), ignore_errors=True)
            context.barrier()
        (place / f"outcomes-{context.rank}").write_bytes(pickle.dumps(outcomes))

    assert Ranks(place, work).wait(150) == [0, 0]
    return [pickle.loads((place / f"outcomes-{rank}").read_bytes()) for rank in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "victim"), [("sharded", 0), ("gathered", 1), ("sharded", 1), ("gathered", 0)])
def test_each_operation_that_fails_is_one_error_on_all_ranks(layout: str, victim: int, tmp_path: Path) -> None:
    first, second = _failing_saves(tmp_path, layout, victim)
    assert len(first) == len(second) >= (20 if victim == 0 else 5)
    for (failed, number, raised, broken), (_, _, other, _) in zip(first, second, strict=True):
        count(f"disk error, rank {victim}, {layout}", failed=bool(broken))
        assert not broken, (failed, broken)
        assert raised == other, failed
        # What is left is removed by the next run, and a directory that both ranks make may be the other one's.
        if failed.startswith("remove") or (failed == "mkdir optimizer" and not raised):
            continue
        assert number in raised, (failed, number, raised)
        assert failed.split()[1] in raised, (failed, raised)


def test_a_real_limit_on_the_size_of_files(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"

    def work(context: DistributedContext) -> None:
        store, state = StepStore(root), State(context.rank, small=True)
        save_step(context, store, 1, state.set(1), layout="sharded")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if context.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_LIMIT, limits[1]))
        try:
            save_step(context, store, 2, state.set(2), layout="sharded")
        except SaveError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            (tmp_path / f"raised-{context.rank}").write_text(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        save_step(context, store, 3, state.set(3), layout="sharded")

    assert Ranks(tmp_path, work).wait(60) == [0, 0]
    for rank in (0, 1):
        raised = (tmp_path / f"raised-{rank}").read_text()
        assert "EFBIG" in raised
        assert "shard-00001-of-00002.safetensors" in raised
    assert StepStore(root).steps() == [1, 3]
    assert not problems(root, at_least=3)
    count("real EFBIG")


@pytest.mark.skipif(not LONG or os.geteuid() != 0, reason="mounts a small file system, in the long form as root")
@pytest.mark.parametrize("layout", ["sharded", "gathered"])
def test_a_disk_that_is_really_full(layout: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(root)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")

    def work(context: DistributedContext) -> None:
        store, state = StepStore(root), State(context.rank)
        for step in range(1, 10):
            try:
                save_step(context, store, step, state.set(step), layout=layout)
            except SaveError as error:
                (tmp_path / f"raised-{context.rank}").write_text(str(error))
                return

    try:
        assert Ranks(tmp_path, work).wait(60) == [0, 0]
        assert StepStore(root).steps() == [1, 2]
        assert not problems(root, at_least=2)
        assert "ENOSPC" in (tmp_path / "raised-0").read_text()
        assert (tmp_path / "raised-0").read_text() == (tmp_path / "raised-1").read_text()
        count("real ENOSPC")
    finally:
        subprocess.run(["umount", str(root)], check=True)
