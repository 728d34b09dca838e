"""The stacked timeline of a step: its layout for SVG, and a PNG drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from fsdp_shard.planning.step.snapshot import Snapshot, highest
from fsdp_shard.utils import format_size

WIDTH, HEIGHT = 1000, 420
LEFT, RIGHT, TOP, BOTTOM = 84, 990, 14, 370  # of the plot inside it
COLORS: Mapping[str, str] = {
    "parameters": "#3b6fb6",
    "reference": "#7aa5d8",
    "teacher": "#a9bcd0",
    "optimizer": "#7d5ba6",
    "average": "#b79ad6",
    "gradients": "#2f8f6b",
    "batch": "#8c8c8c",
    "gathered": "#5bb8c9",
    "unreduced gradients": "#8fbf5a",
    "reduce buffers": "#c9b037",
    "activations": "#e08a3c",
    "loss": "#d1495b",
    "optimizer temporaries": "#c86fa8",
}
_SPARE_COLORS = ("#6b7a8f", "#a1887f", "#4f6d7a", "#9e9d24")
_INK = "#333333"
_LEAST_SHARE = 0.08  # of the width, for each phase, so that its name is readable
_FAR = 3  # a limit this many times above the peak is not drawn


@dataclass(frozen=True, slots=True)
class Band:
    """Neighboring snapshots of one phase: the phase name, and the horizontal range in the picture."""

    phase: str
    left: float
    right: float

    @property
    def label(self) -> str:
        """The name, shortened to the available room."""
        room = int((self.right - self.left) / 7.5)
        return self.phase if len(self.phase) <= room else f"{self.phase[: max(1, room - 1)]}…"


@dataclass(frozen=True, slots=True)
class Layer:
    """A term in the stack: its color, its maximum bytes, and its outline as an SVG path."""

    term: str
    color: str
    most: str
    path: str


@dataclass(frozen=True)
class Timeline:
    """The layout of a timeline.

    Attributes:
        snapshots: The snapshots, in order.
        bands: The phases.
        edges: The start of each snapshot, and the end of the last one.
        layers: The terms, from the bottom up.
        ticks: (vertical position, label).
        limit: The same for the device memory, if it is in the picture.
        note: A note about the device memory otherwise.
        peak: The highest snapshot: (horizontal position, vertical position, label).
        top_bytes: Bytes at the upper end of the axis.
    """

    snapshots: Sequence[Snapshot]
    bands: Sequence[Band]
    edges: Sequence[float]
    layers: Sequence[Layer]
    ticks: Sequence[tuple[float, str]]
    limit: tuple[float, str] | None
    note: str
    peak: tuple[float, float, str]
    top_bytes: int


def lay_out(snapshots: Sequence[Snapshot], memory_bytes: int | None) -> Timeline:
    """Lay out a timeline.

    Args:
        snapshots: The snapshots, in order; at least one.
        memory_bytes: The memory of a device, if known.
    """
    fullest = highest(snapshots)
    peak = max(1, fullest.total_bytes)
    shown = memory_bytes if memory_bytes is not None and memory_bytes <= _FAR * peak else None
    ticks = byte_ticks(max(peak, shown or 0))
    bands, edges = _spread(snapshots)
    at = snapshots.index(fullest)
    where = f" at {fullest.where}" if fullest.where else ""
    middle = (edges[at] + edges[at + 1]) / 2
    note = ""
    if memory_bytes is not None and shown is None:
        note = f"device.memory, {format_size(memory_bytes)}, is above the picture."
    return Timeline(
        snapshots=snapshots,
        bands=bands,
        edges=edges,
        layers=_layers(snapshots, edges, ticks[-1]),
        ticks=[(_height(tick, ticks[-1]), format_size(tick) if tick else "0") for tick in ticks],
        limit=None if shown is None else (_height(shown, ticks[-1]), f"device.memory {format_size(shown)}"),
        note=note,
        peak=(middle, _height(peak, ticks[-1]), f"{format_size(peak)}, {fullest.phase}{where}"),
        top_bytes=ticks[-1],
    )


def color_of(terms: Sequence[str]) -> dict[str, str]:
    """The color of each term; terms without a fixed color receive a spare one."""
    others = [term for term in terms if term not in COLORS]
    spare = {term: _SPARE_COLORS[at % len(_SPARE_COLORS)] for at, term in enumerate(others)}
    return {term: COLORS.get(term) or spare[term] for term in terms}


def terms_of(snapshots: Sequence[Snapshot]) -> list[str]:
    """The terms of the snapshots, starting with those that last for the whole run."""
    found = dict.fromkeys(term for snapshot in snapshots for term, num in snapshot.terms.items() if num)
    return [*(term for term in COLORS if term in found), *(term for term in found if term not in COLORS)]


def byte_ticks(most: int) -> list[int]:
    """Round numbers of bytes from 0 on, evenly spaced; the last is at least `most`."""
    unit = 1
    while most >= 2 * 1024 * unit:
        unit *= 1024
    step = next(unit * factor for factor in _factors() if most <= 6 * unit * factor)
    return [count * step for count in range(-(-most // step) + 1)]


def _factors() -> Iterator[int]:
    scale = 1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10


def phase_of(snapshot: Snapshot) -> str:
    """The phase's name in the picture; reductions overlap with the backward pass, so both share one."""
    return "backward" if snapshot.phase == "reduce" else snapshot.phase


def _spread(snapshots: Sequence[Snapshot]) -> tuple[list[Band], list[float]]:
    """The phases, each with a minimum width, and the start of each snapshot in them."""
    phases = [(phase, len(list(group))) for phase, group in groupby(snapshots, key=phase_of)]
    least = min(_LEAST_SHARE, 0.8 / len(phases))
    shares = [max(least, count / len(snapshots)) for _, count in phases]
    scale = (RIGHT - LEFT) / sum(shares)
    bands, edges, left = [], [float(LEFT)], float(LEFT)
    for (phase, count), share in zip(phases, shares, strict=True):
        right = left + share * scale
        bands.append(Band(phase, round(left, 2), round(right, 2)))
        edges += [round(left + (right - left) * (number + 1) / count, 2) for number in range(count)]
        left = right
    return bands, edges


def _height(num_bytes: float, top_bytes: int) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * num_bytes / top_bytes, 3)


def _layers(snapshots: Sequence[Snapshot], edges: Sequence[float], top_bytes: int) -> list[Layer]:
    terms = terms_of(snapshots)
    colors, below, layers = color_of(terms), [0] * len(snapshots), []
    for term in terms:
        sizes = [snapshot.terms.get(term, 0) for snapshot in snapshots]
        above = [base + size for base, size in zip(below, sizes, strict=True)]
        path = _outline(below, above, edges, top_bytes)
        layers.append(Layer(term, colors[term], format_size(max(sizes)), path))
        below = above
    return layers


def _outline(below: Sequence[int], above: Sequence[int], edges: Sequence[float], top_bytes: int) -> str:
    """The outline of a term: along its upper edge, and back along the lower one."""
    upper = _stairs(above, edges, top_bytes)
    lower = _stairs(below, edges, top_bytes)[::-1]
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in (*upper, *lower)) + "Z"


def _stairs(values: Sequence[int], edges: Sequence[float], top_bytes: int) -> list[tuple[float, float]]:
    """The corners of a line that is level during each snapshot."""
    points, start = [], 0
    for number in range(1, len(values) + 1):
        if number == len(values) or values[number] != values[start]:
            y = _height(values[start], top_bytes)
            points += [(edges[start], y), (edges[number], y)]
            start = number
    return points


def draw_png(timeline: Timeline, target: Path, title: str) -> None:
    """Draw a timeline with matplotlib.

    Args:
        timeline: The timeline.
        target: The PNG file.
        title: Title of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    snapshots, edges = timeline.snapshots, list(timeline.edges)
    below = [0.0] * (len(snapshots) + 1)
    for layer in timeline.layers:
        sizes = [snapshot.terms.get(layer.term, 0) for snapshot in snapshots]
        above = [base + size for base, size in zip(below, [*sizes, sizes[-1]], strict=True)]
        label = f"{layer.term} ({layer.most})"
        axes.fill_between(edges, below, above, step="post", color=layer.color, linewidth=0, label=label)
        below = above
    _label_png(axes, timeline)
    axes.set_title(title.replace("$", r"\$"), loc="left", color=_INK, fontsize=12, fontweight="bold")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], frameon=False, labelcolor=_INK, loc="upper left", bbox_to_anchor=(1.0, 1.0)
    )
    figure.savefig(target, format="png", dpi=100)


def _label_png(axes: object, timeline: Timeline) -> None:
    """Axes, phases, the peak and the memory of the device."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    edges, top = timeline.edges, timeline.top_bytes
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, top)
    num_ticks = len(timeline.ticks)
    axes.set_yticks([top * at / (num_ticks - 1) for at in range(num_ticks)], [label for _, label in timeline.ticks])
    axes.set_xticks([(band.left + band.right) / 2 for band in timeline.bands], [band.label for band in timeline.bands])
    axes.tick_params(axis="x", length=0, labelcolor=_INK, labelsize=8)
    for before, _ in pairwise(timeline.bands):
        axes.axvline(before.right, color="white", linewidth=1.0)
    total = highest(timeline.snapshots).total_bytes
    axes.plot([timeline.peak[0]], [total], marker="v", color=_INK, markersize=6, label=f"peak: {timeline.peak[2]}")
    if timeline.limit is not None:
        height = (BOTTOM - timeline.limit[0]) / (BOTTOM - TOP) * top
        axes.axhline(height, color=_INK, linewidth=1.2, linestyle="--", label=timeline.limit[1])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
