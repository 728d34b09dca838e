"""Searches for settings that fit: combinations of changes in order of cost, each with a real plan.

Changes with identical training come before those that change it. Settings chosen by the user stay, unless nothing
fits otherwise.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fsdp_shard.errors import InputError
from fsdp_shard.planning.memory_plan import MemoryPlan
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.search.candidate_changes import MAX_RANKS, MemorySaver, Option, memory_savers
from fsdp_shard.planning.search.planner import Planner

NUM_ADVISED = 4  # of each kind
_MAX_CANDIDATES = 50_000
_BATCH, _MICRO_BATCH = "train.global_batch_size", "train.micro_batch_size="
_LARGER_BATCH = 30.0  # its cost

_DIVIDED = "shard.tensor_parallel"
_Choice = tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A run with some changes.

    Attributes:
        run: The run.
        overrides: The changes, as typed on the command line.
        cost: The sum of the changes' costs, see `memory_savers`.
        slowdown: The part of the cost that is time: the percentage by which a step takes longer.
        trains: How they change the training.
        replaced: Changed settings for which the user had chosen another value.
    """

    run: PlannedRun
    overrides: tuple[str, ...]
    cost: float
    slowdown: float
    trains: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fitting:
    """A candidate that fits, its peak, and the seconds per step if known."""

    candidate: Candidate
    peak_bytes: int
    seconds: float | None = None


def advise(
    planner: Planner,
    run: PlannedRun,
    memory_bytes: int,
    given: Collection[str] = (),
    *,
    num_nodes: int = 1,
    fixed: Collection[str] = (),
    trains_other: bool = True,
) -> list[Fitting]:
    """Find settings with which a run fits: identical training first, then cheapest first.

    Args:
        planner: Plans the runs.
        run: The run that does not fit.
        memory_bytes: Memory of a device.
        given: Names of the settings that the user chose. They stay unchanged, unless nothing fits with them.
        num_nodes: Number of machines.
        fixed: Names of settings that stay in any case, such as those typed as false.
        trains_other: Whether the training may change; it may not in a resumed run.

    Returns:
        The first few of each kind; none if nothing fits.
    """
    most_ranks = run.num_ranks if "launch.ranks" in fixed else max(MAX_RANKS, 2 * run.num_ranks)
    if planner.cannot_hold(replace(run, num_ranks=most_ranks), memory_bytes):
        return []  # an oversized config does not start a search
    savers = memory_savers(run, given, num_nodes)
    search = _Search(planner, run, memory_bytes, given)
    # Divided layers are the most expensive to plan, so they are tried only if nothing fits without them.
    attempts = ({*given, *fixed, _DIVIDED}, {*given, *fixed}, set(fixed))
    same = next(filter(None, (search.first(savers, kept, trains_other=False) for kept in attempts)), [])
    if not trains_other:
        return same
    others = (search.first(savers, kept, trains_other=True, but=same) for kept in attempts[: 1 if same else None])
    return [*same, *next(filter(None, others), [])]


def fitting(
    planner: Planner, run: PlannedRun, memory_bytes: int, given: Collection[str], fixed: Collection[str], limit: int
) -> list[Fitting]:
    """Find all candidates of the first kind that has any, among the first `limit` plans; the rank count is fixed.

    Args:
        planner: Plans the runs.
        run: The run, which may or may not fit.
        memory_bytes: Memory of a device.
        given: Names of the settings that the user chose.
        fixed: Names of settings that stay in any case, such as those typed as false.
        limit: Number of plans.
    """
    if planner.cannot_hold(run, memory_bytes):
        return []
    savers = memory_savers(run, given)
    search = _Search(planner, run, memory_bytes, given)
    for trains_other in (False, True):
        for stays in ({*given, *fixed, "launch.ranks"}, {*fixed, "launch.ranks"}):
            if found := [fits for _, fits in search.walk(savers, stays, limit, trains_other=trains_other)]:
                return found
    return []


class _Search:
    """Plans candidates of one run; candidates that do not fit are planned once."""

    def __init__(self, planner: Planner, run: PlannedRun, memory_bytes: int, given: Collection[str]) -> None:
        self._planner, self._run, self._memory_bytes, self._given = planner, run, memory_bytes, set(given)
        self._known: dict[tuple[str, ...], MemoryPlan | None] = {}  # None: not possible
        # All changes except the micro-batch's -> its size and the peak of the last plan with these changes.
        self._peaks: dict[tuple[str, ...], tuple[int, int]] = {}

    def first(
        self, savers: Sequence[MemorySaver], fixed: Collection[str], *, trains_other: bool, but: Sequence[Fitting] = ()
    ) -> list[Fitting]:
        """Find the first few candidates that fit, none a superset of an earlier one's changes; see `walk`."""
        found: list[Fitting] = []
        enough: list[_Choice] = []
        figures = {(fits.peak_bytes, fits.seconds) for fits in but}
        limit = self._planner.max_plans
        for choice, fits in self.walk(savers, fixed, limit, trains_other=trains_other, enough=enough, but=but):
            enough.append(choice)
            if (key := (fits.peak_bytes, fits.seconds)) in figures and fits.seconds is not None:
                continue  # it costs more without effect
            figures.add(key)
            found.append(fits)
            if len(found) == NUM_ADVISED:
                break
        return sorted(found, key=lambda fits: (fits.seconds is None, fits.seconds or 0.0))

    def walk(
        self,
        savers: Sequence[MemorySaver],
        fixed: Collection[str],
        limit: int,
        *,
        trains_other: bool,
        enough: Sequence[_Choice] = (),
        but: Sequence[Fitting] = (),
    ) -> Iterator[tuple[_Choice, Fitting]]:
        """Yield candidates that fit, by cost.

        Args:
            savers: The possible changes.
            fixed: Names of settings that never change.
            limit: Number of plans.
            trains_other: Whether to search only candidates that change the training, or only those that do not.
            enough: Choices that exclude all candidates with their changes and more; may grow during the walk.
            but: Candidates found earlier, which exclude all candidates with their changes.
        """
        savers = [saver.allowed(fixed, may_change_training=trains_other) for saver in savers]
        lengths = [len(saver.options) for saver in savers]
        last = self._planner.num_plans + limit
        for choice in _by_cost(savers):
            if self._planner.num_plans >= last:
                return
            if any(all(n >= m for n, m in zip(choice, less, strict=True)) for less in enough):
                continue
            candidate = self._candidate(savers, choice)
            if candidate is None or bool(candidate.trains) != trains_other or {*candidate.replaced} & {*fixed}:
                continue
            is_known = any({*candidate.overrides} >= {*fits.candidate.overrides} for fits in but)
            if is_known or self._is_too_large(candidate):
                continue
            frugal = tuple(
                length - 1 if saver.is_of_activations else number
                for number, length, saver in zip(choice, lengths, savers, strict=True)
            )
            most = self._plan(self._candidate(savers, frugal))
            if most is not None and not most.fits(self._memory_bytes):
                continue  # regardless of changes to activations
            plan = self._plan(candidate)
            if plan is None or not self._planner.fits(candidate.run, plan, self._memory_bytes):
                continue
            try:
                self._planner.check_model(candidate.run)
            except InputError:
                continue
            seconds = self._planner.seconds
            assert plan.peak_bytes is not None, "a plan that fits has a peak"
            yield choice, Fitting(candidate, plan.peak_bytes, None if seconds is None else seconds(candidate.run))

    def _candidate(self, savers: Sequence[MemorySaver], choice: _Choice) -> Candidate | None:
        """The run with the chosen options, and a larger global batch if its ranks need one; None if not possible."""
        options = [saver.options[number] for saver, number in zip(savers, choice, strict=True)]
        run: PlannedRun | None = self._run
        for option in options:
            run = None if run is None else option.change(run)
        if run is None:
            return None
        options += _larger_batch(run)
        for option in options[len(choice) :]:
            run = option.change(run) or run
        overrides = tuple(chain.from_iterable(option.overrides for option in options))
        names = {name for option in options for name in option.names}
        return Candidate(
            run,
            overrides,
            sum(option.cost for option in options),
            sum(option.cost for option in options if not option.trains and "launch.ranks" not in option.names),
            tuple(option.trains for option in options if option.trains),
            tuple(sorted(name for name in names if name in self._given)),
        )

    def _plan(self, candidate: Candidate | None) -> MemoryPlan | None:
        """The plan of a candidate; None if `finetune` would reject it."""
        if candidate is None:
            return None
        if candidate.overrides not in self._known:
            try:
                self._planner.check(candidate.run)
                plan = self._known[candidate.overrides] = self._planner.plan(candidate.run)
                if plan.peak_bytes is not None:
                    self._peaks[_other_changes(candidate)] = candidate.run.train.micro_batch_size, plan.peak_bytes
            except InputError:
                self._known[candidate.overrides] = None
        return self._known[candidate.overrides]

    def _is_too_large(self, candidate: Candidate) -> bool:
        """Whether it cannot fit, because half a micro-batch takes at least half of the memory."""
        size, peak_bytes = self._peaks.get(_other_changes(candidate), (1, 0))
        return peak_bytes * candidate.run.train.micro_batch_size > self._memory_bytes * size


def _other_changes(candidate: Candidate) -> tuple[str, ...]:
    return tuple(change for change in candidate.overrides if not change.startswith(_MICRO_BATCH))


def _larger_batch(run: PlannedRun) -> list[Option]:
    """The option of the smallest larger global batch that its ranks can divide; none if they divide the current one."""
    size, unit = run.train.global_batch_size, run.train.micro_batch_size * max(1, run.num_data_ranks)
    if size % unit == 0:
        return []
    needed = -(-size // unit) * unit

    def change(run: PlannedRun) -> PlannedRun:
        return replace(run, train=replace(run.train, global_batch_size=needed))

    return [Option(change, _LARGER_BATCH, (f"{_BATCH}={needed}",), "a larger global batch")]


def _by_cost(savers: Sequence[MemorySaver]) -> Iterator[_Choice]:
    """Yield option indices for each saver, cheapest sum first; each saver's options are sorted by cost."""
    costs = [[option.cost for option in saver.options] for saver in savers]
    start = (0,) * len(costs)
    heap: list[tuple[float, _Choice]] = [(0.0, start)]
    seen = {start}
    for _ in range(_MAX_CANDIDATES):
        if not heap:
            return
        _, choice = heapq.heappop(heap)
        yield choice
        for index, number in enumerate(choice):
            if number + 1 < len(costs[index]):
                following = (*choice[:index], number + 1, *choice[index + 1 :])
                if following not in seen:
                    seen.add(following)
                    cost = sum(options[n] for options, n in zip(costs, following, strict=True))
                    heapq.heappush(heap, (cost, following))
