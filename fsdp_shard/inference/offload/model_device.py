"""`model.device` of an offloaded model: the device that computes, also while its first parameter is on meta.

transformers creates tensors there (the first tokens of a decoder), and has a property for it that looks at the first
parameter. A property can be overridden by a subclass only, so here, and nowhere else, a model's class is replaced. An
empty parameter on the right device, before all others, would do too, but `named_parameters()` and `state_dict()` would
show it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


def set_device(model: nn.Module, device: torch.device) -> None:
    """Let `.device` be `device` in `model` and the transformers models in it whose first parameter is on meta."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.device.type == "meta":
            cls = type(module)
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            module.__class__ = type(cls.__name__, (cls,), {**names, "device": property(lambda _: device)})
