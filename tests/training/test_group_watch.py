"""What an optimizer changes in its parameter groups is found, and nothing else is taken for a change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_shard.training.optim.group_watch import GroupWatch

SETTINGS: dict[str, Callable[[], Any]] = {
    "number": lambda: 3.0,
    "nan": lambda: float("nan"),
    "numbers": lambda: (0.9, [1, {"a": 2}]),
    "tensors": lambda: [torch.ones(3), torch.zeros(2)],
    "array": lambda: np.ones(3),
    "generator": torch.Generator,
    "lock": threading.Lock,
}


class _Optimizer(torch.optim.SGD):
    def __init__(self, value: Any, change: Callable[[dict[str, Any]], None]) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        self.param_groups[0]["own"] = value
        self._change = change

    def step(self, closure: Any = None) -> Any:
        self._change(self.param_groups[0])
        return super().step(closure)


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_are_not_changes(kind: str) -> None:
    optimizer = _Optimizer(SETTINGS[kind](), lambda group: group.update(lr=0.2))
    watch = GroupWatch(optimizer)
    for _ in range(2):
        optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.3  # by the loop
    assert watch.changed is None


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (0, lambda group: group.update(own=group["own"] + 1)),
        ([1, 2], lambda group: group["own"].append(3)),
        ({"a": [1]}, lambda group: group["own"]["a"].append(3)),
        (torch.zeros(2), lambda group: group["own"].add_(1)),
        (None, lambda group: group.update(own=1)),
    ],
)
def test_changes_are_found(value: Any, change: Callable[[dict[str, Any]], None]) -> None:
    optimizer = _Optimizer(value, change)
    watch = GroupWatch(optimizer)
    optimizer.step()
    assert str(watch.changed).startswith("own=")
