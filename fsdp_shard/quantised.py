"""A frozen linear layer whose weight is held as rows of bytes (see `codes`), and decoded when it is multiplied with.

The backward pass decodes it again: no decoded weight outlives the product that it was made for. The rows are one
parameter, which a wrapper shards like any other. It must only move it, so it is held as a type that the wrapper does
not cast. Knows no wrapper, no file and no adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_shard.codes import Code


class QuantisedWeight(nn.Module):
    """x -> x @ W.T, with W of `shape` [out, in] in `rows` on the meta device, held as elements of `held_as`.

    A module of its own, so that the rows can be gathered apart from what is cast.
    """

    def __init__(self, shape: tuple[int, int], code: Code, held_as: torch.dtype) -> None:
        super().__init__()
        self.shape, self.code = shape, code
        width, rest = divmod(code.row_bytes, held_as.itemsize)
        assert not rest, "a row is a whole number of elements"
        rows = torch.empty(code.num_rows(self.num_weights), width, dtype=held_as, device="meta")
        self.rows = nn.Parameter(rows, requires_grad=False)

    @property
    def num_weights(self) -> int:
        return self.shape[0] * self.shape[1]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(inputs, self.rows, self.code, self.shape)  # type: ignore[no-untyped-call]
        return product

    def extra_repr(self) -> str:
        return f"{self.code.name}, shape={list(self.shape)}"


class QuantisedLinear(nn.Module):
    """What takes the place of the frozen `linear`, whose bias it keeps."""

    def __init__(self, linear: nn.Linear, code: Code, held_as: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self._dtype = linear.in_features, linear.out_features, dtype
        self.quantised = QuantisedWeight((linear.out_features, linear.in_features), code, held_as)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """For models that look at the type and shape of a layer's weight (T5): one without values, on meta."""
        return torch.empty(self.out_features, self.in_features, dtype=self._dtype, device="meta")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.quantised(inputs)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """inputs [..., in] @ W.T, in the type of the inputs. Only the rows are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, rows: torch.Tensor, code: Code, shape: tuple[int, int]) -> torch.Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(rows)
        ctx.code, ctx.shape = code, shape
        return F.linear(inputs, _decode(rows, code, shape, inputs.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (rows,) = ctx.saved_tensors
        return slope @ _decode(rows, ctx.code, ctx.shape, slope.dtype), None, None, None


def quantised_weights(model: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """Those in `model`, by FQN."""
    for fqn, module in model.named_modules():
        if isinstance(module, QuantisedWeight):
            yield fqn, module


def num_weights(model: nn.Module) -> dict[str, int]:
    """Of each parameter of `model`, by FQN, how many weights it stands for: its elements, unless they are bytes."""
    found = {name: param.numel() for name, param in model.named_parameters()}
    return found | {f"{fqn}.rows": module.num_weights for fqn, module in quantised_weights(model)}


def scratch_bytes(model: nn.Module, itemsize: int) -> int:
    """Memory for the largest decoded weight of `model`, in a type of `itemsize` bytes."""
    weights = (module for _, module in quantised_weights(model))
    return max((module.code.scratch_bytes(module.num_weights, itemsize) for module in weights), default=0)


def _decode(rows: torch.Tensor, code: Code, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return code.decode(rows.view(torch.uint8), shape[0] * shape[1], dtype).view(shape)
