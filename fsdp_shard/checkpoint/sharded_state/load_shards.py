"""Reads ranges of stored tensors into the memory of a rank's shards, and only these ranges."""

from collections.abc import Mapping

import torch

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import to_torch
from fsdp_shard.checkpoint.piece_reader import tensor_bytes
from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import CheckpointError
from fsdp_shard.models import QUANTIZATION_BLOCK, QuantizationCode

READ_STAGE_BYTES = 16 << 20  # read at a time if the dtype or the device differs
ENCODED_AT_ONCE = 1 << 20  # weights; encoding needs up to 20 bytes each
_WIDER_THAN_FLOAT16 = frozenset({torch.float32, torch.float64, torch.bfloat16})
_INFINITE_IN_FLOAT16 = 65520.0  # the smallest value that is rounded to infinity
_FLOAT16_INFINITY = 0x7C00  # its bits; those of NaN are higher


def may_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether values may be cast: among floating-point types, or to an integer type that has all of them."""
    if stored == wanted or (stored.is_floating_point and wanted.is_floating_point):
        return True
    if any(kind.is_floating_point or kind.is_complex or kind == torch.bool for kind in (stored, wanted)):
        return False
    few, many = torch.iinfo(stored), torch.iinfo(wanted)
    return many.min <= few.min and few.max <= many.max


def copy_stored(index: TensorIndex, stored: str, values: torch.Tensor, out: torch.Tensor) -> None:
    """Copy values of the tensor `stored` into `out`, cast to its dtype.

    Raises:
        CheckpointError: `out` is float16, in which finite values would become infinite.
    """
    out.copy_(values)
    if out.dtype != torch.float16 or values.dtype not in _WIDER_THAN_FLOAT16 or not _may_be_infinite(values, out):
        return
    if num_lost := int((values.isfinite() & (values.abs() >= _INFINITE_IN_FLOAT16)).sum()):
        raise CheckpointError(
            f"{index.path}: tensor {stored} holds values ({num_lost:,} or more) that are too large for float16 and "
            f"would become infinite; choose another dtype, such as bfloat16 or float32."
        )


def _may_be_infinite(values: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether `values`, or `out` that they were cast to, has elements that are not finite in float16; NaN counts."""
    if not values.numel():
        return False
    if out.device.type != "cpu":  # asking the device would wait for it
        low, high = (float(bound) for bound in values.aminmax())
        return not -_INFINITE_IN_FLOAT16 < low <= high < _INFINITE_IN_FLOAT16
    bits = out.view(torch.int16).numpy()  # a tenth of the time of a read from the page cache
    return bool(bits.max() >= _FLOAT16_INFINITY or bits.view("uint16").max() >= 0x8000 | _FLOAT16_INFINITY)


def load_shards(index: TensorIndex, shards: Mapping[str, LocalShard], names: Mapping[str, str] | None = None) -> None:
    """Fill each shard's own memory with its range, cast if the dtypes differ; read nothing else of the files.

    `names` maps shard names to those in `index` if they differ. Raises CheckpointError as `copy_stored` does.
    """
    for name, shard in shards.items():
        stored = names[name] if names is not None else name
        assert index.entry(stored).shape == shard.shape, name
        _load_range(index, stored, shard)


def encode_shards(
    index: TensorIndex, shards: Mapping[str, LocalShard], names: Mapping[str, str], code: QuantizationCode
) -> None:
    """Fill each shard of a quantized weight's rows with its range, reading only the weights of those rows.

    `names` maps a shard's name to the tensor in `index` whose weights it represents. Raises CheckpointError if `code`
    cannot represent them.
    """
    for name, shard in shards.items():
        _encode_range(index, names[name], shard, code)


def _encode_range(index: TensorIndex, stored: str, shard: LocalShard, code: QuantizationCode) -> None:
    """Encode full rows: a shard may begin and end inside a row, whose rest is then discarded."""
    assert shard.box is None, "only whole rows of elements were divided"
    entry, dtype = index.entry(stored), to_torch(index.entry(stored).dtype)
    if not dtype.is_floating_point:
        raise CheckpointError(
            f"{index.root}: tensor {stored} is stored as {entry.dtype}, so it cannot be quantized to {code.name}; "
            f"expected floating-point weights. Give adapter.quantize=none."
        )
    data = shard.data.view(torch.uint8)
    if not len(data):
        return
    low = shard.start * shard.data.element_size()
    high = low + len(data)
    last = -(-high // code.row_bytes)
    step = ENCODED_AT_ONCE // QUANTIZATION_BLOCK
    for row in range(low // code.row_bytes, last, step):
        first = row * QUANTIZATION_BLOCK
        weights = torch.empty(min(min(row + step, last) * QUANTIZATION_BLOCK, entry.num_elements) - first, dtype=dtype)
        index.read_into(stored, first, tensor_bytes(weights))
        numbers = weights.float()
        if not bool(numbers.isfinite().all()):
            raise CheckpointError(
                f"{index.root}: tensor {stored} holds weights that are not finite, which {code.name} has no codes for; "
                f"look with `fsdp-shard verify`, or give adapter.quantize=none."
            )
        encoded = code.encode(numbers).view(-1)
        at = row * code.row_bytes
        start, stop = max(low, at), min(high, at + len(encoded))
        data[start - low : stop - low].copy_(encoded[start - at : stop - at])


def _load_range(index: TensorIndex, stored: str, shard: LocalShard) -> None:
    if shard.box is not None:
        part = index.read(stored, tuple(slice(at, at + size) for at, size in zip(*shard.box, strict=True)))
        copy_stored(index, stored, part.reshape(-1), shard.data)
        return
    dtype = to_torch(index.entry(stored).dtype)
    if dtype == shard.data.dtype and shard.data.device.type == "cpu":
        if len(shard.data):
            index.read_into(stored, shard.start, tensor_bytes(shard.data))
        return
    per_stage = READ_STAGE_BYTES // dtype.itemsize
    stage = torch.empty(min(per_stage, len(shard.data)), dtype=dtype)
    for start in range(0, len(shard.data), per_stage):
        part = stage[: min(per_stage, len(shard.data) - start)]
        index.read_into(stored, shard.start + start, tensor_bytes(part))
        copy_stored(index, stored, part, shard.data[start : start + len(part)])
