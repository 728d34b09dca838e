"""Several unmerged adapters over one model, so that each batch of prompts can use its own.

The model's layers stay in place, with the hooks that stream their weights; peft's layers wrap them. The adapters'
matrices are in memory, on the device where their layer computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import Location
from fsdp_shard.errors import CheckpointError, ConfigError

_NAMES = "adapter_names"  # an attribute of the model
# Entries of adapter_config.json that define the adapted modules and scales. `check_unmerged` rejects other entries.
_DEFINING = (
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
)


def adapters_bytes(adapters: Mapping[str, Location]) -> int:
    """Return the float32 size of these adapters' matrices."""
    return sum(4 * prod(shape) for location in adapters.values() for shape in location.index.shapes.values())


def add_adapters(model: PreTrainedModel, adapters: Mapping[str, Location], base: Location) -> None:
    """Load adapters over a dispatched model; the first is active.

    `model.set_adapter(NAME)`, `disable_adapters()` and `enable_adapters()` are transformers' own.

    Args:
        model: The model.
        adapters: Name -> adapter.
        base: The location of the model.

    Raises:
        CheckpointError: An adapter is not for this model, or cannot stay unmerged.
        ConfigError: The name of an adapter cannot be used.
    """
    for name, location in adapters.items():
        if hasattr(nn.ModuleDict(), name):  # in which peft keeps each adapter's matrices, by its name
            raise ConfigError(f"adapters has the name {name!r}, which torch's modules use themselves; choose another.")
        settings, parts = checkpoint.check_unmerged(location.index, base.index, base.expected_config_directory)
        settings.try_patterns([fqn for fqn, _ in model.named_modules()])
        _inject(model, name, location)
        layers = _layers_of(model, name)
        _check_modules(model, location, parts.factors, layers)
        for module, layer in layers.items():
            _fill(model, layer, name, location, parts.factors[module])
    model.__dict__[_NAMES] = tuple(adapters)
    use_adapter(model, next(iter(adapters)))


def inject_adapters(model: PreTrainedModel, adapters: Mapping[str, Location]) -> None:
    """Add adapter matrices without values to a model on meta; the largest adapter is active.

    Raises:
        CheckpointError: The model has no modules for an adapter.
    """
    for name, location in adapters.items():
        with torch.device("meta"):
            _inject(model, name, location)
    for name, param in model.named_parameters():
        if ".lora_" in name:
            param.data = param.data.float()  # as in `_fill`
    model.__dict__[_NAMES] = tuple(adapters)
    use_adapter(model, max(adapters, key=lambda name: adapters_bytes({name: adapters[name]})))


def use_adapter(model: PreTrainedModel, name: str | None) -> None:
    """Make a model compute with one of its adapters, or without any for None; no effect on a model without adapters.

    Args:
        model: The model.
        name: Name of an adapter.
    """
    if not vars(model).get(_NAMES):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(name, inference_mode=True)


def _inject(model: PreTrainedModel, name: str, location: Location) -> None:
    import peft

    document = checkpoint.read_adapter_config(location.index.root)
    config = peft.LoraConfig(**{key: document[key] for key in _DEFINING if key in document}, inference_mode=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft corrects it itself
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        try:
            with torch.random.fork_rng(devices=[]):  # peft draws first values, which `_fill` replaces
                model.add_adapter(config, name)
        except ValueError as error:
            raise CheckpointError(f"{location.index.root} does not fit {type(model).__name__}: {error}") from error


def _layers_of(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """FQN -> peft layer, for the layers that an adapter adapts."""
    from peft.tuners.lora import LoraLayer

    modules = model.named_modules()
    return {fqn: layer for fqn, layer in modules if isinstance(layer, LoraLayer) and name in layer.scaling}


def _check_modules(
    model: PreTrainedModel, location: Location, stored: Mapping[str, object], adapted: Mapping[str, object]
) -> None:
    """Raise CheckpointError unless the modules with stored matrices are those that adapter_config.json adapts."""
    path = location.index.root
    if missing := sorted(adapted.keys() - stored.keys()):
        raise CheckpointError(
            f"{path}: its adapter_config.json adapts {missing[0]} of {type(model).__name__}, and the adapter has no "
            f"matrices for it; it is an adapter of another model, or was not saved whole."
        )
    if unused := sorted(stored.keys() - adapted.keys()):
        raise CheckpointError(
            f"{path} has matrices for {unused[0]}, which its adapter_config.json does not adapt in "
            f"{type(model).__name__}; it is an adapter of another model, or names modules as another version of "
            f"transformers does. Read alone, as checkpoint={path}, it is merged into its base."
        )


def _fill(model: PreTrainedModel, layer: Any, name: str, location: Location, names: Mapping[str, str]) -> None:
    """Replace the matrices that peft drew for a layer with the adapter's; `names` are their names in its file."""
    weight = layer.get_base_layer().weight
    device = model.device if weight.is_meta else weight.device
    for factor in "AB":
        values = location.index.read(names[factor])
        values = values.to(device, torch.promote_types(values.dtype, torch.float32))  # as in peft
        linear, embedding = (getattr(layer, f"lora_{kind}{factor}") for kind in ("", "embedding_"))
        old = linear[name].weight if name in linear else embedding[name]
        if old.shape != values.shape:
            raise CheckpointError(
                f"{location.index.root}: {names[factor]} has shape {list(values.shape)}, and the model needs "
                f"{list(old.shape)}."
            )
        new = nn.Parameter(values, requires_grad=False)
        if name in linear:
            linear[name].weight = new
        else:
            embedding[name] = new
