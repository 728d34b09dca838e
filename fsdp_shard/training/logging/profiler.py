"""Profiles of selected steps: a trace of torch's profiler, and memory usage.

For each such step and rank, RUN_DIR/profile/ receives `step-N-rank-R.json.gz`, a trace with memory for Perfetto or
chrome://tracing, and `step-N-rank-R.txt`, operators by time and by memory. On a GPU, it also receives
`step-N-rank-R-memory.html`, every allocation and where it was made.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.utils import record_memory_history

PROFILE = "profile"  # under a run directory
_ROWS = 40


@contextmanager
def profile_step(steps: Collection[int], run_dir: str, context: DistributedContext, step: int) -> Iterator[None]:
    """Profile the block, which is `step` of the run in `run_dir`, if it is one of `steps`; on every rank."""
    if step not in steps:
        yield
        return
    base = Path(run_dir) / PROFILE / f"step-{step:08d}-rank-{context.rank}"
    base.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if context.device.type == "cuda":
            stack.enter_context(record_memory_history(base.with_name(f"{base.name}-memory.html")))
        stack.enter_context(_trace(base, context.device))
        yield


@contextmanager
def _trace(base: Path, device: torch.device) -> Iterator[None]:
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # There is only one cycle, so no events are cleared; torch up to 2.13 warns of that unless `acc_events` is passed.
    with profile(activities=activities, profile_memory=True, record_shapes=True, acc_events=True) as profiler:
        yield
        if on_gpu:
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(f"{base}.json.gz")
    base.with_suffix(".txt").write_text(_tables(profiler, "device" if on_gpu else "cpu"), encoding="utf-8")


def _tables(profiler: Any, where: str) -> str:
    operators = profiler.key_averages()
    return "\n\n".join(
        f"{title}\n{operators.table(sort_by=f'self_{where}_{by}', row_limit=_ROWS)}"
        for title, by in (("By time", "time_total"), ("By memory", "memory_usage"))
    )
