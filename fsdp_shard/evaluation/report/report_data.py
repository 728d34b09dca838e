"""The contents of a report in any format: tables, curves, sweep charts, samples and problems. Plain data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from fsdp_shard.errors import one_line
from fsdp_shard.utils import format_count, format_size

_HEX = re.compile("[0-9a-f]*")


def loss_unit(runs: Iterable[Mapping[str, str]]) -> str:
    """The unit or units of runs' losses; `runs` are the settings of each run by dotted name."""
    return " or ".join(dict.fromkeys(map(_unit, runs))) or "nats per token"


def _unit(settings: Mapping[str, str]) -> str:
    if settings.get("loss", "null") != "null":
        return "the unit of a loss of one's own"
    if settings.get("objective", "sft") not in ("sft", "distill"):
        return "units of the objective per sample"  # for preferences, mostly nats
    return "nats per text" if settings.get("model.task") == "sequence_classification" else "nats per token"


@dataclass(frozen=True)
class Cell:
    """A value for JSON and sorting, and its text for tables; `is_marked` if it differs from the first run's."""

    value: str | float | None
    text: str
    is_marked: bool = False


@dataclass(frozen=True)
class Table:
    """A table. `key` names it in addresses; `note` describes its contents and omissions."""

    key: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """The points of the run, or of the name, with this index; `is_dotted` marks each point."""

    number: int
    points: Sequence[tuple[float, float]]
    is_dotted: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves on the same axes.

    Attributes:
        key, title, x_label, y_label, note: Its names, its axis labels, and remarks.
        curves: The curves.
        categories: The names at 0, 1, ... on a non-numeric x axis.
        names: The curve names, if curves do not belong to one run each.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    note: str = ""
    categories: Sequence[str] = ()
    names: Sequence[str] = ()


@dataclass(frozen=True)
class PromptSamples:
    """The completions of one prompt: (run, step, completion); the files contain `num_left_out` more."""

    prompt: str
    rows: Sequence[tuple[int, int, str]]
    num_left_out: int = 0


@dataclass(frozen=True)
class Report:
    """A comparison of runs.

    Attributes:
        runs: Names of the trained runs, to which indices in charts and samples refer.
        num_all: Number of runs of any command.
        num_running, num_completed: Number of these that are running and completed.
        tables: The tables, most important first.
        charts: Curves over the steps.
        sweeps: For each sweep, charts of a figure over a setting.
        samples: Samples by prompt.
        failures: The cause of each failed run, a sentence each.
        problems: Unreadable or omitted data, a sentence each.
    """

    runs: Sequence[str]
    num_all: int
    num_running: int
    num_completed: int
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    sweeps: Sequence[Chart] = ()
    samples: Sequence[PromptSamples] = ()
    failures: Sequence[str] = ()
    problems: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The number of runs, and how many of them are running."""
        running = f", {self.num_running} under way" if self.num_running else ""
        return f"{format_count(self.num_all, 'run')}{running}"


def text(value: str | None) -> Cell:
    """Make a text cell, on one line and without control characters."""
    shown = None if value is None else one_line(value)
    return Cell(shown, "-" if shown is None else shown)


def digest(value: str | None) -> Cell:
    """Make a digest cell, abbreviated in tables; for an identity with more fields, its digest."""
    whole = text(value)
    if value is None or _HEX.fullmatch(value):
        return Cell(whole.value, whole.text[:12])
    return Cell(whole.value, xxhash.xxh3_128_hexdigest(whole.text.encode("utf-8", "backslashreplace"))[:12])


def number(value: float | None) -> Cell:
    """Make a number cell with four significant digits, or all digits of an integer."""
    if value is None:
        return Cell(None, "-")
    is_large = isinstance(value, int) or abs(value) >= 1000
    return Cell(value, f"{value:,.0f}" if is_large else f"{value:#.4g}")


def size(num_bytes: float | None) -> Cell:
    """Make a cell for a number of bytes."""
    return Cell(num_bytes, "-" if num_bytes is None else format_size(num_bytes))
