"""The figures of the checks, beside their limits: a table for people (Markdown) and for programs (JSON)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_HEAD = ("check", "figure", "limit", "result")


@dataclass(frozen=True)
class Row:
    """One figure of a check.

    Attributes:
        check: What was measured.
        value: The figure; None where there is none.
        unit: Its unit, such as `x` for ratios.
        at_most: Its limit from above, if any.
        at_least: Its limit from below, if any.
        note: What else there is to know, or why there is no figure.
        counts: Whether the limits hold.
    """

    check: str
    value: float | None
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""
    counts: bool = True

    @property
    def is_within(self) -> bool | None:
        """Whether the figure is within its limits; None without limits or figure."""
        if self.value is None or (self.at_most is None and self.at_least is None):
            return None
        above = self.at_most is None or self.value <= self.at_most
        return above and (self.at_least is None or self.value >= self.at_least)

    @property
    def result(self) -> str:
        """`pass`, `FAIL`, `printed` or `none`."""
        if self.value is None:
            return "none"
        if not self.counts:
            return "rehearsed"
        return {True: "pass", False: "FAIL", None: "printed"}[self.is_within]

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        figure = "-" if self.value is None else f"{self.value:,.4g} {self.unit}".strip()
        limits = [
            f"{word} {limit:g}" for word, limit in (("<=", self.at_most), (">=", self.at_least)) if limit is not None
        ]
        note = " ".join(self.note.split()).replace("|", "/")
        return (self.check, f"{figure} ({note})" if note else figure, " ".join(limits) or "-", self.result)


@dataclass
class Table:
    """The rows so far, the outcome and the seconds of each test, and what ran them."""

    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    outcomes: dict[str, tuple[str, float]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The table in Markdown."""
        about = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        checks = _markdown([_HEAD, *(row.cells() for row in self.rows)])
        tests = [("test", "outcome", "seconds")]
        tests += [(name, outcome, f"{seconds:.1f}") for name, (outcome, seconds) in self.outcomes.items()]
        return [about, "", *checks, "", *_markdown(tests)]

    def write(self, directory: Path) -> None:
        """Write gpu.md and gpu.json, whatever was there."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "gpu.md").write_text("\n".join(self.lines()) + "\n", encoding="utf-8")
        rows = [asdict(row) | {"result": row.result} for row in self.rows]
        document = {"machine": self.machine, "rows": rows, "tests": self.outcomes}
        (directory / "gpu.json").write_text(json.dumps(document, indent=1), encoding="utf-8")


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
