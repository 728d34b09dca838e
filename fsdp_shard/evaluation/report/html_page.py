"""The report as one HTML page that asks for nothing else: its style and script are in it, and nothing else may run.

All that comes from files is escaped by jinja2, and what the script gets is JSON in a block that is never executed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fsdp_shard.evaluation.report import svg_charts
from fsdp_shard.evaluation.report.report_data import Report
from fsdp_shard.evaluation.report.svg_charts import Drawing, draw, style_of
from fsdp_shard.utils import format_count, printable

_FOLDER = Path(__file__).parent
_BOX = {name: getattr(svg_charts, name) for name in ("LEFT", "RIGHT", "TOP", "BOTTOM", "WIDTH", "HEIGHT")}
_TEMPLATE, _STYLE, _SCRIPT = "page.html.jinja", "page.css", "page.js"


def to_html(report: Report, reload_seconds: int | None = None) -> str:
    """Return the page.

    Args:
        report: The report.
        reload_seconds: After how many seconds the page loads itself again; None for never.
    """
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    style, script = (_FOLDER.joinpath(name).read_text(encoding="utf-8") for name in (_STYLE, _SCRIPT))
    charts = [draw(chart, report.runs) for chart in report.charts]
    sweeps = [draw(chart, report.runs) for chart in report.sweeps]
    return environment.get_template(_TEMPLATE).render(
        report=report,
        title=_title(report),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        reload_seconds=reload_seconds,
        charts=charts,
        sweeps=sweeps,
        legend=[(name, *style_of(at)) for at, name in enumerate(report.runs)],
        box=_BOX,
        data={"box": _BOX, "charts": [_data(drawing) for drawing in [*charts, *sweeps]]},
        # Ours, and without an end tag in them.
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
    )


def _title(report: Report) -> str:
    running = f", {report.num_running} under way" if report.num_running else ""
    return f"{format_count(report.num_all, 'run')}{running}"


def _policy(style: str, script: str) -> str:
    """The Content-Security-Policy: our style and script by their digests, and no request for anything."""
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in (style, script)
    ]
    return (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _data(drawing: Drawing) -> dict[str, Any]:
    """What the script needs to show values at a position."""
    return {
        "id": drawing.chart.key,
        "x": drawing.x_range,
        "y": drawing.y_range,
        "label": drawing.chart.x_label,
        "categories": list(drawing.chart.categories),
        "lines": [
            {"run": line.number, "name": line.name, "color": line.color, "points": _rounded(line.points)}
            for line in drawing.lines
        ],
    }


def _rounded(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, json.loads(f"{y:.5g}")) for x, y in points]
