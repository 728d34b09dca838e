"""Power cuts at every moment of some saves: a step that was said to be safe is whole, whatever was not synced."""

from __future__ import annotations

import filecmp
import os
import pickle
import random
import shutil
import time
from pathlib import Path

import pytest

from fsdp_shard.distributed import DistributedContext
from tests.faults.counts import count
from tests.faults.disk import Disk, Operation, layer
from tests.faults.saves import LONG, Ranks, problems, save_on

_CHOICES = [("synced", "dropped"), ("now", "dropped"), ("now", "zeroed"), ("synced", "zeroed"), ("any", "any")]
_NUM_STATES = 200  # both layouts, in the short form; the long one has all there are


def _traced_saves(place: Path, disk: Path, layout: str) -> list[Operation]:
    """Four saves, of which two are deleted again, as operations of both ranks in the order of time."""

    def work(context: DistributedContext) -> None:
        trace: list[Operation] = []

        def safe(step: int) -> None:
            trace.append((time.monotonic_ns(), "safe", (step,)))

        with layer(disk, trace):
            save_on(context, disk / "run" / "checkpoints", range(1, 5), layout=layout, small=True, saved=safe)
        (place / f"trace-{context.rank}").write_bytes(pickle.dumps(trace))

    assert Ranks(place, work).wait(60) == [0, 0]
    # What the test itself has written in the process above.
    traces = [pickle.loads((place / f"trace-{rank}").read_bytes()) for rank in (0, 1)]
    return sorted((operation for trace in traces for operation in trace), key=lambda operation: operation[0])


@pytest.mark.long
@pytest.mark.parametrize("layout", ["sharded", "gathered"])
def test_no_power_cut_loses_a_step(layout: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    trace = _traced_saves(tmp_path, disk, layout)
    cuts = [(length, choice) for length in range(len(trace) + 1) for choice in _CHOICES]
    chance = random.Random(layout)
    chosen = set(cuts if LONG else chance.sample(cuts, min(len(cuts), _NUM_STATES // 2)))
    assert len(chosen) >= 100

    replayed, safe, left = Disk(disk), 0, tmp_path / "left"
    for length in range(len(trace) + 1):
        for choice in _CHOICES:
            if (length, choice) not in chosen:
                continue
            replayed.leave(left, *choice, chance)
            wrong = problems(left / "run" / "checkpoints", at_least=safe)
            count(f"power cut, {layout}", failed=bool(wrong))
            assert not wrong, (length, trace[max(length - 3, 0) : length], choice, wrong)
            shutil.rmtree(left)
        if length < len(trace):
            if trace[length][1] == "safe":
                safe = trace[length][2][0]
            else:
                replayed.apply(trace[length])

    replayed.leave(left, "now", "now", chance)
    assert _differences(disk, left) == [], "the layer does not see all that happens"
    shutil.rmtree(left)
    replayed.leave(left, "synced", "dropped", chance)
    assert safe == 4
    assert not problems(left / "run" / "checkpoints", at_least=4)


def _differences(one: Path, other: Path) -> list[str]:
    compared = filecmp.dircmp(one, other)
    found = [*compared.left_only, *compared.right_only, *compared.diff_files, *compared.funny_files]
    for name in compared.common_dirs:
        found += [os.path.join(name, inner) for inner in _differences(one / name, other / name)]
    return found
