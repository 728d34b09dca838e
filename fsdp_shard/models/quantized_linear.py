"""Linear layers with weights in 8 or 4 bits: 64 neighboring weights become a row of bytes, codes and a float32 scale.

A row contains everything to decode its 64 weights, so rows can be sharded, moved and filled in any order, and their
content depends only on the weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

QUANTIZATION_BLOCK = 64  # weights that share a scale, as in QLoRA

_SCALE_BYTES = 4
_DECODED_AT_ONCE = 1 << 22  # weights; each takes up to 8 bytes of temporary memory

# The 4-bit NormalFloat of Dettmers et al., QLoRA (2023): equally probable quantiles of a normal distribution, and 0.
_NORMAL = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizationCode:
    """Conversion between 64 weights and `code_bytes` bytes.

    Attributes:
        name: The name of the code in settings.
        code_bytes: Bytes of the codes of a block of 64 weights.
        to_codes: Encodes float32 blocks [n, 64] that were divided by their largest absolute weight.
        to_values: Decodes to float32 blocks [n, 64], to be multiplied by that weight.
        to_weights: Like `decode` with a single kernel; returns None if the device has no such kernel.
    """

    name: str
    code_bytes: int
    to_codes: Callable[[torch.Tensor], torch.Tensor]
    to_values: Callable[[torch.Tensor], torch.Tensor]
    to_weights: Callable[[torch.Tensor, int, torch.dtype], torch.Tensor | None] = lambda rows, num_weights, dtype: None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: the codes and the scale."""
        return self.code_bytes + _SCALE_BYTES

    @property
    def bits(self) -> float:
        """Bits per weight, including the scale."""
        return 8 * self.row_bytes / QUANTIZATION_BLOCK

    def num_rows(self, num_weights: int) -> int:
        """Return the number of rows for a matrix with `num_weights` weights; the last row may be incomplete."""
        return -(-num_weights // QUANTIZATION_BLOCK)

    def encode(self, weights: torch.Tensor) -> torch.Tensor:
        """Encode flat finite float32 `weights` to rows [num_rows, row_bytes], uint8; the last is padded with 0."""
        blocks = F.pad(weights, (0, -len(weights) % QUANTIZATION_BLOCK)).view(-1, QUANTIZATION_BLOCK)
        largest = blocks.abs().amax(1, keepdim=True)
        codes = self.to_codes(blocks / torch.where(largest > 0, largest, 1.0))
        return torch.cat([codes.view(torch.uint8), largest.view(torch.uint8)], dim=1)

    def decode(self, rows: torch.Tensor, num_weights: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode the first `num_weights` weights of `rows`, flat: computed in float32, rounded to `dtype`."""
        if (decoded := self.to_weights(rows, num_weights, dtype)) is not None:
            return decoded
        weights = torch.empty((len(rows), QUANTIZATION_BLOCK), dtype=dtype, device=rows.device)
        step = _DECODED_AT_ONCE // QUANTIZATION_BLOCK
        # Meta and fake tensors, which plans use, have no values to decode; one step then stands for all.
        has_values = torch.compiler.is_compiling() or rows.untyped_storage().device.type != "meta"
        for start in range(0, len(rows) if has_values else min(1, len(rows)), step):
            part = rows[start : start + step]
            largest = part[:, self.code_bytes :].contiguous().view(torch.float32)
            weights[start : start + step] = self.to_values(part[:, : self.code_bytes].contiguous()) * largest
        return weights.view(-1)[:num_weights]


def _to_int8(blocks: torch.Tensor) -> torch.Tensor:
    return (blocks * 127).round().to(torch.int8)


def _from_int8(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8).float() / 127


def _to_nf4(blocks: torch.Tensor) -> torch.Tensor:
    """Return the indices of the nearest levels, two in a byte, the first in the upper half."""
    levels = _levels(blocks.device)
    codes = torch.bucketize(blocks, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    return (codes[:, 0::2] << 4) | codes[:, 1::2]


def _from_nf4(codes: torch.Tensor) -> torch.Tensor:
    levels = _levels(codes.device)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)  # [256, 2], of each byte
    return F.embedding(codes.view(-1).int(), pairs).view(-1, QUANTIZATION_BLOCK)


def _nf4_kernel(rows: torch.Tensor, num_weights: int, dtype: torch.dtype) -> torch.Tensor | None:
    if rows.device.type != "cuda" or find_spec("triton") is None:
        return None
    from fsdp_shard.models import nf4_kernel

    if not nf4_kernel.is_usable(rows.device):
        return None
    return nf4_kernel.decode_nf4(rows, _levels(rows.device), num_weights, dtype)


def _levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(_NORMAL, dtype=torch.float32).to(device, non_blocking=True)


QUANTIZATION_CODES = {
    "int8": QuantizationCode("int8", QUANTIZATION_BLOCK, _to_int8, _from_int8),
    "nf4": QuantizationCode("nf4", QUANTIZATION_BLOCK // 2, _to_nf4, _from_nf4, _nf4_kernel),
}


class QuantizedWeight(nn.Module):
    """x -> x @ W.T, with W in `rows`. A separate module, so the rows are not gathered with cast parameters.

    Args:
        shape: The shape [out, in] of W.
        code: The encoding of the weights.
        held_as: Dtype of the parameter `rows`, which is created on the meta device.
    """

    def __init__(self, shape: tuple[int, int], code: QuantizationCode, held_as: torch.dtype) -> None:
        super().__init__()
        self.shape, self.code, self.num_weights = shape, code, shape[0] * shape[1]
        width, rest = divmod(code.row_bytes, held_as.itemsize)
        assert not rest, "a row is a whole number of elements"
        rows = torch.empty(code.num_rows(self.num_weights), width, dtype=held_as, device="meta")
        self.rows = nn.Parameter(rows, requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(inputs, self.rows, self.code, self.shape)  # type: ignore[no-untyped-call]  # untyped in torch
        return product

    def extra_repr(self) -> str:
        return f"{self.code.name}, shape={list(self.shape)}"


class QuantizedLinear(nn.Module):
    """Replaces a frozen `linear`, keeping its bias; `dtype` is that of the original weights."""

    def __init__(self, linear: nn.Linear, code: QuantizationCode, held_as: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self._dtype = linear.in_features, linear.out_features, dtype
        self.quantized = QuantizedWeight((linear.out_features, linear.in_features), code, held_as)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """A tensor on the meta device, for models that read dtype and shape of a layer's weight (T5)."""
        return torch.empty(self.out_features, self.in_features, dtype=self._dtype, device="meta")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.quantized(inputs)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """Computes inputs [..., in] @ W.T in the dtype of the inputs. Only the rows are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, rows: torch.Tensor, code: QuantizationCode, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.code, ctx.shape = code, shape
        return F.linear(inputs, _decode(rows, code, shape, inputs.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return grad @ _decode(rows, ctx.code, ctx.shape, grad.dtype), None, None, None


def quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield FQN and module of each quantized weight of `model`."""
    for fqn, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            yield fqn, module


def weights_per_parameter(model: nn.Module) -> dict[str, int]:
    """Return, by FQN, the number of weights that each parameter represents: its elements, unless it is quantized."""
    found = {name: param.numel() for name, param in model.named_parameters()}
    return found | {f"{fqn}.rows": module.num_weights for fqn, module in quantized_weights(model)}


def _decode(rows: torch.Tensor, code: QuantizationCode, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return code.decode(rows.view(torch.uint8), shape[0] * shape[1], dtype).view(shape)
