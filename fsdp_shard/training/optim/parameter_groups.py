"""The parameter groups of an optimizer: those that decay, and those with their own learning rate. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def decay_groups(
    parameters: Mapping[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    weight_decay: float,
    rates: Mapping[str, float] | None,
) -> list[dict[str, Any]]:
    """Divide the trainable parameters into groups with and without weight decay, for any torch optimizer.

    Parameters with a learning rate in `rates` form separate groups, after the others.
    """
    own = rates or {}
    groups: dict[tuple[float | None, float], list[torch.nn.Parameter]] = {
        (rate, decay): [] for rate in (None, *dict.fromkeys(own.values())) for decay in (weight_decay, 0.0)
    }
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            groups[own.get(name), weight_decay if is_decayed(name, shapes[name]) else 0.0].append(parameter)
    return [
        {"params": members, "weight_decay": decay} | ({} if rate is None else {"lr": rate})
        for (rate, decay), members in groups.items()
        if members
    ]


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies to a parameter with this FQN and unsharded shape; norms and biases are exempt."""
    *modules, last = name.lower().split(".")
    return len(shape) >= 2 and not last.endswith("bias") and not any("norm" in module for module in modules[-1:])
