"""Tensors of modules, which are replaced so that tied ones stay tied, and of nested values."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_shard.utils.torch_private import storage_key


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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and mappings; for each operator, this is faster than `tree_leaves`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


@torch.no_grad()
def plain_parts(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The plain tensors in `values`, including the parts of DTensors and of quantized tensors."""
    for value in values:
        if isinstance(value, DTensor):
            yield from plain_parts([value.to_local()])
        elif hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from plain_parts(getattr(value, name) for name in names)
        elif isinstance(value, torch.Tensor):
            yield value


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of `tensors`, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def copy_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor in CPU memory to `device`; to a GPU through pinned memory, so that nothing waits for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
