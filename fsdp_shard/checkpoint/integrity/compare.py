"""Compares the weights of two checkpoints of any format, layout and floating-point dtype.

Tensors of the same dtype must have equal digests. For different dtypes, the wider tensor cast to the other dtype must
have the same bits (NaN equals NaN), as in `convert`; only this cast imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.adapters.adapter_checks import refuse_adapter_within
from fsdp_shard.checkpoint.digests import CHUNK_BYTES, read_chunks
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity.scan import Scan, position
from fsdp_shard.checkpoint.integrity.verify_report import ByteRange, Problem
from fsdp_shard.checkpoint.io import CASTABLE, in_threads, itemsize, page_aligned, to_torch, torch_name
from fsdp_shard.checkpoint.tensor_entry import TensorEntry

if TYPE_CHECKING:
    import torch

_CASTS = CASTABLE | {"F8_E4M3", "F8_E5M2"}
_STEP_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor that both checkpoints have as `name`; `one` and `two` are its entries (ties are followed)."""

    name: str
    one: TensorEntry
    two: TensorEntry

    @property
    def is_same_dtype(self) -> bool:
        """Whether both have the same dtype."""
        return self.one.dtype == self.two.dtype


@dataclass(frozen=True, slots=True)
class Matching:
    """The tensors in both checkpoints, each once, and the names of those in only one."""

    pairs: tuple[Pair, ...]
    only_one: tuple[str, ...]
    only_two: tuple[str, ...]


def match(one: TensorIndex, two: TensorIndex) -> Matching:
    """Pair the tensors of two checkpoints by name, following ties.

    A name that is only an alias in one checkpoint, and missing in the other, is skipped: no content is lost.

    Raises:
        CheckpointError: One holds an adapter together with its base: without it, two models would look equal.
    """
    refuse_adapter_within(one)
    refuse_adapter_within(two)
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
    """The pairs whose values can be compared, and the differences in names, shapes and kinds of dtype."""
    sides = ((matching.only_one, one, two), (matching.only_two, two, one))
    problems = [
        Problem(f"tensor {name} is in {a.path}, but not in {b.path}.", tensor=name)
        for names, a, b in sides
        for name in names
    ]
    comparable = []
    for pair in matching.pairs:
        is_other_shape = pair.one.shape != pair.two.shape
        if is_other_shape or not (pair.is_same_dtype or {pair.one.dtype, pair.two.dtype} <= _CASTS):
            a, b = (list(entry.shape) if is_other_shape else torch_name(entry.dtype) for entry in (pair.one, pair.two))
            text = f"tensor {pair.name} is {a} in {one.path}, but {b} in {two.path}."
            problems.append(Problem(text, tensor=pair.name))
        else:
            comparable.append(pair)
    return comparable, problems


def lookup(index: TensorIndex, name: str) -> TensorEntry | None:
    """The entry of `name` or of the tensor to which it is tied, if any."""
    return index.tensors.get(index.aliases.get(name, name))


def read_elements(index: TensorIndex, entry: TensorEntry, elements: range) -> memoryview:
    """The bytes of a range of flat elements."""
    data = page_aligned(len(elements) * itemsize(entry.dtype))
    index.read_into(entry.name, elements.start, data)
    return data


def first_difference(one: TensorIndex, two: TensorIndex, pair: Pair, found: Scan, other: Scan) -> Problem | None:
    """The first difference of two tensors of one dtype, if their digests differ. Reads that chunk again."""
    digests, others = found.digests.get(pair.one.name), other.digests.get(pair.two.name)
    if digests is None or others is None or digests == others:
        return None
    wrong = [number for number in range(len(digests)) if digests[number] != others[number]]
    (data,), (theirs,) = read_chunks(one, pair.one.name, wrong[:1]), read_chunks(two, pair.two.name, wrong[:1])
    byte = next((at for at, (a, b) in enumerate(zip(data, theirs, strict=True)) if a != b), 0)
    flat = (wrong[0] * CHUNK_BYTES + byte) // itemsize(pair.one.dtype)
    note = f"; {len(wrong):,} of its {len(digests):,} chunks differ" if digests[1:] else ""
    return _differs(one, two, pair, flat, note)


def cast_differences(one: TensorIndex, two: TensorIndex, pairs: Sequence[Pair]) -> list[Problem]:
    """A problem for each pair of different dtypes whose values differ."""
    found: dict[str, Problem] = {}

    def work(jobs: Iterator[Pair]) -> None:
        for pair in jobs:
            flat = _first_cast_difference(one, two, pair)
            if flat is not None:
                dtypes = f"{torch_name(pair.one.dtype)} and {torch_name(pair.two.dtype)}"
                found[pair.name] = _differs(one, two, pair, flat, f"; {dtypes} differ after the cast")

    if pairs:
        import torch  # noqa: F401  # in one thread, before the others start
    in_threads(work, pairs)
    return [found[pair.name] for pair in pairs if pair.name in found]


def _first_cast_difference(one: TensorIndex, two: TensorIndex, pair: Pair) -> int | None:
    """The first flat element where neither tensor is the other one's cast to its own dtype."""
    sizes = itemsize(pair.one.dtype), itemsize(pair.two.dtype)
    # float16 and bfloat16 have the same size: either may be a cast of the other.
    directions = [sizes[0] > sizes[1]] if sizes[0] != sizes[1] else [True, False]
    firsts = [_first_not_cast(one, two, pair, is_downward) for is_downward in directions]
    found = [flat for flat in firsts if flat is not None]
    return max(found) if len(found) == len(firsts) else None


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
    """Which values are finite; torch needs a cast for float8, but float64 is not cast, as it might overflow."""
    return (values.float() if values.element_size() == 1 else values).isfinite()


def _elements(index: TensorIndex, entry: TensorEntry, start: int) -> torch.Tensor:
    import torch

    data = read_elements(index, entry, range(start, min(start + _STEP_ELEMENTS, entry.num_elements)))
    return torch.frombuffer(data, dtype=to_torch(entry.dtype))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _merged(index: TensorIndex) -> str:
    """What an adapter adds to the bytes of its base, which are those of the values before it."""
    return f" merged with {index.metadata['adapter']}" if index.parts and "adapter" in index.metadata else ""


def _differs(one: TensorIndex, two: TensorIndex, pair: Pair, flat: int, note: str) -> Problem:
    ranges = [
        (index, ByteRange(*span))
        for index, entry in ((one, pair.one), (two, pair.two))
        for span in index.spans(entry.name, flat, flat + 1)
        if span.stop > span.start  # a computed or converted value has no bytes of its own
    ]
    where = " and ".join(item.text(index.root) + _merged(index) for index, item in ranges)
    where = where or f"{one.path} and {two.path}, which do not store it in this form"
    text = f"tensor {pair.name} differs from {position(pair.one, flat)} on: {where}{note}."
    return Problem(text, tuple(item for _, item in ranges), pair.name)
