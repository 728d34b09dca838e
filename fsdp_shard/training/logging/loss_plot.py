"""The loss curves of a run as a PNG, drawn by matplotlib from the rows of its logs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_shard.utils import require_package

_INK, _TRAIN, _HELD_OUT = "#333333", "#3b6fb6", "#d1495b"
_ARROW = "\N{RIGHTWARDS ARROW}"


def check_plots() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    require_package("matplotlib", "plots", "train.plot=true", "set train.plot=false")


def plot_losses(
    train: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]], target: Path, title: str
) -> None:
    """Plot the loss over the steps.

    Args:
        train: Rows of metrics.jsonl, possibly none.
        held_out: Rows of evaluations.jsonl for the same held-out data, possibly none.
        target: The PNG file.
        title: Title of the plot.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if train:
        _draw_train(axes, train)
    if held_out:
        _draw_held_out(axes, held_out)
    axes.set_title(title.replace("$", r"\$"), loc="left", color=_INK, fontsize=12, fontweight="bold")
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss", color=_INK)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if train or held_out:
        axes.legend(frameon=False, labelcolor=_INK)
    figure.savefig(target, format="png", dpi=160)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of the last `width` values at each index, or of fewer at the start."""
    return [math.fsum(values[max(0, end - width) : end]) / min(width, end) for end in range(1, len(values) + 1)]


def _draw_train(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    rows = [row for row in rows if row["loss"] is not None]  # skipped steps have none
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    if (width := len(rows) // 20) < 2:
        axes.plot(steps, losses, color=_TRAIN, linewidth=1.8, label="train")
        return
    axes.plot(steps, losses, color=_TRAIN, linewidth=0.9, alpha=0.35, label="train, each step")
    axes.plot(steps, running_mean(losses, width), color=_TRAIN, linewidth=1.8, label=f"train, mean of {width} steps")


def held_out_label(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the legend for `rows`, of which there is at least one: their first and last perplexity, where known."""
    if rows[-1].get("perplexity") is None:  # with a custom loss
        return "held out"
    first, last = (f"{math.exp(min(700.0, row['loss'])):.3g}" for row in (rows[0], rows[-1]))
    return f"held out (perplexity {last if len(rows) == 1 else f'{first} {_ARROW} {last}'})"


def _draw_held_out(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    axes.plot(steps, losses, color=_HELD_OUT, linewidth=1.8, marker="o", markersize=5, label=held_out_label(rows))
