"""Curves of runs over their steps, and the metrics of objectives and custom metrics."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from fsdp_shard.evaluation.report.report_data import Chart, Curve, Table, loss_unit, number, text
from fsdp_shard.evaluation.report.run_files import METRIC, Row, Run

_MAX_POINTS, _FEWEST_POINTS, _ALL_POINTS = 400, 50, 4800  # per curve, and per chart; more are averaged
_MAX_METRICS = 24  # maximum number of charts


def run_charts(runs: Sequence[Run]) -> list[Chart]:
    """Curves of the figures and metrics of each step and evaluation; figures without values have no curves."""
    unit = loss_unit(run.settings for run in runs)
    per_step = [
        ("loss", "Training loss", unit, "loss"),
        ("rate", "Throughput", "tokens per second", "tokens_per_second"),
        ("memory", "Peak memory of a rank", "MiB", "memory_bytes"),
        ("norm", "Gradient norm", "before clipping", "grad_norm"),
        ("lr", "Learning rate", "", "learning_rate"),
    ]
    loss, *others = [_chart(runs, *row) for row in per_step]
    evaluated = [(at, _points(run.held_out, "loss")) for at, run in enumerate(runs)]
    held_out = [Curve(at, points, is_dotted=True) for at, points in evaluated if points]
    return [
        loss,
        Chart("held-out", "Held-out loss", "step", unit, held_out),
        *others,
        *_metric_charts(runs),
    ]


def _metric_charts(runs: Sequence[Run]) -> list[Chart]:
    """A chart per objective metric and custom metric, with dotted curves for held-out samples."""
    charts = []
    for count, name in enumerate(_metric_names(runs)[:_MAX_METRICS]):
        chart = _chart(runs, f"metric-{count}", name, "", f"{METRIC}{name}")
        held_out = [(at, _points(run.held_out, f"{METRIC}{name}")) for at, run in enumerate(runs)]
        dotted = [Curve(at, points, is_dotted=True) for at, points in held_out if points]
        note = " ".join([chart.note, "Dotted: held-out samples."]).strip() if dotted else chart.note
        charts.append(replace(chart, curves=[*chart.curves, *dotted], note=note))
    return charts


def _metric_names(runs: Sequence[Run]) -> list[str]:
    """The names of all metrics, in logging order."""
    rows = (row for run in runs for row in (*run.steps[-1:], *run.held_out[-1:]))
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(METRIC))
    return [name.removeprefix(METRIC) for name in names]


def metric_tables(runs: Sequence[Run]) -> list[Table]:
    """The metrics of the first and the last held-out evaluation."""
    rows = []
    for run in (run for run in runs if run.held_out):
        first, last = run.held_out[0], run.held_out[-1]
        for name in [name for name in _metric_names([run]) if f"{METRIC}{name}" in last]:
            figures = [number(row.get(f"{METRIC}{name}")) for row in (first, last)]
            rows.append([text(run.name), text(name), *figures])
    columns = ("run", "metric", "first", "last")
    note = "Of the first and the last held-out evaluation."
    return [Table("held-out-metrics", "Held-out metrics", columns, rows, note)] if rows else []


def _chart(runs: Sequence[Run], key: str, title: str, y_label: str, name: str) -> Chart:
    scale = 1 / (1 << 20) if name.endswith("_bytes") else 1.0
    most = max(_FEWEST_POINTS, min(_MAX_POINTS, _ALL_POINTS // max(len(runs), 1)))
    curves, width = [], 1
    for at, run in enumerate(runs):
        points = [(x, y * scale) for x, y in _points(run.steps, name)]
        width = max(width, -(-len(points) // most))
        if points:
            curves.append(Curve(at, thin_out(points, most)))
    note = f"Each point is the mean of up to {width} steps." if width > 1 else ""
    return Chart(key, title, "step", y_label, curves, note)


def _points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    return [(row["step"] or 0, value) for row in rows if (value := row.get(name)) is not None]


def thin_out(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Reduce to at most `most` points: means of neighboring points, each at its last step."""
    width = -(-len(points) // most)
    if width < 2:
        return list(points)
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    return [(part[-1][0], statistics.fmean(y for _, y in part)) for part in parts]
