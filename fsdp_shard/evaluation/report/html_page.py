"""The report as one self-contained HTML page: it includes its style and script, and nothing else may run.

jinja2 escapes all content from files, and the script receives JSON in a block that is never executed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_shard.evaluation.report import svg_charts
from fsdp_shard.evaluation.report.report_data import Report
from fsdp_shard.evaluation.report.svg_charts import Drawing, draw, style_of
from fsdp_shard.utils import render_page

_FOLDER = Path(__file__).parent
_BOX = {name: getattr(svg_charts, name) for name in ("LEFT", "RIGHT", "TOP", "BOTTOM", "WIDTH", "HEIGHT")}


def to_html(report: Report, reload_seconds: int | None = None) -> str:
    """Return the page.

    Args:
        report: The report.
        reload_seconds: Seconds after which the page reloads itself; None for never.
    """
    charts = [draw(chart, report.runs) for chart in report.charts]
    sweeps = [draw(chart, report.runs) for chart in report.sweeps]
    return render_page(
        _FOLDER / "page.html.jinja",
        _FOLDER / "page.css",
        _FOLDER / "page.js",
        report=report,
        title=report.title,
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        reload_seconds=reload_seconds,
        charts=charts,
        sweeps=sweeps,
        legend=[(name, *style_of(at)) for at, name in enumerate(report.runs)],
        box=_BOX,
        data={"box": _BOX, "charts": [_data(drawing) for drawing in [*charts, *sweeps]]},
    )


def _data(drawing: Drawing) -> dict[str, Any]:
    """The data that the script needs to show values at a position."""
    return {
        "id": drawing.chart.key,
        "x": drawing.x_range,
        "label": drawing.chart.x_label,
        "categories": list(drawing.chart.categories),
        "lines": [{"run": line.number, "name": line.name, "points": _rounded(line.points)} for line in drawing.lines],
    }


def _rounded(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, json.loads(f"{y:.5g}")) for x, y in points]
