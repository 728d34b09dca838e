"""Replaces the parameters and buffers of a module, keeping tied ones tied."""

from collections.abc import Callable

import torch
from torch import nn


def replace_tensors(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor], *, buffers: bool = True) -> None:
    """Replace every parameter of `module`, and with `buffers` every buffer, with the result of `make`."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if param not in made:
                made[param] = nn.Parameter(make(param), requires_grad=param.requires_grad)
            setattr(owner, name, made[param])
        for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)) if buffers else ():
            setattr(owner, name, make(buffer))
