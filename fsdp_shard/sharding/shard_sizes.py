"""The shape of each parameter on every rank, exactly, under each wrapper. Arithmetic on shapes, without torch.

`fully_shard` cuts dim 0 of each parameter as `torch.chunk` does, so the last ranks may hold less or nothing.
FullyShardedDataParallel concatenates the flattened parameters of a unit and divides the result evenly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]

_FLAT_ALIGN_BYTES = 16  # torch.distributed.fsdp._flat_param: each parameter of a unit begins at a multiple of this


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose parameters are gathered together.

    Attributes:
        fqn: FQN of the module; empty for the root.
        cls: Name of its class.
        parameters: FQNs of its parameters, except those of units inside it; tied ones once.
        num_params: Number of weights, with those that quantized parameters stand for.
        num_bytes: Bytes of the parameters as they are stored.
        dtype: The dtype that the unit computes in.
        num_trained: Number of elements that are not frozen.
        gathered_bytes: Bytes of the parameters when they are gathered.
        is_bytes: Whether the parameters are bytes in a floating-point dtype, which must not be cast.
    """

    fqn: str
    cls: str
    parameters: tuple[str, ...]
    num_params: int
    num_bytes: int
    dtype: str
    num_trained: int
    gathered_bytes: int
    is_bytes: bool = False


def row_shapes(shapes: Mapping[str, Shape], num_shards: int) -> list[dict[str, Shape]]:
    """The local shape of every parameter under `fully_shard`, for each of `num_shards` shards."""
    return [{name: _rows(shape, num_shards, index) for name, shape in shapes.items()} for index in range(num_shards)]


def flat_shapes(
    shapes: Mapping[str, Shape], units: Sequence[Sequence[str]], num_shards: int, itemsizes: Sequence[int]
) -> list[dict[str, Shape]]:
    """The local shape of every parameter under FullyShardedDataParallel, for each of `num_shards` shards.

    Args:
        shapes: The unsharded shape of every parameter, by FQN.
        units: FQNs of the parameters of each unit.
        num_shards: Number of shards.
        itemsizes: Bytes of an element of each unit in the dtype that it computes in.

    Returns:
        A mapping from FQN to a flat shape for each shard; the padding of a unit is `(padding of unit N)`.
    """
    if num_shards == 1:  # NO_SHARD: parameters as they are
        return [{name: (prod(shape),) for name, shape in shapes.items()}]
    shards: list[dict[str, Shape]] = [{} for _ in range(num_shards)]
    for number, (names, size) in enumerate(zip(units, itemsizes, strict=True)):
        starts, total = _aligned([prod(shapes[name]) for name in names], max(1, _FLAT_ALIGN_BYTES // size))
        length = -(-total // num_shards)
        for index, local in enumerate(shards):
            low, high = index * length, (index + 1) * length
            held = {
                name: max(0, min(high, start + prod(shapes[name])) - max(low, start))
                for name, start in zip(names, starts, strict=True)
            }
            local.update({name: (count,) for name, count in held.items()})
            local[f"(padding of unit {number})"] = (length - sum(held.values()),)
    return shards


def itemsize(dtype: str) -> int:
    """Bytes of an element of one of the dtypes that blocks compute in."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def _rows(shape: Shape, num_shards: int, index: int) -> Shape:
    if not shape:
        return (1,) if index == 0 else (0,)
    per_shard = -(-shape[0] // num_shards)
    rows = max(0, min(shape[0], (index + 1) * per_shard) - index * per_shard)
    return (rows, *shape[1:])


def _aligned(sizes: Sequence[int], multiple: int) -> tuple[list[int], int]:
    """The start of each tensor of `sizes` elements when each begins at a multiple of `multiple`, and the end."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // multiple) * multiple
        starts.append(start)
        end = start + size
    return starts, end
