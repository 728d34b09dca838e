"""`diff`: how two checkpoints differ, tensor by tensor. Streams; tensors of equal bytes cost a comparison of bytes.

Imports no torch, and numpy only where values differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp_shard.checkpoint.index import TensorEntry, TensorIndex
from fsdp_shard.checkpoint.integrity.compare import Pair, match
from fsdp_shard.checkpoint.integrity.diff_report import DiffReport, Side, TensorDifference
from fsdp_shard.checkpoint.integrity.numeric_errors import Errors, decode
from fsdp_shard.checkpoint.integrity.scan import position
from fsdp_shard.checkpoint.io.dtypes import itemsize
from fsdp_shard.checkpoint.io.files import page_aligned
from fsdp_shard.checkpoint.io.thread_pool import in_threads
from fsdp_shard.checkpoint.open import open_checkpoint

_STEP_BYTES = 1 << 20  # of each side; stays in the cache between reading and comparing
_JOB_STEPS = 16


def diff(a: str | Path, b: str | Path) -> DiffReport:
    """Compare what lies at `a` and `b`, of any format each: names, dtypes, shapes, and the values of every tensor.

    Tied names are followed, so it does not matter whether a tied tensor is stored once or twice. Raises what
    `open_checkpoint` does.
    """
    start = time.perf_counter()
    with open_checkpoint(a) as one, open_checkpoint(b) as two:
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
            seconds=time.perf_counter() - start,
        )


def _side(path: str | Path, index: TensorIndex) -> Side:
    return Side(str(path), index.format, len(index.tensors), index.num_bytes)


def _differing_bytes(one: TensorIndex, two: TensorIndex, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs that are not of one dtype and shape with the same bytes."""
    alike = [pair for pair in pairs if pair.is_same_dtype and pair.one.shape == pair.two.shape]
    jobs = [(pair, start) for pair in alike for start in _starts(pair)]
    different = {pair.name for pair in pairs} - {pair.name for pair in alike}

    def work(share: Iterator[tuple[Pair, int]]) -> None:
        for pair, start in share:
            for at in _steps(pair, start):
                if pair.name not in different and _read(one, pair.one, at) != _read(two, pair.two, at):
                    different.add(pair.name)

    in_threads(work, jobs)
    return [pair for pair in pairs if pair.name in different]


def _errors(one: TensorIndex, two: TensorIndex, pairs: Sequence[Pair]) -> dict[str, Errors]:
    """How far the pairs of one shape are apart."""
    jobs = [(pair, start) for pair in pairs if pair.one.shape == pair.two.shape for start in _starts(pair)]
    parts: list[tuple[str, int, Errors]] = []
    if jobs:
        import numpy  # noqa: F401  # by one thread, before there are two

    def work(share: Iterator[tuple[Pair, int]]) -> None:
        for pair, start in share:
            found = Errors()
            for at in _steps(pair, start):
                first, second = _read(one, pair.one, at), _read(two, pair.two, at)
                found.add(
                    decode(pair.one.dtype, memoryview(first)), decode(pair.two.dtype, memoryview(second)), at.start
                )
            parts.append((pair.name, start, found))

    in_threads(work, jobs)
    errors = {pair.name: Errors() for pair in pairs if pair.one.shape == pair.two.shape}
    for name, _, found in sorted(parts, key=lambda part: part[:2]):  # the same sums in whatever order threads ran
        errors[name].merge(found)
    return errors


def _step_elements(pair: Pair) -> int:
    return _STEP_BYTES // max(itemsize(pair.one.dtype), itemsize(pair.two.dtype))


def _starts(pair: Pair) -> range:
    """The flat elements at which the jobs of a pair begin."""
    return range(0, pair.one.num_elements, _step_elements(pair) * _JOB_STEPS)


def _steps(pair: Pair, start: int) -> Iterator[range]:
    """The ranges of flat elements that the job from `start` on reads, one after the other."""
    step = _step_elements(pair)
    stop = min(start + step * _JOB_STEPS, pair.one.num_elements)
    return (range(at, min(at + step, stop)) for at in range(start, stop, step))


def _read(index: TensorIndex, entry: TensorEntry, elements: range) -> memoryview:
    data = page_aligned(len(elements) * itemsize(entry.dtype))
    index.read_into(entry.name, elements.start, data)
    return data


def _difference(pair: Pair, errors: Errors | None) -> TensorDifference:
    return TensorDifference(
        name=pair.name,
        dtypes=(pair.one.dtype, pair.two.dtype),
        shapes=(pair.one.shape, pair.two.shape),
        num_different=errors.num_different if errors else None,
        num_special=errors.num_special if errors else None,
        max_absolute=errors.max_absolute if errors else None,
        max_relative=errors.max_relative if errors else None,
        cosine=errors.cosine if errors else None,
        worst=tuple(position(pair.one, errors.worst)) if errors and errors.max_absolute else None,
    )
