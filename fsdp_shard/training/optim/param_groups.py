"""Parameter groups for any optimizer: what weight decay makes sense for, by name and logical shape. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def decay_groups(
    parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, tuple[int, ...]], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer: what is decayed and what is not; frozen parameters are in neither."""
    groups: dict[float, list[torch.nn.Parameter]] = {weight_decay: [], 0.0: []}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            groups[weight_decay if is_decayed(name, shapes[name]) else 0.0].append(parameter)
    return [{"params": members, "weight_decay": decay} for decay, members in groups.items() if members]


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay makes sense for a parameter of this name and logical shape: not for norms and biases."""
    *modules, last = name.lower().split(".")
    return len(shape) >= 2 and last != "bias" and not any("norm" in module for module in modules[-1:])
