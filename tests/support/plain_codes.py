"""Quantizing as the papers say it, weight by weight and with nothing of ours, to compare with."""

from __future__ import annotations

from statistics import NormalDist

import torch

BLOCK = 64


def normal_levels() -> list[float]:
    """QLoRA's 4-bit NormalFloat by its definition: quantiles of a normal distribution, scaled to [-1, 1], and 0."""

    def quantiles(count: int) -> list[float]:
        offset = 0.9677083
        step = (0.5 - offset) / count
        return [NormalDist().inv_cdf(offset + number * step) for number in range(count)]

    levels = sorted([*quantiles(8), 0.0, *(-value for value in quantiles(7))])
    return [level / levels[-1] for level in levels]


def quantized(weight: torch.Tensor, kind: str) -> tuple[bytes, torch.Tensor]:
    """The rows of bytes of `weight`, and what they stand for, in its shape."""
    levels = torch.tensor(normal_levels())
    rows, values = b"", []
    flat = weight.detach().float().flatten()
    for block in flat.split(BLOCK):
        largest = block.abs().max()
        full = torch.cat([block, torch.zeros(BLOCK - len(block))])
        scaled = full / largest if largest else full
        if kind == "int8":
            numbers = [round(127 * x) & 255 for x in scaled.tolist()]
            value = torch.tensor([(n - 256 if n > 127 else n) / 127 for n in numbers])
        else:
            nearest = (levels - scaled[:, None]).abs().argmin(1).tolist()
            numbers = [16 * one + two for one, two in zip(nearest[::2], nearest[1::2], strict=True)]
            value = levels[nearest]
        rows += bytes(numbers) + largest.numpy().tobytes()
        values.append(value[: len(block)] * largest)
    return rows, torch.cat(values).view(weight.shape)
