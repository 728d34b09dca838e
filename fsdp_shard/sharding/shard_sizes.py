"""Which part of each parameter every rank holds, exactly, under each wrapper. Pure arithmetic on shapes.

`fully_shard` cuts dim 0 of each parameter as `torch.chunk` does, so the last ranks may hold less or nothing.
FullyShardedDataParallel lays the parameters of a unit end to end and divides that evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

Shape = tuple[int, ...]

_FLAT_ALIGN_BYTES = 16  # torch.distributed.fsdp._flat_param: each parameter of a unit begins at a multiple of this


def row_shares(shapes: Mapping[str, Shape], num_shards: int) -> list[dict[str, Shape]]:
    """For each of `num_shards` shards, the local shape of every parameter under `fully_shard`."""
    return [{name: _rows(shape, num_shards, index) for name, shape in shapes.items()} for index in range(num_shards)]


def flat_shares(
    shapes: Mapping[str, Shape], units: Sequence[Sequence[str]], num_shards: int, itemsizes: Sequence[int]
) -> list[dict[str, Shape]]:
    """The same under FullyShardedDataParallel: flat parts of the parameters of each unit (`units` names them).

    `itemsizes` are bytes of an element of each unit in the dtype that it computes in. What only pads a unit to a
    multiple is in the key `(padding of unit N)`.
    """
    if num_shards == 1:  # NO_SHARD: parameters as they are
        return [{name: (prod(shape),) for name, shape in shapes.items()}]
    shares: list[dict[str, Shape]] = [{} for _ in range(num_shards)]
    for number, (names, itemsize) in enumerate(zip(units, itemsizes, strict=True)):
        starts, total = _layout([prod(shapes[name]) for name in names], max(1, _FLAT_ALIGN_BYTES // itemsize))
        part = -(-total // num_shards)
        for index, share in enumerate(shares):
            low, high = index * part, (index + 1) * part
            held = {
                name: max(0, min(high, start + prod(shapes[name])) - max(low, start))
                for name, start in zip(names, starts, strict=True)
            }
            share.update({name: (count,) for name, count in held.items()})
            share[f"(padding of unit {number})"] = (part - sum(held.values()),)
    return shares


def whole_shares(shapes: Mapping[str, Shape], num_shards: int) -> list[dict[str, Shape]]:
    """The same where each rank has all of every parameter."""
    return [dict(shapes) for _ in range(num_shards)]


def itemsize(dtype: str) -> int:
    """Bytes of an element of one of the dtypes that blocks compute in."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def _rows(shape: Shape, num_shards: int, index: int) -> Shape:
    if not shape:
        return (1,) if index == 0 else (0,)
    per_shard = -(-shape[0] // num_shards)
    rows = max(0, min(shape[0], (index + 1) * per_shard) - index * per_shard)
    return (rows, *shape[1:])


def _layout(sizes: Sequence[int], multiple: int) -> tuple[list[int], int]:
    """Where tensors of `sizes` elements begin when laid end to end, each at a multiple of `multiple`, and the end."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // multiple) * multiple
        starts.append(start)
        end = start + size
    return starts, end
