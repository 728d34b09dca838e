"""The pictures of a plan: timeline.png, and plan.html, a self-contained page without scripts.

jinja2 escapes all names in the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fsdp_shard.planning.memory_plan import HostMemory, MemoryPlan
from fsdp_shard.planning.pictures import timeline as timeline_layout, treemap as treemap_layout
from fsdp_shard.planning.pictures.timeline import Timeline, color_of, draw_png, lay_out
from fsdp_shard.planning.pictures.treemap import treemap
from fsdp_shard.planning.report import rank_rows, summary_lines
from fsdp_shard.planning.step.unit_holdings import UnitHolding
from fsdp_shard.utils import format_size, printable, render_page, write_atomically

PAGE, PICTURE = "plan.html", "timeline.png"
_FOLDER = Path(__file__).parent
_UNIT_TERMS = ("parameters", "gradients", "optimizer", "average")


def write_pictures(
    plan: MemoryPlan, memory_bytes: int | None, directory: Path, name: str, host: HostMemory | None = None
) -> str | None:
    """Write plan.html, and timeline.png if matplotlib is installed and there is a peak.

    Args:
        plan: The plan.
        memory_bytes: The memory of a device, if known.
        directory: An existing directory to write to.
        name: What is planned, such as a model's path.
        host: The host memory of a machine, if known.

    Returns:
        A sentence explaining why there is no timeline.png; None if there is one.
    """
    fullest = plan.fullest
    timeline = None if fullest.peak is None else lay_out(fullest.snapshots, memory_bytes)
    write_atomically(directory / PAGE, plan_page(plan, timeline, memory_bytes, name, host).encode())
    if timeline is None:
        return f"There is no {PICTURE}: {plan.problem}."
    if find_spec("matplotlib") is None:
        return f"There is no {PICTURE}, which needs matplotlib (the extra `plots`); the timeline is in {PAGE} too."
    draw_png(timeline, directory / PICTURE, f"{plan.model_class}: a step of rank {fullest.rank}")
    return None


def plan_page(
    plan: MemoryPlan, timeline: Timeline | None, memory_bytes: int | None, name: str, host: HostMemory | None = None
) -> str:
    """The page as HTML."""
    units = plan.units_of(plan.fullest.rank)
    return render_page(
        _FOLDER / "plan_page.html.jinja",
        _FOLDER / "plan_page.css",
        title=printable(f"{plan.model_class}, {name}"),
        lines=summary_lines(plan, memory_bytes, host),
        ranks=rank_rows(plan.per_rank),
        rank=plan.fullest.rank,
        timeline=timeline,
        plot={key: getattr(timeline_layout, key) for key in ("WIDTH", "HEIGHT", "LEFT", "RIGHT", "TOP", "BOTTOM")},
        tiles=treemap(units),
        map={"WIDTH": treemap_layout.WIDTH, "HEIGHT": treemap_layout.HEIGHT},
        unit_legend=list(color_of(_terms(units)).items()),
        unit_rows=_unit_rows(units),
    )


def _terms(units: Sequence[UnitHolding]) -> list[str]:
    return [term for term in _UNIT_TERMS if any(term in unit.terms for unit in units)]


def _unit_rows(units: Sequence[UnitHolding]) -> list[list[str]]:
    terms = _terms(units)
    rows = [["unit", *terms, "all"]]
    for unit in units:
        sizes = [*(unit.terms.get(term, 0) for term in terms), unit.total_bytes]
        rows.append([printable(unit.fqn or "(root)"), *map(format_size, sizes)])
    return rows
