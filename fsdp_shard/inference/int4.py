"""`quantize=int4`: weights in 4 bits, with a scale and a zero point per group.

On a GPU, weights use the layout of torch's own kernel, because torchao's default format needs a separate package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.inference.quantization import Layers, Quantization, Quantizer, torchao_encoder

if TYPE_CHECKING:
    import torch
    from torch import nn

_GROUP_SIZE = 32
_ROWS = 16  # on the CPU, torch's kernel takes multiples; a gate with one row stays unchanged on a GPU, too
_TILE = (8, 1024)  # rows and columns on a GPU are filled up to multiples of these


class Int4(Quantization):
    """torchao's weight-only int4; `_GROUP_SIZE` weights of a row share a scale and a zero point."""

    bits = 4

    def takes(self, layer: nn.Linear) -> bool:
        return layer.in_features % _GROUP_SIZE == 0 and layer.out_features % _ROWS == 0

    def num_bytes(self, layer: nn.Linear, *, on_gpu: bool) -> int:
        rows, width = layer.weight.shape
        if on_gpu:
            rows, width = (-(-size // multiple) * multiple for size, multiple in zip((rows, width), _TILE, strict=True))
        # On the CPU, scales and zero points have the dtype of the weights; torch's kernel for GPUs takes bfloat16.
        return rows * (width // 2 + width // _GROUP_SIZE * 2 * (2 if on_gpu else layer.weight.element_size()))

    def quantizer(self, model: nn.Module, layers: Layers, execution_device: int | str) -> Quantizer:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int4WeightOnlyConfig

        common: Any = {"group_size": _GROUP_SIZE, "set_inductor_config": False}
        if isinstance(execution_device, int):
            check_gpu(next((layer.weight.dtype for its in layers.values() for layer in its), None), execution_device)
            config: Any = Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d", **common)
        else:
            config = PrototypeInt4WeightOnlyConfig(**common)
        return Quantizer(layers, torchao_encoder(config))


def check_gpu(dtype: torch.dtype | None, gpu: int) -> None:
    """Raise ConfigError if torch's int4 kernel does not support this GPU or weights of this dtype."""
    import torch

    capability = torch.cuda.get_device_capability(gpu)
    if capability[0] < 8:
        raise ConfigError(
            f"dispatch.quantize=int4 needs a GPU of compute capability 8.0 (A100) or later; GPU {gpu} has "
            f"{capability[0]}.{capability[1]}. Set dispatch.quantize=int8."
        )
    if dtype not in (None, torch.bfloat16):
        raise ConfigError(
            f"dispatch.quantize=int4 needs weights in bfloat16 on a GPU; these are in {dtype}. Set "
            f"dispatch.dtype=bfloat16."
        )
