"""Runs the base model of a model with an adapter, without a copy, as the reference of preference objectives."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """Let a model compute what its base model computes, bit for bit, within the block.

    Layers skip their LoRA, and the base model's modules replace those in `modules_to_save`. Use it for forward passes
    under `torch.no_grad`; the base model's dropout is unchanged. All ranks must enter it together, and never between a
    forward pass and its backward pass, which may recompute the forward pass.

    peft marks the parameters of disabled adapters as frozen. Wrappers may record this in a forward pass and rely on it,
    so `requires_grad` is restored at once, before any forward pass.

    Args:
        module: The model, sharded or not; without an adapter, this has no effect.

    Example:
        >>> with torch.no_grad(), adapters_disabled(model.module):  # doctest: +SKIP
        ...     reference = model.module(**inputs, use_cache=False).logits
    """
    _enable_adapters(module, enabled=False)
    try:
        yield
    finally:
        _enable_adapters(module, enabled=True)


def _enable_adapters(module: nn.Module, *, enabled: bool) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    marks = [(param, param.requires_grad) for param in module.parameters()]
    for part in module.modules():
        if isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper):
            part.enable_adapters(enabled)
    for param, mark in marks:
        if param.requires_grad != mark:
            param.requires_grad_(mark)
