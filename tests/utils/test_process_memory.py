"""Memory of this process: its peak, and what training frees and takes again."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from tests.support.commands import run

_PROGRAM = """
import ctypes
import resource
import torch
from tests.support.ranks import on_ranks
from tests.training.tiny_run import Run
from fsdp_shard.training import TrainConfig
from fsdp_shard.utils import keep_freed_memory

class Info(ctypes.Structure):  # of <malloc.h>
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

def mapped_for_itself(context):
    before = mallinfo().hblkhd
    tensor = torch.ones(30_000_000, dtype=torch.uint8)
    return mallinfo().hblkhd - before

def after_training(context):
    keep_freed_memory()
    Run(context).go(TrainConfig(steps=1, global_batch_size=4))
    mapped = mapped_for_itself(context)
    for count in (6, 12, 12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            kept = [torch.ones(20_000_000, dtype=torch.uint8) for _ in range(count)]
            del kept
    return mapped, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(*on_ranks(1, mapped_for_itself), *on_ranks(1, after_training)[0])
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc tells since 2.33, and no other does")
def test_tensors_that_come_and_go_while_training_take_no_new_pages() -> None:
    done = run([sys.executable, "-c", _PROGRAM], Path(__file__).parents[2])
    assert done.status == 0, done.err
    usual, mapped, pages = map(int, done.out.split())
    assert usual > 29_000_000
    assert mapped == 0
    assert pages < 1_000


def test_a_process_whose_name_is_not_ascii_measures_its_memory() -> None:
    program = (
        "from pathlib import Path; from fsdp_shard.utils import peak_resident_bytes; "
        "Path('/proc/self/comm').write_bytes('имя'.encode()); print(peak_resident_bytes())"
    )
    done = run([sys.executable, "-c", program], Path(__file__).parents[2])
    assert done.status == 0, done.err
    assert int(done.out) > 1 << 20
