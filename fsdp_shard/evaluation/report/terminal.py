"""Formats the report for a terminal: tables within 100 columns, and each loss curve as a line of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_shard.evaluation.report.report_data import Chart, Report, Table, number
from fsdp_shard.utils import format_table, printable

WIDTH = 100
_CELL, _NAME = 30, 40  # the longest cell, and the longest first cell of a row
_BLOCKS = "▁▂▃▄▅▆▇█"
_COURSE = 40  # blocks of a curve
_APART = ("all-settings",)
_SHOWN_ROWS = 60


def to_text(report: Report) -> str:
    """Return the report as text. Overlong names are cut, and tables that are too wide continue below."""
    parts = [report.title]
    curves = {chart.key: chart for chart in report.charts}
    for at, table in enumerate(table for table in report.tables if table.key not in _APART):
        parts.append("\n".join(_table_lines(table)))
        if at == 0:
            parts += ["\n".join(_sparklines(curves[key], report.runs)) for key in ("loss", "held-out") if key in curves]
    parts += ["\n".join(_sample_lines(report))] if report.samples else []
    for title, sentences in (("Failed", report.failures), ("Left out", report.problems)):
        if sentences:
            parts.append("\n".join([title, *(f"  {printable(one)}" for one in sentences)]))
    return "\n\n".join(parts)


def _table_lines(table: Table) -> list[str]:
    shown = list(table.rows[:_SHOWN_ROWS])
    rows = [[_cut(cell.text, _CELL if at else _NAME) for at, cell in enumerate(row)] for row in shown]
    header = [_cut(column, _CELL) for column in table.columns]
    lines = [table.title]
    for columns in _chunks([header, *rows]):
        lines += [f"  {line}" for line in format_table([[row[at] for at in columns] for row in [header, *rows]])]
    if not rows:
        lines.append(f"  {table.note}")
    if len(table.rows) > len(shown):
        lines.append(f"  ... and {len(table.rows) - len(shown):,} more rows (--csv, --md and --html have all)")
    return lines


def _chunks(rows: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """The columns that fit side by side, each time preceded by the first column."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    chunk, used = [0], widths[0] + 2
    for at, width in enumerate(widths[1:], start=1):
        if used + 2 + width > WIDTH and len(chunk) > 1:
            yield chunk
            chunk, used = [0], widths[0] + 2
        chunk.append(at)
        used += 2 + width
    yield chunk


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _sparklines(chart: Chart, runs: Sequence[str]) -> list[str]:
    """A line of blocks per curve, all on the same axes."""
    points = [point for curve in chart.curves for point in curve.points]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    rows = []
    for curve in chart.curves:
        cells: list[list[float]] = [[] for _ in range(_COURSE)]
        for x, y in curve.points:
            cells[min(int((x - first) / ((last - first) or 1) * _COURSE), _COURSE - 1)].append(y)
        blocks = "".join(_block(sum(ys) / len(ys), low, high) if ys else " " for ys in cells)
        ends = f"{number(float(curve.points[0][1])).text} to {number(float(curve.points[-1][1])).text}"
        rows.append([_cut(runs[curve.number], _NAME), f"|{blocks}|", ends])
    width = max(len(row[0]) for row in rows)
    title = f"{chart.title} by step {first:,.0f} to {last:,.0f}"
    return [title, *(f"  {name:<{width}}  {blocks}  {ends}" for name, blocks, ends in rows)]


def _block(value: float, low: float, high: float) -> str:
    return _BLOCKS[round((value - low) / ((high - low) or 1) * (len(_BLOCKS) - 1))]


def _sample_lines(report: Report) -> Iterator[str]:
    """The last completion of each prompt by each run."""
    yield "Samples (the last of each run)"
    for one in report.samples:
        yield f"  {_cut(printable(one.prompt.replace(chr(10), ' ')), WIDTH - 2)}"
        last = {run: (step, completion) for run, step, completion in one.rows}
        for run, (step, completion) in last.items():
            start = f"    {_cut(report.runs[run], _NAME)}, step {step:,}: "
            yield start + _cut(printable(" ".join(completion.split())) or "(white space)", max(WIDTH - len(start), 20))
