"""Finds what an optimizer itself changes in the options of its parameter groups, such as a count of its steps.

Settings of an optimizer are there, too: what a loop changes between steps is none of its state.
"""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch.optim import Optimizer

Options = Sequence[Mapping[str, Any]]


class GroupWatch:
    """Watches the steps of an optimizer.

    Args:
        optimizer: The optimizer.

    Attributes:
        changed: An option that a step has changed, as NAME=VALUE, or None.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.changed: str | None = None
        self._before: list[Options] = []  # several while a step calls that of its base class, which runs hooks, too
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        self._before.append([] if self.changed else group_options(optimizer))

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        self.changed = changed_option(self._before.pop(), optimizer) or self.changed


def group_options(optimizer: Optimizer) -> Options:
    """A copy of the options of each parameter group, without the learning rate, which a schedule sets."""
    return [
        {name: _copied(value) for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def changed_option(before: Options, optimizer: Optimizer) -> str | None:
    """The first option that is not as in a result of `group_options`, as NAME=VALUE, or None."""
    for old, new in zip(before, optimizer.param_groups, strict=False):
        for name, value in new.items():
            if name not in ("params", "lr") and not (name in old and _is_same(old[name], value)):
                return f"{name}={value!r}"
    return None


def _copied(value: Any) -> Any:
    """A copy of plain data and tensors; any other object itself, such as a process group or a generator."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


def _is_same(old: Any, new: Any) -> bool:
    """Whether `new` is still what `_copied` has made `old` of."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return torch.equal(old, new)
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_is_same(value, new[name]) for name, value in old.items())
    if isinstance(old, list) and isinstance(new, list | tuple):
        return len(old) == len(new) and all(map(_is_same, old, new))
    is_plain = isinstance(old, str | bytes | Number) and isinstance(new, str | bytes | Number)
    return old is new or (is_plain and (old == new or (old != old and new != new)))  # NaN is not equal to itself
