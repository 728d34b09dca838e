"""What happens inside chosen steps: a trace of torch's profiler, and where memory went. Nothing at all in other steps.

In RUN_DIR/profile/, for each such step and rank: `step-N-rank-R.json.gz`, a trace for Perfetto or chrome://tracing that
has the memory in use too; `step-N-rank-R.txt`, operators by time and by memory; and on a GPU
`step-N-rank-R-memory.html`, each block of memory that was allocated and where, to be opened in a browser. Knows neither
model nor loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fsdp_shard.distributed import DistributedContext

PROFILE = "profile"  # under a run directory
_ROWS = 40


class StepProfiler:
    """Profiles the steps `steps` of the run in `run_dir`, on every rank."""

    def __init__(self, steps: Collection[int], run_dir: str, context: DistributedContext) -> None:
        self._steps, self._directory = frozenset(steps), Path(run_dir) / PROFILE
        self._rank, self._device = context.rank, context.device

    def around(self, step: int) -> AbstractContextManager[None]:
        """The context to make step number `step` in."""
        return self._profiled(step) if step in self._steps else nullcontext()

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        self._directory.mkdir(parents=True, exist_ok=True)
        base = self._directory / f"step-{step:08d}-rank-{self._rank}"
        if self._device.type == "cuda":
            with _memory_history(base.with_name(f"{base.name}-memory.html")), _trace(base, self._device):
                yield
        else:
            with _trace(base, self._device):
                yield


@contextmanager
def _trace(base: Path, device: torch.device) -> Iterator[None]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        yield
        if on_gpu:
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(f"{base}.json.gz")
    base.with_suffix(".txt").write_text(_tables(profiler, device.type), encoding="utf-8")


def _tables(profiler: Any, device: str) -> str:
    operators = profiler.key_averages()
    where = "cpu" if device == "cpu" else "device"
    return "\n\n".join(
        f"{title}\n{operators.table(sort_by=f'self_{where}_{by}', row_limit=_ROWS)}"
        for title, by in (("By time", "time_total"), ("By memory", "memory_usage"))
    )


@contextmanager
def _memory_history(target: Path) -> Iterator[None]:
    """An HTML page, which holds its data itself: torch's own snapshot file is a pickle."""
    import torch
    from torch.cuda import _memory_viz

    torch.cuda.memory._record_memory_history()
    try:
        yield
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    target.write_text(_memory_viz.trace_plot(snapshot), encoding="utf-8")
