"""`plan search=true`: the fewest ranks that fit, and the Pareto front of ranks, memory and time."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.search.advice import Fitting, fitting
from fsdp_shard.planning.search.advice_report import advice_figures, what_changes
from fsdp_shard.planning.search.planner import Planner
from fsdp_shard.utils import format_count, format_size, format_table

_PLANS_EACH = 60  # per number of ranks


@dataclass(frozen=True)
class Point:
    """Settings that fit.

    Attributes:
        fits: The settings.
        time: Time per sample, relative to that of the cheapest rank count.
    """

    fits: Fitting
    time: float

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.fits.candidate.run.num_ranks

    @property
    def trains_other(self) -> bool:
        """Whether its changes are of what is trained."""
        return bool(self.fits.candidate.trains)

    def is_better(self, other: "Point") -> bool:
        """Whether this is at most `other` in ranks, memory and time, and less in one of them.

        Settings that change what is trained are no better than settings that train the same.
        """
        if self.trains_other and not other.trains_other:
            return False
        own, theirs = self.figures, other.figures
        return own != theirs and all(one <= two for one, two in zip(own, theirs, strict=True))

    @property
    def figures(self) -> tuple[float, ...]:
        """Ranks, memory and time."""
        return self.num_ranks, self.fits.peak_bytes, self.time


@dataclass(frozen=True)
class Front:
    """The result of a search.

    Attributes:
        points: The settings that no others improve on, cheapest first; empty if nothing fits.
        num_fitting: Number of candidates that fit.
        num_plans: Number of planned runs.
        memory_bytes: Memory of a device.
    """

    points: tuple[Point, ...]
    num_fitting: int
    num_plans: int
    memory_bytes: int

    @property
    def cheapest(self) -> Point | None:
        """The fastest of the fewest ranks that fit, training the same if that fits at all."""
        same = [point for point in self.points if not point.trains_other]
        return min(same or self.points, key=lambda point: (point.num_ranks, point.time), default=None)

    @property
    def fewest(self) -> Point | None:
        """The fastest settings on the fewest ranks, if changes to the training allow fewer."""
        least = min(self.points, key=lambda point: (point.num_ranks, point.time), default=None)
        cheapest = self.cheapest
        return least if least and cheapest and least.num_ranks < cheapest.num_ranks else None


def search_front(
    planner: Planner,
    run: PlannedRun,
    memory_bytes: int,
    rank_counts: Sequence[int],
    chosen: tuple[Collection[str], Collection[str]],
    nodes: int,
) -> Front:
    """Plan `run` with several rank counts, and with changed settings for each.

    Args:
        planner: Plans the runs.
        run: The run.
        memory_bytes: Memory of a device.
        rank_counts: Rank counts over all machines.
        chosen: Names of the settings that the user chose, and of those that never change.
        nodes: Number of machines.
    """
    found: list[Fitting] = []
    for num_ranks in rank_counts:
        for fits in fitting(planner, replace(run, num_ranks=num_ranks), memory_bytes, *chosen, _PLANS_EACH):
            overrides = (f"launch.ranks={num_ranks // nodes}", *fits.candidate.overrides)
            found.append(replace(fits, candidate=replace(fits.candidate, overrides=overrides)))
    if any(fits.seconds is not None for fits in found):  # seconds and relative times are not comparable
        found = [fits for fits in found if fits.seconds is not None]
    points = sorted(
        (Point(fits, _time(fits)) for fits in found),
        key=lambda point: (point.num_ranks, point.time, point.trains_other, len(point.fits.candidate.overrides)),
    )
    points = list({point.figures: point for point in reversed(points)}.values())[::-1]  # the simplest of equal points
    kept = [point for point in points if not any(other.is_better(point) for other in points)]
    unit = kept[0].time if kept else 1.0
    relative = tuple(replace(point, time=point.time / unit) for point in kept)
    return Front(relative, len(found), planner.num_plans, memory_bytes)


def _time(fits: Fitting) -> float:
    """Time per sample: in seconds if known, otherwise relative, as if ranks divided the work evenly."""
    run = fits.candidate.run
    if fits.seconds is not None:
        return fits.seconds / run.train.global_batch_size
    return (1 + fits.candidate.slowdown / 100) / run.num_ranks


def front_text(front: Front) -> str:
    """Describe the result of a search."""
    memory = format_size(front.memory_bytes)
    if front.cheapest is None:
        return f"Nothing fits in {memory}, of {format_count(front.num_plans, 'plan')}."
    rows = [["ranks", "peak", "time", "settings", "changes"]]
    for point in front.points:
        settings = " ".join(point.fits.candidate.overrides)
        peak = format_size(point.fits.peak_bytes)
        rows.append([str(point.num_ranks), peak, f"{point.time:.2f}", settings, what_changes(point.fits)])
    return "\n".join(
        [
            _from_on(f"Fits in {memory}", front.cheapest),
            *([_from_on("Fits otherwise", front.fewest)] if front.fewest else ()),
            "",
            *format_table(rows),
            "",
            f"Time is that of a sample, relative to the first row. {format_count(front.num_fitting, 'candidate')} of "
            f"{format_count(front.num_plans, 'plan')} fit; nothing in the table is worse than another row in all of "
            f"ranks, memory and time, unless that one changes what is trained.",
        ]
    )


def _from_on(start: str, point: Point) -> str:
    settings = " ".join(point.fits.candidate.overrides)
    return f"{start} from {format_count(point.num_ranks, 'rank')} on: {settings} {what_changes(point.fits)}".rstrip()


def front_figures(front: Front) -> dict[str, Any]:
    """The figures of a search in result.json."""
    rows = advice_figures([point.fits for point in front.points])
    points = [row | {"relative_time": point.time} for row, point in zip(rows, front.points, strict=True)]
    cheapest = None if front.cheapest is None else points[front.points.index(front.cheapest)]
    return {
        "fits": cheapest is not None,
        "peak_bytes": None if cheapest is None else cheapest["peak_bytes"],
        "device_memory_bytes": front.memory_bytes,
        "cheapest": cheapest,
        "front": points,
        "num_fitting": front.num_fitting,
        "num_plans": front.num_plans,
    }
