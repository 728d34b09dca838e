"""Keeps `model.device` of an offloaded model right: the device that computes, even if its first parameter is on meta.

transformers creates tensors there (the first tokens of a decoder), and has a property for it that looks at the first
parameter. Only a subclass can override a property, so here, and nowhere else, a model's class is replaced. An empty
parameter on the right device, before all others, would also work, but show up in `named_parameters()` and
`state_dict()`.
"""

import torch
from transformers import PreTrainedModel


def set_device(model: torch.nn.Module, device: torch.device) -> None:
    """Make `.device` return `device` in `model` and the transformers models in it whose first parameter is on meta."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.device.type == "meta":
            cls = type(module)
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            module.__class__ = type(cls.__name__, (cls,), {**names, "device": property(lambda _: device)})
