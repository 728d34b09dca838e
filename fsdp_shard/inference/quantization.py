"""Weights of linear layers in few bits: the interface of a quantization, and the layers that it applies to.

Layers of the repeated blocks are quantized as soon as they are loaded. An output head that is not the embedding is
quantized too, by quantizations precise enough for it. Importing this module and the quantizations imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fsdp_shard.errors import ModelError
from fsdp_shard.utils import format_count, require_package

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from fsdp_shard.models import Block

Layers: TypeAlias = "Mapping[str, Sequence[nn.Linear]]"  # by the FQN of their block

# Of Mamba, FalconMamba and Jamba, which multiply by the weight themselves, without the layer.
_NOT_CALLED = "dt_proj"


@dataclass(frozen=True)
class Quantizer:
    """The layers to quantize, by the FQN of their block; `encode` quantizes a layer with loaded weights."""

    layers: Layers
    encode: Callable[[nn.Linear], None]


class Quantization(ABC):
    """A way to hold the weights of linear layers in few bits."""

    bits: ClassVar[int]
    """Bits per weight, without scales."""

    takes_head: ClassVar[bool] = False
    """Whether the output head is quantized too, if it is not the embedding."""

    def check_installed(self, setting: str) -> None:
        """Raise ConfigError if a required package is not installed; `setting` is `name=value` as given."""
        require_package("torchao", "quantize", setting, f"set {setting.partition('=')[0]}=none")

    def takes(self, layer: nn.Linear) -> bool:
        """Whether the layer's shape can be quantized; other layers stay unchanged."""
        return True

    @abstractmethod
    def num_bytes(self, layer: nn.Linear, *, on_gpu: bool) -> int:
        """Bytes of the layer's quantized weight including scales, on a GPU or on the CPU."""

    @abstractmethod
    def quantizer(self, model: nn.Module, layers: Layers, execution_device: int | str) -> Quantizer:
        """Prepare to quantize `layers` of `model`, which compute on `execution_device`: a GPU number, or cpu."""


def quantized_layers(
    model: PreTrainedModel, blocks: Sequence[Block], quantization: Quantization
) -> dict[str, list[nn.Linear]]:
    """The linear layers to quantize, by the FQN of their block; ModelError if there are none."""
    from torch import nn

    head = model.get_output_embeddings() if quantization.takes_head else None
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    found: dict[str, list[nn.Linear]] = {}
    for block in blocks:
        module = model.get_submodule(block.fqn)
        layers = [
            layer
            for name, layer in ([("", module)] if block.direct else module.named_modules())
            if type(layer) is nn.Linear
            and (block.repeated or layer is head)
            and uses[id(layer.weight)] == 1
            and name.rpartition(".")[2] != _NOT_CALLED
        ]
        found[block.fqn] = [layer for layer in layers if quantization.takes(layer)]
    if not any(found.values()):
        raise ModelError(
            f"dispatch.quantize is for models with linear layers (torch.nn.Linear) in their repeated blocks, and this "
            f"{type(model).__name__} has none of a shape that it takes; remove it."
        )
    return found


def describe(model: PreTrainedModel, layers: Layers) -> str:
    """Describe how many layers are quantized, and their share of the model."""
    weights = [layer.weight for its in layers.values() for layer in its]
    part = sum(weight.numel() for weight in weights) / sum(param.numel() for param in model.parameters())
    return f"{format_count(len(weights), 'linear layer')} with {part:.0%} of the parameters"


def quantized_blocks(
    model: PreTrainedModel, blocks: Sequence[Block], quantization: Quantization, *, on_gpu: bool
) -> list[Block]:
    """Return `blocks` with their sizes after quantization, on a GPU or on the CPU."""
    layers = quantized_layers(model, blocks, quantization)
    saved = {
        fqn: sum(one.weight.nbytes - quantization.num_bytes(one, on_gpu=on_gpu) for one in its)
        for fqn, its in layers.items()
    }
    return [replace(block, num_bytes=block.num_bytes - saved[block.fqn]) for block in blocks]


def torchao_encoder(config: Any) -> Callable[[nn.Linear], None]:
    """Return a function that quantizes a layer in place by torchao's `config`."""
    from torchao.quantization import quantize_

    return lambda layer: quantize_(layer, config, filter_fn=lambda module, fqn: True)
