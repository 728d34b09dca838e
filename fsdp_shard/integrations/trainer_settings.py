"""Applies changed `TrainingArguments` for optimizer and schedule to a run whose step was saved with other settings.

The Trainer's own resume restores both as saved, and silently ignores changes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from fsdp_shard.errors import CheckpointError
from fsdp_shard.integrations.resumption import report_change
from fsdp_shard.training import Restored

_RATE = "learning_rate"
# Values that the schedule changes, that are not settings, or that define how an update is computed (device-dependent).
_OTHERS = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
_CLOSE = 1e-6

Groups = list[dict[str, Any]]


def settings_of(optimizer: Any) -> Groups:
    """The settings of each parameter group, with the base learning rate that the schedule multiplies."""
    return [
        {name: value for name, value in group.items() if name not in _OTHERS and _is_plain(value)}
        | {_RATE: _number(group.get("initial_lr", group["lr"]))}
        for group in optimizer.param_groups
    ]


def follow_arguments(optimizer: Any, scheduler: Any, made: Groups | None, now: Groups, restored: Restored) -> None:
    """Continue with the current settings where they differ from those at the time of the save, and report them.

    Args:
        optimizer: The optimizer, with the step's settings.
        scheduler: The schedule, with its state in the step.
        made: The result of `settings_of` before the run's first step; None for steps that do not record it.
        now: The result of `settings_of` before the step was restored.
        restored: The step.

    Raises:
        CheckpointError: Another learning rate is set, but the schedule continues with its own.
    """
    changes: list[str] = []
    for group, before, wanted in zip(optimizer.param_groups, made or now, now, strict=True):
        for name in sorted(before.keys() & wanted.keys()):
            old, new = before[name], wanted[name]
            if old == new:
                continue
            if name != _RATE:
                group[name] = new
            elif type(scheduler) is LambdaLR:
                group["initial_lr"] = new
            else:
                raise CheckpointError(
                    f"{restored.directory} was saved with learning_rate={old}, and now it is {new}, which would have "
                    f"no effect: {type(scheduler).__name__} continues with its own. Use the same, or begin a new run "
                    f"with its weights."
                )
            changes.append(f"{name} {old} -> {new}")
    if type(scheduler) is LambdaLR:
        changes += _follow_schedule(optimizer, scheduler)
    if changes:
        report_change(restored, list(dict.fromkeys(changes)))


def _follow_schedule(optimizer: Any, scheduler: LambdaLR) -> list[str]:
    """Set the learning rate of the next step from the current schedule, and return the resulting changes.

    The saved rate came from the schedule at the time of the save, which may have ended and left 0.
    """
    expected = [_number(group["lr"]) for group in optimizer.param_groups]
    base = [_number(group["initial_lr"]) for group in optimizer.param_groups]
    rates = [rate * scale(scheduler.last_epoch) for rate, scale in zip(base, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict({**scheduler.state_dict(), "base_lrs": base, "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):  # a captured graph refers to its memory
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    is_same = all(math.isclose(one, other, rel_tol=_CLOSE) for one, other in zip(expected, rates, strict=True))
    return [] if is_same else [f"learning rate of the next step {expected[0]:.6g} -> {rates[0]:.6g}"]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _number(value: Any) -> Any:
    """A learning rate, which may be a tensor, or None in some optimizers."""
    return value.item() if isinstance(value, torch.Tensor) else value
