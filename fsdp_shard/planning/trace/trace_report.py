"""Formats the trace of a step as text and as figures of result.json."""

from typing import Any

from fsdp_shard.planning.step.snapshot import highest_of_phases
from fsdp_shard.planning.trace.step_trace import StepTrace
from fsdp_shard.utils import format_size, format_table

_SMALL_BYTES = 1 << 10  # terms that never exceed this are not shown


def trace_figures(trace: StepTrace, planned_bytes: int | None) -> dict[str, Any]:
    """The figures of a trace in result.json, and the formula's peak for the same rank, if known."""
    peak = trace.peak
    return {
        "rank": trace.rank,
        "peak_bytes": trace.peak_bytes,
        "planned_peak_bytes": planned_bytes,
        "phase": peak.phase,
        "where": peak.where,
        "terms": dict(peak.terms),
        "peak_by_phase": trace.peak_by_phase,
        "state_bytes": dict(trace.state_bytes),
        "host_bytes": trace.host_bytes,
    }


def trace_report(trace: StepTrace, planned_bytes: int | None) -> str:
    """Describe a trace: the highest snapshot of each phase by terms, and its peak compared with the formula's."""
    highest = highest_of_phases(trace.snapshots)
    terms = sorted(
        {name for snapshot in highest.values() for name, size in snapshot.terms.items() if size >= _SMALL_BYTES}
    )
    rows = [["phase", "in", "all", *terms]]
    for phase, snapshot in highest.items():
        sizes = [format_size(snapshot.terms.get(name, 0)) for name in terms]
        rows.append([phase, snapshot.where or "(root)", format_size(snapshot.total_bytes), *sizes])
    line = f"Traced, rank {trace.rank} has at most {format_size(trace.peak_bytes)} at one time, in {trace.peak.phase}"
    if planned_bytes is not None:
        line += f"; the formula has {format_size(planned_bytes)}, {planned_bytes / trace.peak_bytes - 1:+.1%}"
    host = f"{format_size(trace.host_bytes)} of the state is in host memory." if trace.host_bytes else ""
    return "\n".join([*format_table(rows), "", f"{line}. {host}".rstrip()])
