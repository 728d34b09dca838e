"""Formats the report as CSV, with a row per run, and as Markdown, with all tables."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from fsdp_shard.evaluation.report.report_data import Cell, Report, Table
from fsdp_shard.utils import printable

_APART = ("run",)
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def to_csv(report: Report) -> str:
    """Return a row per trained run: its figures, then the settings that differ, with a header.

    Numbers are not rounded, and sizes are in bytes. Text that a spreadsheet would read as a formula starts with an
    apostrophe.
    """
    tables = {table.key: table for table in report.tables}
    of_runs = [tables[key] for key in ("runs", "speed") if key in tables]
    columns = ["run", *(name for table in of_runs for name in table.columns if name not in _APART)]
    settings = tables.get("settings")
    lines = [[*columns, *([] if settings is None else [_csv(row[0]) for row in settings.rows])]]
    for at, name in enumerate(report.runs):
        cells = [cell for table in of_runs for cell in table.rows[at][1:]]
        if settings is not None:
            place = list(settings.columns).index(name) if name in settings.columns else None
            cells += [Cell(None, "") if place is None else row[place] for row in settings.rows]
        lines.append([_formula_free(name), *map(_csv, cells)])
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(lines)
    return stream.getvalue()


def _csv(cell: Cell) -> str:
    if cell.value is None:
        return ""
    return _formula_free(cell.value) if isinstance(cell.value, str) else repr(cell.value)


def _formula_free(value: str) -> str:
    return f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def to_markdown(report: Report) -> str:
    """Return all tables, and the omissions."""
    parts = [f"# {report.title}"]
    for table in report.tables:
        if table.key != "all-settings":
            parts += [f"## {escape_markdown(table.title)}", *([escape_markdown(table.note)] if table.note else [])]
            parts += [markdown_table(table)] if table.rows else []
    if report.problems:
        parts += ["## Left out", "\n".join(f"- {escape_markdown(printable(problem))}" for problem in report.problems)]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Return a table in Markdown, without its title and note."""
    header = [escape_markdown(column) for column in table.columns]
    is_number = [any(isinstance(row[at].value, int | float) for row in table.rows) for at in range(len(table.columns))]
    rule = ["---:" if right else "---" for right in is_number]
    rows = [
        [f"**{escape_markdown(cell.text)}**" if cell.is_marked else escape_markdown(cell.text) for cell in row]
        for row in table.rows
    ]
    return "\n".join([_row(header), _row(rule), *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape_markdown(shown: str) -> str:
    """Return text that Markdown shows unchanged, also in a table."""
    return _MARKUP.sub(r"\\\1", shown.replace("\n", " "))
