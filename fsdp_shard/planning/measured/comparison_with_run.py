"""Compares a plan with its run's measurements: the difference of each figure, and the largest difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_shard.planning.measured.measured_run import MeasuredRun
from fsdp_shard.planning.memory_plan import MemoryPlan
from fsdp_shard.utils import format_size, format_table, printable

_TOLERANCE = 0.05
_MAX_RANKS = 8  # shown
_ON_CPU = (
    "On CPUs, what is measured is the resident memory of a process at its peak, less what it was before the weights "
    "were loaded. Besides the tensors that are planned, it has what Python, libraries and collectives allocate "
    "meanwhile, what saves copy, and freed memory that the C library keeps."
)
_NO_START = (
    "The run did not record its memory before the weights were loaded, so that its peak, the resident memory of a "
    "process with Python and all libraries in it, cannot be compared with a plan of tensors."
)
_ON_GPU = "On GPUs, what is measured is the most that torch's allocator has given to tensors."


@dataclass(frozen=True)
class ComparedFigure:
    """A figure: its term, the rank that it is of (None: the fullest rank, or of the optimizer a replica), and bytes."""

    term: str
    rank: int | None
    planned: int
    measured: int

    @property
    def difference(self) -> float:
        """The excess of the plan over the measurement, relative to the measurement."""
        if not self.measured:
            return 0.0 if not self.planned else float("inf")
        return self.planned / self.measured - 1.0

    @property
    def percent(self) -> str:
        """The difference as text."""
        return f"{self.difference:+.1%}" if math.isfinite(self.difference) else "n/a"

    def describe(self) -> str:
        """The figure in words."""
        where = "" if self.rank is None else f" of rank {self.rank}"
        sizes = f"planned {format_size(self.planned)}, measured {format_size(self.measured)}"
        return f"{self.term}{where}, {sizes} ({self.percent})"


def compare_with_run(plan: MemoryPlan, run: MeasuredRun, num_replicas: int = 1) -> list[ComparedFigure]:
    """Compare what both have: parameters, the optimizer's state, and the peak of each rank.

    Args:
        plan: The plan of the run's settings.
        run: The run.
        num_replicas: Number of copies of the model. Ranks share the work of saving them, so that the files of several
            are compared with one replica as a whole.
    """
    rows = []
    if run.shard_bytes is not None:
        most = max(rank.parameters_bytes for rank in plan.per_rank)
        rows.append(ComparedFigure("parameters", None, most, run.shard_bytes))
    if run.optimizer and num_replicas > 1:
        state = sum(rank.optimizer_bytes for rank in plan.per_rank) // num_replicas
        rows.append(ComparedFigure("optimizer", None, state, sum(run.optimizer)))
    elif len(run.optimizer) == len(plan.per_rank):
        sizes = zip(plan.per_rank, run.optimizer, strict=True)
        rows += [ComparedFigure("optimizer", rank.rank, rank.optimizer_bytes, size) for rank, size in sizes]
    for rank, measured in zip(plan.per_rank, _peaks(run), strict=False):
        if rank.peak_bytes is not None:
            rows.append(
                ComparedFigure("peak", rank.rank, rank.peak_bytes + _host_bytes(rank.host_bytes, run), measured)
            )
    return rows


def _host_bytes(num_bytes: int, run: MeasuredRun) -> int:
    """Offloaded bytes that the measurement includes: a process's memory includes them, a GPU's does not."""
    return 0 if run.device == "cuda" else num_bytes


def _peaks(run: MeasuredRun) -> list[int]:
    """The peak of each rank, if it is comparable with a plan."""
    if run.device == "cuda":
        return [*run.peaks]
    if len(run.before) != len(run.peaks):
        return []
    return [max(0, peak - before) for peak, before in zip(run.peaks, run.before, strict=True)]


def comparison_figures(rows: Sequence[ComparedFigure], run: MeasuredRun) -> dict[str, Any]:
    """The figures of a comparison in result.json."""
    return {
        "run": str(run.path),
        "device": run.device,
        "compared": [
            asdict(row) | {"difference": row.difference if math.isfinite(row.difference) else None} for row in rows
        ],
        "step_seconds": run.step_seconds,
        "not_planned": list(run.not_planned),
    }


def comparison_text(
    rows: Sequence[ComparedFigure], plan: MemoryPlan, run: MeasuredRun, figures: Mapping[str, Any]
) -> str:
    """The comparison as text.

    Args:
        rows: The compared figures.
        plan: The plan.
        run: The run.
        figures: The figures of the plan, including the bound on a step's time if planned.
    """
    table = [["term", "rank", "planned", "measured", "difference"]]
    for row in _shown(rows):
        rank = str(row.rank) if row.rank is not None else "all" if row.term == "optimizer" else "most"
        sizes = [format_size(row.planned), format_size(row.measured)]
        table.append([row.term, rank, *sizes, row.percent])
    lines = [f"Planned, and measured by {printable(str(run.path))}:", ""]
    lines += [*format_table(table), ""] if rows else []
    lines += [_verdict(rows, plan), *_step_lines(run, figures), _what_is_measured(run)]
    if run.not_planned:
        lines.append(f"The plan does not know of: {printable('; '.join(run.not_planned))}.")
    return "\n".join(lines)


def _shown(rows: Sequence[ComparedFigure]) -> list[ComparedFigure]:
    """The ranks with the largest differences, for each term."""
    shown = []
    for term in dict.fromkeys(row.term for row in rows):
        of_term = [row for row in rows if row.term == term]
        worst = sorted(of_term, key=lambda row: -abs(row.difference))[:_MAX_RANKS]
        shown += [row for row in of_term if row in worst]
    return shown


def _verdict(rows: Sequence[ComparedFigure], plan: MemoryPlan) -> str:
    if not rows:
        return "The run recorded nothing that the plan can be compared with."
    worst = max(rows, key=lambda row: abs(row.difference))
    if abs(worst.difference) <= _TOLERANCE:
        return f"They agree within {max(0.001, abs(worst.difference)):.1%}."
    text = f"Off by most: {worst.describe()}."
    others = [row for row in rows if row.term != "peak"]
    peak = plan.per_rank[worst.rank or 0].peak
    if worst.term == "peak" and others and peak and all(abs(row.difference) <= _TOLERANCE for row in others):
        state = plan.per_rank[worst.rank or 0].state_bytes
        rest = ", ".join(
            f"{term} {format_size(num)}"
            for term, num in sorted(peak.terms.items(), key=lambda item: -item[1])
            if term not in ("parameters", "gradients", "optimizer", "average")
        )
        text += (
            f" {_agreeing(others)}, so the difference is in short-lived tensors: planned {rest}; "
            f"measured {format_size(max(0, worst.measured - state))} besides the state."
        )
    return text


def _agreeing(rows: Sequence[ComparedFigure]) -> str:
    terms = [*dict.fromkeys(row.term for row in rows)]
    return " and ".join(terms).capitalize() + (" agree" if "parameters" in terms else " agrees")


def _step_lines(run: MeasuredRun, figures: Mapping[str, Any]) -> list[str]:
    """The seconds per step, and their lower bound if the plan has one."""
    if run.step_seconds is None:
        return []
    step = figures.get("step")
    time = step.get("time") if isinstance(step, dict) else None
    bound = ""
    if time is not None:
        bound = f", {run.step_seconds / time['seconds']:.1f} x the bound of {time['seconds']:.3g} s"
    return [f"A step took {run.step_seconds:.3g} s (the median){bound}."]


def _what_is_measured(run: MeasuredRun) -> str:
    if run.device == "cuda":
        return _ON_GPU
    if not run.peaks and run.worst_peak is not None:
        text = f"The run has not ended, so that the peak of each rank is not known; up to {format_size(run.worst_peak)}"
        return f"{text} was measured in all."
    return _ON_CPU if len(run.before) == len(run.peaks) > 0 else _NO_START
