"""Formats a memory plan as text and as figures of result.json."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from fsdp_shard.models import Block
from fsdp_shard.planning.memory_plan import HostMemory, MemoryPlan, RankMemory
from fsdp_shard.utils import format_count, format_number, format_size, format_table, printable

_OPTIONAL = ("average", "reference", "teacher")  # shown if the run has them
_COLUMNS = ("parameters", "gradients", "optimizer", *_OPTIONAL, "unsharded", "activations", "peak")
_NOT_COUNTED = (
    "Planned for ranks on CPUs. Not counted: what is not a tensor, such as Python and libraries. For GPUs, set "
    "launch.device=cuda or a preset such as device=h100."
)
_MAX_UNEVEN = 3  # to name
_UNEVEN_RATIO = 1.005


def figures(plan: MemoryPlan, memory_bytes: int | None, host: HostMemory | None) -> dict[str, Any]:
    """The figures of a plan in result.json, for devices with `memory_bytes` and machines with `host` memory."""
    fits = plan.fits(memory_bytes)
    if host is not None and not host.fits(plan):
        fits = False
    return {
        "num_params": plan.num_params,
        "num_trained_params": plan.num_trained,
        "bytes_by_dtype": plan.bytes_by_dtype,
        "blocks": [asdict(block) for block in plan.blocks],
        "per_rank": [_rank_figures(rank) for rank in plan.per_rank],
        "peak_bytes": plan.peak_bytes,
        "overhead_bytes": dict(plan.overhead),
        "device_memory_bytes": memory_bytes,
        "host_memory_bytes": None if host is None else host.num_bytes,
        "fits": fits,
        "balance": plan.balance,
    }


_FIGURES = (
    "rank", "parameters_bytes", "gradients_bytes", "optimizer_bytes", "unsharded_bytes", "activations_bytes",
    "host_bytes", "staging_bytes", "needed_host_bytes", "reference_bytes", "average_bytes", "teacher_bytes",
    "peak_bytes",
)  # fmt: skip


def _rank_figures(rank: RankMemory) -> dict[str, Any]:
    """The figures of a rank, including its peak snapshot."""
    peak = None if rank.peak is None else asdict(rank.peak)
    return {name: getattr(rank, name) for name in _FIGURES} | {"peak": peak}


def plan_report(plan: MemoryPlan, memory_bytes: int | None, host: HostMemory | None = None) -> str:
    """Describe the plan: the model, its blocks, the ranks, and whether they fit in `memory_bytes` and `host`."""
    sizes = ", ".join(f"{format_size(num_bytes)} in {dtype}" for dtype, num_bytes in plan.bytes_by_dtype.items())
    head = f"{plan.model_class}: {format_number(plan.num_params)} parameters, {sizes}"
    if plan.num_trained < plan.num_params:
        head += f"; {format_number(plan.num_trained)} are trained, the others are frozen"
    return "\n".join(
        [
            head,
            "",
            *format_table(_block_rows(plan.blocks)),
            "",
            *([*plan.tree, ""] if plan.tree else ()),
            *format_table(rank_rows(plan.per_rank)),
            "",
            *summary_lines(plan, memory_bytes, host),
        ]
    )


def summary_lines(plan: MemoryPlan, memory_bytes: int | None, host: HostMemory | None) -> list[str]:
    """Lines on the peak, host memory, uneven shards, and whether the run fits in `memory_bytes` and `host`."""
    lines = [*_host_lines(plan), *_peak_lines(plan), *_uneven_lines(plan)]
    for name, why in plan.uncounted.items():
        lines.append(f"The phase {name} could not be measured ({why}); it is not counted.")
    lines.append(_verdict(plan, memory_bytes))
    if host is not None and not host.fits(plan):
        lines.append(f"Does NOT fit in the host memory of a machine: {host_misfit(plan, host)}.")
    return lines


def host_misfit(plan: MemoryPlan, host: HostMemory) -> str:
    """The shortage of host memory for the ranks of a machine, in a sentence."""
    needed = host.needed_by(plan)
    ranks = format_count(min(host.num_ranks, len(plan.per_rank)), "rank")
    return f"{ranks} need {format_size(needed)}, of {format_size(host.num_bytes)} (device.host_memory)"


def _host_lines(plan: MemoryPlan) -> list[str]:
    """Lines on host memory that ranks need in addition to their processes."""
    staging = max(rank.staging_bytes for rank in plan.per_rank)
    most = max(rank.needed_host_bytes for rank in plan.per_rank)
    lines = []
    if staging:
        where = "" if any("staging" in rank.rank_bytes for rank in plan.per_rank) else ", not included in the peak"
        lines.append(
            f"Asynchronous saves copy up to {format_size(staging)} per rank into host memory{where}; "
            f"checkpoint.asynchronous=false avoids the copy."
        )
    if most > staging:
        lines.append(
            f"With what is offloaded, a rank needs up to {format_size(most)} of host memory, in page-locked blocks of "
            f"powers of two."
        )
    return lines


def _uneven_lines(plan: MemoryPlan) -> list[str]:
    """Lines on units with uneven shards, those with the most bytes above the mean first."""
    uneven = () if plan.shards is None else plan.shards.uneven()
    if not uneven:
        return []
    found = [unit for unit in uneven if unit.ratio >= _UNEVEN_RATIO]
    if not found:
        return [f"Parameters of {format_count(len(uneven), 'unit')} are uneven over the ranks, by less than 0.5 %."]
    groups = [list(group) for _, group in groupby(found, key=lambda unit: (unit.most_bytes, unit.mean_bytes))]
    parts = []
    for group in groups[:_MAX_UNEVEN]:
        first, last = (printable(unit.fqn or "(root)") for unit in (group[0], group[-1]))
        extra = format_size(group[0].most_bytes - group[0].mean_bytes)
        name = first if len(group) == 1 else f"{first} ... {last}, each"
        parts.append(f"{name} {group[0].ratio:.2f} x the mean ({extra} more)")
    if others := len(uneven) - sum(map(len, groups[:_MAX_UNEVEN])):
        parts.append(f"and less in {format_count(others, 'other unit')}")
    return [f"Parameters are uneven over the ranks in: {', '.join(parts)}."]


def _size(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else format_size(num_bytes)


def _block_rows(blocks: Sequence[Block]) -> list[list[str]]:
    """A row for each run of blocks of one class and size."""
    rows = [["block", "class", "number", "parameters each", "bytes each"]]
    for (cls, num_params, num_bytes), run in groupby(blocks, key=lambda b: (b.cls, b.num_params, b.num_bytes)):
        found = list(run)
        name = found[0].fqn if len(found) == 1 else f"{found[0].fqn} ... {found[-1].fqn}"
        sizes = [format_number(num_params), format_size(num_bytes)] if num_params else ["tied", "tied"]
        rows.append([name or "(root)", cls, str(len(found)), *sizes])
    return rows


def rank_rows(ranks: Sequence[RankMemory]) -> list[list[str]]:
    """The table by rank: a header, and a row for each run of ranks with equal figures."""
    present = {name for name in _OPTIONAL if any(getattr(rank, f"{name}_bytes") for rank in ranks)}
    columns = [column for column in _COLUMNS if column not in _OPTIONAL or column in present]
    rows = [["rank", *columns]]
    for _, run in groupby(ranks, key=lambda rank: [getattr(rank, f"{column}_bytes") for column in columns]):
        found = list(run)
        name = str(found[0].rank) if len(found) == 1 else f"{found[0].rank} to {found[-1].rank}"
        rows.append([name, *(_size(getattr(found[0], f"{column}_bytes")) for column in columns)])
    return rows


def _peak_lines(plan: MemoryPlan) -> list[str]:
    """Lines on the peak of the fullest rank: when, its terms, and what it excludes; empty if unknown."""
    if plan.peak_bytes is None or (peak := plan.fullest.peak) is None:
        return []
    where = f" at {peak.where}" if peak.where else ""
    first = f"The peak of rank {plan.fullest.rank} is in the phase {peak.phase}{where}: "
    sizes = ", ".join(f"{name} {format_size(num)}" for name, num in plan.overhead.items() if num)
    besides = f"Besides tensors a GPU holds about: {sizes}. The peak does not include it; whether it fits does."
    terms = sorted(peak.terms.items(), key=lambda term: -term[1])
    first += ", ".join(f"{name} {format_size(num)}" for name, num in terms if num)
    return [f"{first}.", besides if plan.overhead else _NOT_COUNTED]


def _verdict(plan: MemoryPlan, memory_bytes: int | None) -> str:
    if plan.peak_bytes is None:
        return f"Activations could not be measured ({plan.problem}), so there is no peak."
    balance = f"The fullest rank holds {plan.balance:.2f} x the mean."
    if memory_bytes is None:
        return f"{balance} Set device.memory, such as device.memory=80GiB, to see whether it fits."
    memory, needed = format_size(memory_bytes), plan.needed_bytes
    if plan.fits(memory_bytes):
        return f"{balance} Fits in {memory} with {format_size(memory_bytes - needed)} to spare."
    return f"{balance} Does NOT fit in {memory}: {format_size(needed - memory_bytes)} too much."
