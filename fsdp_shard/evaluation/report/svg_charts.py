"""Lays out curves for SVG: paths, ticks and labels, in the units of a view box. Draws nothing itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_shard.evaluation.report.report_data import Chart, Curve, number

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 548, 16, 258  # of the plot inside it
NUM_COLORS, NUM_DASHES = 8, 4
_MAX_TICKS = 6
_MAX_LABEL = 14  # characters of a category


@dataclass(frozen=True)
class Line:
    """A curve: its index, name, color and dash indices, path, dots, and its points as numbers."""

    number: int
    name: str
    color: int
    dash: int
    path: str
    dots: Sequence[tuple[float, float]]
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Drawing:
    """The layout of a chart: ticks are (position, label); `description` describes the curves in words."""

    chart: Chart
    lines: Sequence[Line]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    description: str
    x_range: tuple[float, float]


def draw(chart: Chart, runs: Sequence[str]) -> Drawing:
    """Lay out a chart.

    Args:
        chart: The chart, with one point or more.
        runs: The names of the runs that its curves' indices refer to, unless it has its own names.
    """
    names = chart.names or runs
    points = [point for curve in chart.curves for point in curve.points]
    x_range = _x_range([x for x, _ in points], len(chart.categories))
    y_ticks, y_range = _y_axis([y for _, y in points])
    lines = [_line(curve, names[curve.number], x_range, y_range) for curve in chart.curves]
    return Drawing(
        chart=chart,
        lines=lines,
        x_ticks=_x_ticks(chart, x_range),
        y_ticks=[(_position(y, y_range, BOTTOM, TOP), _label(y)) for y in y_ticks],
        description=" ".join(_in_words(chart, line) for line in lines[:20]),
        x_range=x_range,
    )


def style_of(at: int) -> tuple[int, int]:
    """The color and dash indices of curve number `at`; no two of the first 32 curves share both."""
    return at % NUM_COLORS, (at + at // NUM_COLORS) % NUM_DASHES


def nice_ticks(low: float, high: float, most: int = _MAX_TICKS) -> list[float]:
    """Round, evenly spaced numbers from at or below `low` to at or above `high`: up to about `most` + 1."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low, low + (abs(low) or 1.0)]
    raw = span / (most - 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * unit for factor in (1, 2, 2.5, 5) if factor * unit >= raw * 0.999), 10 * unit)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [count * step for count in range(first, last + 1)]


def _x_range(values: Sequence[float], num_categories: int) -> tuple[float, float]:
    if num_categories:
        return -0.5, num_categories - 0.5
    low, high = min(values), max(values)
    if 0 <= low < high / 4:
        low = 0.0  # so that charts of steps and evaluations share an axis
    return (low, high) if high > low else (low - 1, high + 1)


def _y_axis(values: Sequence[float]) -> tuple[list[float], tuple[float, float]]:
    """The ticks and range of the y axis; it starts at 0 if the lowest value is far below the highest or equals it."""
    low, high = min(values), max(values)
    if 0 <= low < high / 4 or low == high > 0:
        low = 0.0
    ticks = nice_ticks(low, high)
    return ticks, (ticks[0], ticks[-1])


def _x_ticks(chart: Chart, x_range: tuple[float, float]) -> list[tuple[float, str]]:
    if chart.categories:
        every = -(-len(chart.categories) // _MAX_TICKS)
        shown = [(at, name) for at, name in enumerate(chart.categories) if at % every == 0]
        return [(_position(at, x_range, LEFT, RIGHT), _short(name)) for at, name in shown]
    inside = [x for x in nice_ticks(*x_range) if x_range[0] <= x <= x_range[1]]
    return [(_position(x, x_range, LEFT, RIGHT), f"{x:,.0f}") for x in inside if x == int(x)]


def _short(name: str) -> str:
    return name if len(name) <= _MAX_LABEL else f"{name[: _MAX_LABEL - 1]}…"


def _line(curve: Curve, name: str, x_range: tuple[float, float], y_range: tuple[float, float]) -> Line:
    places = [(_position(x, x_range, LEFT, RIGHT), _position(y, y_range, BOTTOM, TOP)) for x, y in curve.points]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
    # A curve with one point has no visible line.
    dots = places if curve.is_dotted or len(places) == 1 else []
    return Line(curve.number, name, *style_of(curve.number), path, dots, curve.points)


def _position(value: float, value_range: tuple[float, float], first: float, last: float) -> float:
    low, high = value_range
    return round(first + (value - low) / (high - low) * (last - first), 1)


def _label(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _in_words(chart: Chart, line: Line) -> str:
    (first_x, first), (last_x, last) = line.points[0], line.points[-1]
    lowest_x, lowest = min(line.points, key=lambda point: point[1])
    values = [number(float(value)).text for value in (first, last, lowest)]
    where = [chart.categories[int(x)] if chart.categories else f"step {x:,.0f}" for x in (first_x, last_x, lowest_x)]
    return f"{line.name}: {values[0]} at {where[0]}, {values[1]} at {where[1]}, lowest {values[2]} at {where[2]}."
