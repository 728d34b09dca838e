"""Draws the Pareto front of a search as a PNG with matplotlib."""

from pathlib import Path

from fsdp_shard.planning.search.pareto_front import Front

PICTURE = "search.png"

_INK, _LIMIT = "#333333", "#d1495b"


def plot_front(front: Front, target: Path) -> None:
    """Draw memory and time of the settings in `front`, with a line per number of ranks.

    Args:
        front: The result of a search.
        target: The PNG file.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    counts = sorted({point.num_ranks for point in front.points})
    for index, count in enumerate(counts):
        points = sorted((p.fits.peak_bytes / 2**30, p.time) for p in front.points if p.num_ranks == count)
        color = colormaps["viridis"](index / max(1, len(counts)))
        label = f"{count} rank{'' if count == 1 else 's'}"
        axes.plot(*zip(*points, strict=True), marker="o", markersize=5, linewidth=1.4, color=color, label=label)
    axes.axvline(front.memory_bytes / 2**30, color=_LIMIT, linewidth=1.2, linestyle="--", label="memory of a GPU")
    axes.set_xlabel("peak of a rank, GiB", color=_INK)
    axes.set_ylabel("time of a sample, relative", color=_INK)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, labelcolor=_INK)
    figure.savefig(target, format="png", dpi=160)
