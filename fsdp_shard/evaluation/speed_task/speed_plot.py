"""Plots the figures of `task=speed` as one self-contained SVG file: charts over the prompt length."""

from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from fsdp_shard.errors import one_line
from fsdp_shard.evaluation.report.report_data import Chart, Curve
from fsdp_shard.evaluation.report.svg_charts import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Line, draw, style_of
from fsdp_shard.evaluation.speed_task.speed_passes import SizeFigures
from fsdp_shard.utils import format_count

# As in the style of `report`'s page.
_COLORS = ("#0b62a8", "#b8480a", "#0a7a55", "#7d3f98", "#7a5c00", "#00788a", "#b0186b", "#55595f")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_INK, _QUIET, _RULE = "#1c1e21", "#5a6068", "#d5d9de"
_TITLE, _ROW = 40, HEIGHT + 46  # heights of the title and of a row of charts

_CHARTS: tuple[tuple[str, str, Callable[[SizeFigures], float]], ...] = (
    ("Prefill", "tokens per second, all texts", lambda one: one.prefill.median),
    ("Decode", "tokens per second, all texts", lambda one: one.decoded.median),
    ("Time to first token", "seconds", lambda one: one.first_token.median),
    ("Decode", "tokens per second, each text", lambda one: one.decoded_per_text.median),
)


def speed_plot(figures: Sequence[SizeFigures], title: str) -> str:
    """Return the SVG: medians over the prompt length, with a curve per batch size.

    Args:
        figures: The figures of each size.
        title: What was measured.
    """
    batches = list(dict.fromkeys(one.size.batch_size for one in figures))
    height = _TITLE + -(-len(_CHARTS) // 2) * _ROW + 24 * len(batches)
    box = f"0 0 {2 * WIDTH} {height}"
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, "font-family": "sans-serif"})
    SubElement(svg, "rect", width="100%", height="100%", fill="#ffffff")
    _text(svg, LEFT, 26, f"Speed of {one_line(title)}", size=18, fill=_INK)
    for at, (name, unit, value) in enumerate(_CHARTS):
        chart = _chart(f"{name}: {unit}", figures, batches, value)
        origin = f"translate({at % 2 * WIDTH} {_TITLE + at // 2 * _ROW + 20})"
        _draw(SubElement(svg, "g", transform=origin), chart)
    for at, batch in enumerate(batches):
        y = height - 24 * (len(batches) - at) + 6
        SubElement(svg, "path", {"d": f"M{LEFT} {y}h28", **_stroke(*style_of(at))})
        _text(svg, LEFT + 36, y + 5, f"batches of {format_count(batch, 'text')}", fill=_INK)
    return tostring(svg, encoding="unicode") + "\n"


def _chart(
    title: str, figures: Sequence[SizeFigures], batches: Sequence[int], value: Callable[[SizeFigures], float]
) -> Chart:
    lengths = sorted({one.size.context_length for one in figures})
    curves = []
    for number, batch in enumerate(batches):
        of_batch = [one for one in figures if one.size.batch_size == batch]
        points = [(float(lengths.index(one.size.context_length)), value(one)) for one in of_batch]
        curves.append(Curve(number, points, is_dotted=True))
    names = [f"batch {batch}" for batch in batches]
    return Chart(title, title, "tokens in each prompt", "", curves, "", [f"{length:,}" for length in lengths], names)


def _draw(group: Element, chart: Chart) -> None:
    drawing = draw(chart, ())
    SubElement(group, "title").text = f"{chart.title}. {drawing.description}"
    _text(group, LEFT, 2, chart.title, fill=_INK)
    for y, label in drawing.y_ticks:
        SubElement(group, "path", d=f"M{LEFT} {y}H{RIGHT}", stroke=_RULE)
        _text(group, LEFT - 8, y + 4, label, anchor="end")
    for x, label in drawing.x_ticks:
        SubElement(group, "path", d=f"M{x} {BOTTOM}v5", stroke=_QUIET)
        _text(group, x, BOTTOM + 20, label, anchor="middle")
    _text(group, RIGHT, BOTTOM + 38, chart.x_label, anchor="end")
    for line in drawing.lines:
        _draw_line(group, line)


def _draw_line(group: Element, line: Line) -> None:
    SubElement(group, "path", {"d": line.path, **_stroke(line.color, line.dash)})
    for x, y in line.dots:
        dot = {"cx": f"{x}", "cy": f"{y}", "r": "3.5", "fill": "#ffffff", "stroke-width": "2"}
        SubElement(group, "circle", {**dot, "stroke": _COLORS[line.color]})


def _stroke(color: int, dash: int) -> dict[str, str]:
    return {"fill": "none", "stroke": _COLORS[color], "stroke-width": "2", "stroke-dasharray": _DASHES[dash] or "none"}


def _text(
    parent: Element, x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", fill: str = _QUIET
) -> None:
    place = {"x": f"{x}", "y": f"{y}", "font-size": f"{size}", "text-anchor": anchor, "fill": fill}
    SubElement(parent, "text", place).text = text
