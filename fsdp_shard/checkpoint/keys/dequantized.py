"""Dequantizes weights as they are read: fp8 and fp4 with block scales, and MXFP4.

DeepSeek and gpt-oss are published in these forms. The values are bit-equal to those of transformers' `from_pretrained`
with `dequantize=True` (`integrations/finegrained_fp8.py`, `integrations/mxfp4.py`), but are computed one range or
expert at a time. torch is imported only to decode.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import find_torch_name, itemsize, kind_of, to_torch
from fsdp_shard.checkpoint.keys.quantized_weights import (
    DEQUANTIZED,
    FLOAT8,
    IS_DEQUANTIZED,
    quantization,
    quantization_settings,
    scales_of,
)
from fsdp_shard.checkpoint.model_files import CONFIG, read_config
from fsdp_shard.checkpoint.tensor_entry import TensorEntry
from fsdp_shard.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_OTHER_NAMES = (".scale", ".qscale_weight")  # of DeepSeek-V4 and Mistral Large 4, for x.weight
# Other scales of a layer with an fp8 weight: those of its inputs and outputs, which only a quantized layer rounds, and
# the weight's own under another name. transformers does not read them either.
_OTHER_SCALES = ("activation_scale", "input_scale", "output_scale", "weight_scale", "qscale_act")
_PLAIN = frozenset({"BF16", "F16", "F32"})
_SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0", "U8"})
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MXFP4_BLOCK = (16, 32)  # bytes and elements of a block
_FP4, _FP4_BLOCK = "I8", (1, 32)  # two numbers a byte, of which the low bits are the first
_ADVICE = "give the model that it was made from, or one that transformers has dequantized and saved"
_NUM_EXPERTS_KEPT = 4  # two threads read neighboring ranges, each of which may lie in two experts


def dequantize(index: TensorIndex, dtype: str | None) -> TensorIndex:
    """Return the same model with its quantized weights in floating point, without their scales.

    Args:
        index: Weights in fp8 or fp4 with block scales, or in MXFP4.
        dtype: safetensors name of the new dtype; None: that in config.json, else that of the weights in floating point.

    Raises:
        CheckpointError: Weights are not quantized by one of these methods, or scales do not fit their weights.
    """
    method = quantization(index)
    if method not in DEQUANTIZED:
        found = "is not quantized" if method is None else f"is quantized by {method}"
        raise CheckpointError(
            f"{index.path} {found}, and dequantize=true is for weights in {' or '.join(sorted(DEQUANTIZED))}; remove "
            f"it, or give the model that it was made from."
        )
    scales = _block_scales(index)
    codes = [name for name in index.names if name.endswith(_BLOCKS)]
    make = _Dequantization(index, dtype or _default_dtype(index, frozenset(scales.values())))
    dropped = {*scales.values(), *codes}
    tensors = {name: entry for name, entry in index.tensors.items() if name not in dropped}
    for weight, scale in scales.items():
        start = weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}_"
        for other in _OTHER_SCALES:
            tensors.pop(f"{start}{other}", None)
        tensors[weight] = make.scaled(weight, scale)
    for name in codes:
        weight = name.removesuffix(_BLOCKS)
        tensors.pop(weight + _SCALES, None)
        tensors[weight] = make.mxfp4(weight)
    dequantized = replace(index, tensors=tensors, parts=(index,), metadata={**index.metadata, IS_DEQUANTIZED: True})
    _refuse_left(dequantized)
    if not dropped:
        example = next((name for name, entry in tensors.items() if kind_of(entry.dtype) == "integer"), index.names[0])
        raise CheckpointError(
            f"{index.path} is quantized by {method}, but no scales are named {_SCALE} (or {' or '.join(_OTHER_NAMES)}) "
            f"and no codes {_BLOCKS}, so it is not known how to dequantize it ({example} is {tensors[example].dtype}); "
            f"{_ADVICE}."
        )
    return dequantized


def _block_scales(index: TensorIndex) -> dict[str, str]:
    """Return {weight: its scales}, by the names that transformers' quantizer of fp8 reads."""
    scales = {name.removesuffix(_SCALE): name for name in index.names if name.endswith(_SCALE)}
    for weight, entry in index.tensors.items():
        if entry.dtype in FLOAT8 | {_FP4} and weight.endswith(".weight"):
            names = (weight.removesuffix(".weight") + end for end in _OTHER_NAMES)
            if (found := next((name for name in names if name in index.tensors), None)) is not None:
                scales.setdefault(weight, found)
    return scales


def _refuse_left(index: TensorIndex) -> None:
    """Refuse a model of which weights remain quantized, by another method or under other names."""
    tensors = index.tensors
    matrices = {name: entry.dtype for name, entry in tensors.items() if len(entry.shape) > 1}
    if (left := next((name for name, dtype in matrices.items() if dtype in FLOAT8), None)) is not None:
        raise CheckpointError(f"{index.path}: {left} is {tensors[left].dtype}, but there is no {left}{_SCALE} for it.")
    codes = scales_of(index, {dtype for dtype in matrices.values() if kind_of(dtype) == "integer"})
    for left, scales in codes.items():
        raise CheckpointError(
            f"{index.path}: {left} is {tensors[left].dtype} with scales in {scales}, and dequantize=true is for "
            f"weights in {' or '.join(sorted(DEQUANTIZED))}; {_ADVICE}."
        )


def _default_dtype(index: TensorIndex, scales: Collection[str]) -> str:
    """Return the dtype that transformers takes: the config's, else that of the first tensor in floating point."""
    config = read_config(index.model_directory)
    names = (config.get("dtype"), config.get("torch_dtype"))
    found = next((find_torch_name(name) for name in names if isinstance(name, str)), None)
    if found is not None and found in _PLAIN:
        return found
    plain = [entry for entry in index.tensors.values() if entry.dtype in _PLAIN and entry.num_bytes]
    plain = [entry for entry in plain if entry.name not in scales and not entry.name.endswith(_OTHER_SCALES)]
    return min(plain, key=lambda entry: (entry.pieces[0].file, entry.name)).dtype if plain else "BF16"


class _Dequantization:
    """Makes the entries of dequantized weights."""

    def __init__(self, index: TensorIndex, dtype: str) -> None:
        self._index, self._dtype = index, dtype
        # Those of the source itself: `config=` may name another directory, which describes the result.
        settings = quantization_settings(index.root) or quantization_settings(index.model_directory)
        block = settings.get("weight_block_size")
        is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        self._configured_block = tuple(block) if is_pair and block is not None else None
        self._expert = functools.lru_cache(maxsize=_NUM_EXPERTS_KEPT)(self._decode_expert)

    def scaled(self, name: str, scale_name: str) -> TensorEntry:
        """Return the entry of a weight [..., rows, columns] in fp8 or fp4, of which each block has a scale."""
        weight, scale = self._entry(name), self._entry(scale_name)
        if weight.dtype not in FLOAT8 | {_FP4} or len(weight.shape) < 2 or scale.dtype not in _SCALE_DTYPES:
            raise self._misfit(weight, scale)
        grid = scale.shape if math.prod(scale.shape) != 1 else (1,) * len(weight.shape)
        if len(grid) != len(weight.shape) or grid[:-2] != weight.shape[:-2] or 0 in grid:
            raise self._misfit(weight, scale)
        if weight.dtype != _FP4:
            codec = _Scaled(self._index, weight, scale, grid, self._block(weight, scale, grid), self._dtype)
            return weight._replace(dtype=self._dtype).with_codec(codec)
        shape = (*weight.shape[:-1], 2 * weight.shape[-1])
        if (grid[-2] * _FP4_BLOCK[0], grid[-1] * _FP4_BLOCK[1]) != shape[-2:]:
            raise self._misfit(weight, scale, f" with two numbers of fp4 a byte in blocks of {list(_FP4_BLOCK)}")
        codec = _Scaled(self._index, weight, scale, grid, _FP4_BLOCK, self._dtype)
        return weight._replace(dtype=self._dtype, shape=shape).with_codec(codec)

    def mxfp4(self, name: str) -> TensorEntry:
        """Return the entry of MXFP4 experts: [experts, columns, groups, 16] -> [experts, groups * 32, columns]."""
        blocks, scales = self._entry(name + _BLOCKS), self._entry(name + _SCALES)
        is_packed = {blocks.dtype, scales.dtype} == {"U8"} and len(blocks.shape) == 4
        if not is_packed or blocks.shape[3] != _MXFP4_BLOCK[0] or blocks.shape[:3] != scales.shape:
            raise self._misfit(blocks, scales)
        experts, columns, groups, _ = blocks.shape
        shape = (experts, groups * _MXFP4_BLOCK[1], columns)
        codec = _Experts(blocks.num_bytes, shape[1] * shape[2], functools.partial(self._expert, name))
        return TensorEntry(name, self._dtype, shape, blocks.pieces).with_codec(codec)

    def _block(self, weight: TensorEntry, scale: TensorEntry, grid: tuple[int, ...]) -> tuple[int, int]:
        """Return rows and columns of a block; the last of a row or column may be smaller.

        They come from config.json, as rows and scales do not determine them: 192 rows with 2 scales are blocks of 128
        and 64. If all rows share a scale, or each has its own, they do.
        """
        sizes = (weight.shape[-2], weight.shape[-1])
        block = self._configured_block
        if block is not None and all(-(-n // b) == g for n, b, g in zip(sizes, block, grid[-2:], strict=True)):
            return block[0], block[1]
        if all(number in (1, size) for size, number in zip(sizes, grid[-2:], strict=True)):
            return sizes[0] // grid[-2], sizes[1] // grid[-1]
        if block is not None:
            raise self._misfit(weight, scale, f" in blocks of {list(block)} (weight_block_size in config.json)")
        raise CheckpointError(
            f"{self._index.model_directory / CONFIG} has no quantization_config with weight_block_size, a pair of "
            f"numbers, so which elements of {weight.name} {list(weight.shape)} share a scale of {scale.name} "
            f"{list(scale.shape)} is not known; give the config.json that was published with the weights (DeepSeek's "
            f"has [128, 128])."
        )

    def _decode_expert(self, name: str, expert: int) -> torch.Tensor:
        """Decode one expert, [groups * 32, columns], to the final dtype."""
        import torch

        blocks, scales = self._index.read(name + _BLOCKS, expert), self._index.read(name + _SCALES, expert)
        values = torch.ldexp(_unpack_fp4(blocks), scales.int()[..., None] - 127)  # [columns, groups, 32]
        return _cast(name, values, self._dtype).view(len(blocks), -1).T.contiguous()

    def _entry(self, name: str) -> TensorEntry:
        found = self._index.tensors.get(name)
        if found is None:
            raise CheckpointError(f"{self._index.path} lacks {name}, a part of a quantized weight.")
        return found

    def _misfit(self, weight: TensorEntry, scale: TensorEntry, blocks: str = "") -> CheckpointError:
        return CheckpointError(
            f"{self._index.path}: {scale.name} of {scale.dtype} {list(scale.shape)} cannot be the scales of "
            f"{weight.name} of {weight.dtype} {list(weight.shape)}{blocks}, so it is not dequantized; the file is "
            f"damaged, or of a form that is not known."
        )


def _unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers [..., 2 * n] in bytes [..., n]."""
    import torch

    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    return torch.tensor(_FP4_VALUES, dtype=torch.float32)[nibbles.int()].flatten(-2)


def _cast(name: str, values: torch.Tensor, dtype: str) -> torch.Tensor:
    cast = values.to(to_torch(dtype))
    if dtype == "F16" and (values.isfinite() & ~cast.isfinite()).any():
        raise CheckpointError(
            f"Dequantized, {name} holds values that are too large for float16 and would become infinite; choose "
            f"another dtype, such as bfloat16."
        )
    return cast


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Decodes ranges of a weight; `grid` is the shape of its scales, `block` the elements that share one."""

    index: TensorIndex
    weight: TensorEntry
    scale: TensorEntry
    grid: Sequence[int]
    block: tuple[int, int]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        import torch

        *_, num_rows, num_stored = self.weight.shape
        num_columns = self.block[1] * self.grid[-1] if self.weight.dtype == _FP4 else num_stored
        stop = start + len(out) // itemsize(self.dtype)
        first, last = start // num_columns, -(-stop // num_columns)
        rows = torch.arange(first, last)
        of_scales = rows // num_rows * self.grid[-2] + rows % num_rows // self.block[0]  # row in the flat grid
        low, high = int(of_scales[0]), int(of_scales[-1]) + 1
        scales = self._read(self.scale, low * self.grid[-1], high * self.grid[-1]).view(-1, self.grid[-1])
        scales = torch.exp2(scales.float() - 127.0) if self.scale.dtype == "U8" else scales.float()
        scales = scales.repeat_interleave(self.block[1], dim=1)[:, :num_columns]
        stored = self._read(self.weight, first * num_stored, last * num_stored).view(-1, num_stored)
        values = _unpack_fp4(stored.view(torch.uint8)) if self.weight.dtype == _FP4 else stored.float()
        values *= scales[of_scales - low]
        values = values.view(-1)[start - first * num_columns : stop - first * num_columns]
        torch.frombuffer(out, dtype=to_torch(self.dtype)).copy_(_cast(self.weight.name, values, self.dtype))

    def _read(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        """Return the flat elements [start, stop) of a stored tensor."""
        import torch

        data = bytearray((stop - start) * itemsize(entry.dtype))
        self.index.read_into(entry.name, start, data)
        return torch.frombuffer(data, dtype=to_torch(entry.dtype))


@dataclass(frozen=True, slots=True)
class _Experts:
    """Decodes ranges of a stack of experts; each expert is decoded as a whole."""

    num_bytes: int
    num_elements: int
    expert: Callable[[int], torch.Tensor] = field(repr=False)

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        import torch

        number, inside = divmod(start, self.num_elements)
        while out:
            values = self.expert(number).view(-1)[inside:]
            part, out = out[: values.nbytes], out[values.nbytes :]
            torch.frombuffer(part, dtype=values.dtype).copy_(values[: len(part) // values.itemsize])
            number, inside = number + 1, 0
