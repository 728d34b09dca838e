"""Values of small tensors in a traced step that do not depend on weights: how many tokens each expert receives.

Tensors without memory have no values, but the sizes of expert parallelism's messages are read from some of them. They
follow from the routing of tokens, which is assumed to be even. Results of known values alone are really computed.
"""

from collections.abc import Callable
from typing import Any

import torch

_MOST_BYTES = 1 << 16
_COUNTING = ("aten::histc", "aten::bincount")
_UNSET, _RANDOM = ("aten::empty", "aten::new_empty"), ("aten::rand", "aten::bernoulli", "aten::multinomial")


def follow(
    func: Any, args: Any, kwargs: Any, made: torch.Tensor, value_of: Callable[[Any], torch.Tensor | None]
) -> torch.Tensor | None:
    """Return the flat values of a new tensor, or None if they are unknown.

    Args:
        func: The operator that created it.
        args: Its arguments, without values.
        kwargs: Its keyword arguments.
        made: The tensor, without values.
        value_of: Returns the values of a tensor, or None.
    """
    name = func.name()
    if made.nbytes > _MOST_BYTES or name.startswith(_RANDOM) or not made.is_contiguous() or made.storage_offset():
        return None
    if name.startswith(_UNSET):  # to be written later
        return torch.zeros(made.numel(), dtype=made.dtype)
    if name in _COUNTING:
        return evenly(args[0].numel(), made)
    known = valued((args, kwargs), value_of)
    if known is None:
        return None
    result = func(*known[0], **known[1])
    return result.contiguous().flatten() if isinstance(result, torch.Tensor) else None


def change(func: Any, args: Any, kwargs: Any, value_of: Callable[[Any], torch.Tensor | None]) -> bool:
    """Change the values of the first argument as an in-place operator does; return whether they are still known."""
    name, target = func.name(), value_of(args[0]) if isinstance(args[0], torch.Tensor) else None
    if name == "c10d::alltoall_base_":  # other ranks are assumed to send what this rank sends
        given = value_of(args[1])
        if target is None or given is None or target.shape != given.shape:
            return False
        target.copy_(given)
    elif name == "aten::scatter_add_" and target is not None and value_of(args[2]) is None:
        target.copy_(evenly(args[3].numel(), target).view(target.shape))
    elif not name.startswith("c10d::") and (known := valued((args, kwargs), value_of)) is not None:
        func(*known[0], **known[1])
    else:
        return False
    return True


def evenly(total: int, like: torch.Tensor) -> torch.Tensor:
    """Split `total` into nearly equal integers, one per element of `like`, flat, in its dtype."""
    number = like.numel()
    counts = [total // number + (index < total % number) for index in range(number)]
    return torch.tensor(counts, dtype=like.dtype)


def valued(arguments: Any, value_of: Callable[[Any], torch.Tensor | None]) -> Any:
    """The same nested values with each tensor replaced by its values; None if any are unknown."""
    if isinstance(arguments, torch.Tensor):
        return value_of(arguments)
    if isinstance(arguments, (tuple, list)):
        found = [valued(item, value_of) for item in arguments]
        return None if _lacks(found, list(arguments)) else type(arguments)(found)
    if isinstance(arguments, dict):
        by_name = {key: valued(item, value_of) for key, item in arguments.items()}
        return None if _lacks(list(by_name.values()), list(arguments.values())) else by_name
    return arguments


def _lacks(found: list[Any], given: list[Any]) -> bool:
    return any(value is None and item is not None for value, item in zip(found, given, strict=True))
