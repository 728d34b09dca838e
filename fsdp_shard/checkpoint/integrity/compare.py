"""Whether two checkpoints hold the same weights, in whatever formats, layouts and floating-point dtypes they are.

Of one dtype: the same digests. Of two: the one with more bits, cast to the other, has the same bits (NaN is NaN), which
is what `convert` makes; torch does the cast, and is imported for that alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.digests import CHUNK_BYTES, read_chunks
from fsdp_shard.checkpoint.index import TensorEntry, TensorIndex
from fsdp_shard.checkpoint.integrity.scan import Scan, position
from fsdp_shard.checkpoint.integrity.verify_report import Place, Problem
from fsdp_shard.checkpoint.io.dtypes import CASTABLE, itemsize, to_torch, torch_name
from fsdp_shard.checkpoint.io.files import page_aligned
from fsdp_shard.checkpoint.io.thread_pool import in_threads

if TYPE_CHECKING:
    import torch

_CASTS = CASTABLE | {"F8_E4M3", "F8_E5M2"}
_STEP_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor that both have, under the name `name`; `one` and `two` are where each keeps it (ties are followed)."""

    name: str
    one: TensorEntry
    two: TensorEntry

    @property
    def is_same_dtype(self) -> bool:
        return self.one.dtype == self.two.dtype


@dataclass(frozen=True, slots=True)
class Matching:
    """The tensors that both checkpoints have, each once, and the names of those that only one has."""

    pairs: tuple[Pair, ...]
    only_one: tuple[str, ...]
    only_two: tuple[str, ...]


def match(one: TensorIndex, two: TensorIndex) -> Matching:
    """Which tensors are to be compared with which.

    A name that is only tied to another in one checkpoint, and unknown to the other, is left out: no content is lost.
    """
    pairs: dict[tuple[str, str], Pair] = {}
    only: tuple[list[str], list[str]] = ([], [])
    for name in dict.fromkeys([*one.tensors, *two.tensors, *one.aliases, *two.aliases]):
        first, second = lookup(one, name), lookup(two, name)
        if first is not None and second is not None:
            pairs.setdefault((first.name, second.name), Pair(name, first, second))
        elif name in one.tensors:
            only[0].append(name)
        elif name in two.tensors:
            only[1].append(name)
    return Matching(tuple(pairs.values()), tuple(only[0]), tuple(only[1]))


def described_differences(one: TensorIndex, two: TensorIndex, matching: Matching) -> tuple[list[Pair], list[Problem]]:
    """The pairs whose values can be compared, and what is a difference without: names, shapes, kinds of dtype."""
    problems = [Problem(f"tensor {n} is in {one.place}, but not in {two.place}.", tensor=n) for n in matching.only_one]
    problems += [Problem(f"tensor {n} is in {two.place}, but not in {one.place}.", tensor=n) for n in matching.only_two]
    comparable = []
    for pair in matching.pairs:
        whats = [(list(pair.one.shape), list(pair.two.shape)), (torch_name(pair.one.dtype), torch_name(pair.two.dtype))]
        if pair.one.shape == pair.two.shape and (pair.is_same_dtype or {pair.one.dtype, pair.two.dtype} <= _CASTS):
            comparable.append(pair)
        else:
            here, there = whats[0] if pair.one.shape != pair.two.shape else whats[1]
            text = f"tensor {pair.name} is {here} in {one.place}, but {there} in {two.place}."
            problems.append(Problem(text, tensor=pair.name))
    return comparable, problems


def lookup(index: TensorIndex, name: str) -> TensorEntry | None:
    """The entry of `name`, or of the tensor it is tied to, if there is one."""
    return index.tensors.get(index.aliases.get(name, name))


def first_difference(one: TensorIndex, two: TensorIndex, pair: Pair, found: Scan, other: Scan) -> Problem | None:
    """Where two tensors of one dtype begin to differ, if their digests do. Reads that chunk again."""
    digests, others = found.digests.get(pair.one.name), other.digests.get(pair.two.name)
    if digests is None or others is None or digests == others:
        return None
    wrong = [number for number in range(len(digests)) if digests[number] != others[number]]
    (data,), (theirs,) = read_chunks(one, pair.one.name, wrong[:1]), read_chunks(two, pair.two.name, wrong[:1])
    byte = next((at for at, (a, b) in enumerate(zip(data, theirs, strict=True)) if a != b), 0)
    flat = (wrong[0] * CHUNK_BYTES + byte) // itemsize(pair.one.dtype)
    return _differs(
        one, two, pair, flat, f"{len(wrong):,} of its {len(digests):,} chunks differ" if digests[1:] else ""
    )


def cast_differences(one: TensorIndex, two: TensorIndex, pairs: Sequence[Pair]) -> list[Problem]:
    """A problem for each pair of different dtypes whose values differ."""
    found: dict[str, Problem] = {}

    def work(share: Iterator[Pair]) -> None:
        for pair in share:
            flat = _first_cast_difference(one, two, pair)
            if flat is not None:
                dtypes = f"{torch_name(pair.one.dtype)} and {torch_name(pair.two.dtype)}"
                found[pair.name] = _differs(one, two, pair, flat, f"{dtypes} differ after the cast")

    if pairs:
        import torch  # noqa: F401  # by one thread, before there are two
    in_threads(work, pairs)
    return [found[pair.name] for pair in pairs if pair.name in found]


def _first_cast_difference(one: TensorIndex, two: TensorIndex, pair: Pair) -> int | None:
    """The first flat element where neither tensor is the other one's cast to its own dtype."""
    sizes = itemsize(pair.one.dtype), itemsize(pair.two.dtype)
    # float16 and bfloat16 have as many bits: either may have been made from the other.
    directions = [sizes[0] > sizes[1]] if sizes[0] != sizes[1] else [True, False]
    firsts: list[int] = []
    for is_downward in directions:
        flat = _first_not_cast(one, two, pair, is_downward)
        if flat is None:
            return None
        firsts.append(flat)
    return max(firsts)


def _first_not_cast(one: TensorIndex, two: TensorIndex, pair: Pair, is_downward: bool) -> int | None:
    """The first flat element that is not the cast; from the first checkpoint to the second if `is_downward`."""
    for start in range(0, pair.one.num_elements, _STEP_ELEMENTS):
        first, second = _elements(one, pair.one, start), _elements(two, pair.two, start)
        source, kept = (first, second) if is_downward else (second, first)
        cast = source.to(kept.dtype)
        differs = (_bits(cast) != _bits(kept)) | (_is_finite(source) & ~_is_finite(cast))
        if differs.any():
            differs &= ~(cast.float().isnan() & kept.float().isnan())
            if differs.any():
                return start + int(differs.nonzero()[0])
    return None


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    """Which values are; torch knows that of float8 only after a cast, which would take it from float64."""
    return (values.float() if values.element_size() == 1 else values).isfinite()


def _elements(index: TensorIndex, entry: TensorEntry, start: int) -> torch.Tensor:
    import torch

    data = page_aligned(min(_STEP_ELEMENTS, entry.num_elements - start) * itemsize(entry.dtype))
    index.read_into(entry.name, start, data)
    return torch.frombuffer(data, dtype=to_torch(entry.dtype))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _differs(one: TensorIndex, two: TensorIndex, pair: Pair, flat: int, note: str) -> Problem:
    places = [
        (index.root / file, Place(file, low, high))
        for index, entry in ((one, pair.one), (two, pair.two))
        for file, low, high in index.places(entry.name, flat, flat + 1)
    ]
    where = " and ".join(f"{path}, bytes {place.start}-{(place.stop or 0) - 1}" for path, place in places)
    note = f"; {note}" if note else ""
    return Problem(
        f"tensor {pair.name} differs from {position(pair.one, flat)} on: {where}{note}.",
        tuple(place for _, place in places),
        pair.name,
    )
