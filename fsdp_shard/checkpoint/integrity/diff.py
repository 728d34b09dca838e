"""`diff`: the differences of two checkpoints, tensor by tensor. Tensors of equal bytes cost only the comparison.

Imports torch only if the values of float8 tensors differ, or if the two store tensors under different names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity.compare import Pair, match, read_elements
from fsdp_shard.checkpoint.integrity.compared_locations import differences_of_adapters, notes_on_bases, open_both
from fsdp_shard.checkpoint.integrity.diff_report import DiffReport, Side, TensorDifference
from fsdp_shard.checkpoint.integrity.model_view import under_model_names
from fsdp_shard.checkpoint.integrity.scan import position
from fsdp_shard.checkpoint.io import in_threads, itemsize
from fsdp_shard.checkpoint.location import Location, locate

if TYPE_CHECKING:
    from fsdp_shard.checkpoint.integrity.numeric_errors import Errors

_STEP_BYTES = 1 << 20  # of each checkpoint: stays in the cache between reading and comparing
_JOB_STEPS = 16


def diff(a: str | Path | Location, b: str | Path | Location) -> DiffReport:
    """Compare two checkpoints of any formats: names, dtypes, shapes, and the values of every tensor.

    Tied names are resolved, so a tensor may be stored once in one checkpoint and twice in the other. If only one is an
    adapter, it is merged into its base first. If only one stores some name, both are compared under the names of the
    model of config.json.

    Args:
        a: A checkpoint file, directory, run directory or remote address.
        b: The other checkpoint.

    Returns:
        The report, largest differences first.

    Raises:
        CheckpointError: A checkpoint cannot be opened or read, or holds an adapter together with its base.
    """
    start = time.perf_counter()
    located = [item if isinstance(item, Location) else locate(item) for item in (a, b)]
    settings, notes = differences_of_adapters(*located), notes_on_bases(*located)
    one, two = open_both(*located)
    with ExitStack() as opened, one, two:
        matching = match(one, two)
        if matching.only_one or matching.only_two:
            views = under_model_names(one, two, located)
            if views is not None:
                one, two = map(opened.enter_context, views)
                matching = match(one, two)
        differing = _differing_bytes(one, two, matching.pairs)
        errors = _errors(one, two, differing)
        differences = [_difference(pair, errors.get(pair.name)) for pair in differing]
        return DiffReport(
            a=_side(a, one),
            b=_side(b, two),
            missing=tuple(one.tensors[name].spec for name in matching.only_one),
            extra=tuple(two.tensors[name].spec for name in matching.only_two),
            num_equal=len(matching.pairs) - len(differing),
            differences=tuple(sorted(differences, key=lambda difference: difference.rank, reverse=True)),
            settings=tuple(settings),
            seconds=time.perf_counter() - start,
            notes=tuple(notes),
        )


def _side(path: str | Path | Location, index: TensorIndex) -> Side:
    return Side(str(path), index.format, len(index.tensors), index.num_bytes)


def _differing_bytes(one: TensorIndex, two: TensorIndex, pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that differ in dtype, shape or bytes."""
    alike = [pair for pair in pairs if pair.is_same_dtype and pair.one.shape == pair.two.shape]
    jobs = [(pair, start) for pair in alike for start in _starts(pair)]
    different = {pair.name for pair in pairs} - {pair.name for pair in alike}

    def work(jobs: Iterator[tuple[Pair, int]]) -> None:
        for pair, start in jobs:
            if pair.name not in different and any(a != b for _, a, b in _read(one, two, pair, start)):
                different.add(pair.name)

    in_threads(work, jobs, "diff")
    return [pair for pair in pairs if pair.name in different]


def _errors(one: TensorIndex, two: TensorIndex, pairs: Sequence[Pair]) -> dict[str, Errors]:
    """Return the numeric errors of the pairs of equal shape."""
    if not pairs:
        return {}
    from fsdp_shard.checkpoint.integrity.numeric_errors import Errors, decode  # loads numpy

    if any(entry.dtype.startswith("F8") for pair in pairs for entry in (pair.one, pair.two)):
        import torch  # noqa: F401  # by one thread, before the others start
    jobs = [(pair, start) for pair in pairs if pair.one.shape == pair.two.shape for start in _starts(pair)]
    parts: list[tuple[str, int, Errors]] = []

    def work(jobs: Iterator[tuple[Pair, int]]) -> None:
        for pair, start in jobs:
            found = Errors()
            for at, a, b in _read(one, two, pair, start):
                found.add(decode(pair.one.dtype, a), decode(pair.two.dtype, b), at)
            parts.append((pair.name, start, found))

    in_threads(work, jobs, "diff, errors")
    errors = {pair.name: Errors() for pair in pairs if pair.one.shape == pair.two.shape}
    for name, _, found in sorted(parts, key=lambda part: part[:2]):  # the same sums in any order of the threads
        errors[name].merge(found)
    return errors


def _step_elements(pair: Pair) -> int:
    return _STEP_BYTES // max(itemsize(pair.one.dtype), itemsize(pair.two.dtype))


def _starts(pair: Pair) -> range:
    """Return the flat elements at which the jobs of a pair begin."""
    return range(0, pair.one.num_elements, _step_elements(pair) * _JOB_STEPS)


def _read(one: TensorIndex, two: TensorIndex, pair: Pair, start: int) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yield (flat element, bytes of A from there, bytes of B) for each step of the job at element `start`."""
    step = _step_elements(pair)
    stop = min(start + step * _JOB_STEPS, pair.one.num_elements)
    for at in range(start, stop, step):
        elements = range(at, min(at + step, stop))
        yield at, read_elements(one, pair.one, elements), read_elements(two, pair.two, elements)


def _difference(pair: Pair, errors: Errors | None) -> TensorDifference:
    dtypes, shapes = (pair.one.dtype, pair.two.dtype), (pair.one.shape, pair.two.shape)
    if errors is None:
        return TensorDifference(pair.name, dtypes, shapes)
    figures = (errors.num_different, errors.num_special, errors.max_absolute, errors.max_relative, errors.cosine)
    worst = tuple(position(pair.one, errors.worst)) if errors.max_absolute else None
    return TensorDifference(pair.name, dtypes, shapes, *figures, worst)
