"""The user's functions that a run calls: a loss instead of the cross-entropy, metrics, and sample completions.

Loss and metrics return sums and counts, so that means cover all ranks and micro-batches of a step, however it is
divided.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import ShardedModel
from fsdp_shard.utils import nearest

SumAndCount: TypeAlias = tuple[torch.Tensor, torch.Tensor | float]
LossFunction: TypeAlias = Callable[[Any, Mapping[str, torch.Tensor]], SumAndCount]
MetricsFunction: TypeAlias = Callable[[Any, Mapping[str, torch.Tensor]], Mapping[str, SumAndCount]]
SamplesFunction: TypeAlias = Callable[[ShardedModel], Sequence[tuple[str, str]]]


def import_loss(name: str | None) -> LossFunction | None:
    """Import the function that `loss=module:function` names; modules in the working directory are found last.

    Raises:
        ConfigError: There is no such module or function.
    """
    if name is None:
        return None
    module_name, separator, function_name = name.partition(":")
    if not (separator and module_name and function_name.isidentifier()):
        raise ConfigError(f"loss={name} is not MODULE:FUNCTION, such as loss=my_losses:focal_loss.")
    with _working_directory_is_importable():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".rstrip(".")
            raise ConfigError(
                f"loss={name}: the module {module_name} cannot be imported ({why}); it must be installed, or a file in "
                f"the working directory {Path.cwd()}."
            ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"loss={name}: {module_name} has no function {function_name}{nearest(function_name, known)}.")
    found: LossFunction = function
    return found


@contextmanager
def _working_directory_is_importable() -> Iterator[None]:
    # At the end of the path, so that a directory named like a package, such as `datasets`, does not shadow it.
    directory = str(Path.cwd())
    if directory in sys.path:
        yield
        return
    sys.path.append(directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


@dataclass
class CustomFunctions:
    """The user's functions that a run calls, loss and metrics in every step.

    Attributes:
        loss: Takes the model's output and the batch, a dict of the model's arguments and `labels` (int64; already
            shifted: the next token at each position, and -100 where none is to be predicted). Returns the sum of the
            losses, a scalar in nats, and a count; the sums of a step are divided by the total of its counts. With
            `shard.context_parallel`, output and batch cover only a rank's own tokens.
        metrics: Takes the same arguments. Returns a sum and a count by name; the names must always be the same.
        samples: Takes the model in eval mode, on every rank, whenever a run evaluates. Returns a list of prompts and
            completions; that of rank 0 counts.
        names: The names of the metrics, sorted, once they are known.
    """

    loss: LossFunction | None = None
    metrics: MetricsFunction | None = None
    samples: SamplesFunction | None = None
    names: list[str] | None = field(default=None, init=False)

    def check(self) -> None:
        """Raise ConfigError if one of them cannot be called."""
        for kind in ("loss", "metrics", "samples"):
            function = getattr(self, kind)
            if function is not None and not callable(function):
                raise ConfigError(f"run.functions.{kind} is {function!r}, expected a function; set one, or None.")

    def agree_on_names(self, names: list[str], context: StepRanks) -> list[str]:
        """Return the names of the metrics, in the same order on all ranks. The first call is a collective.

        Raises:
            ConfigError: The names differ between ranks or steps.
        """
        if self.names is None:
            of_ranks = context.all_gather_object(sorted(names))
            if not of_ranks[0] or any(found != of_ranks[0] for found in of_ranks):
                raise ConfigError(f"The metrics must have the same names on all ranks, but they are {of_ranks}.")
            self.names = of_ranks[0]
        if sorted(names) != self.names:
            raise ConfigError(f"The metrics function returned {sorted(names)} after {self.names}.")
        return self.names


class StepRanks(Protocol):
    """The ranks as the loss of a step may use them. A plan implements this with a single simulated rank."""

    @property
    def device(self) -> torch.device:
        """Device of this rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over the ranks."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return `value` of every rank, in rank order, on every rank."""


class StepSums:
    """Accumulates, on the device, sums and counts from the functions over a step's or evaluation's micro-batches.

    Args:
        functions: The functions.
        context: The ranks that take the step.
    """

    def __init__(self, functions: CustomFunctions, context: StepRanks) -> None:
        self._functions, self._context = functions, context
        self._count: torch.Tensor | None = None  # float64 []
        self._metrics: dict[str, torch.Tensor] = {}  # sum and count, float64 [2]

    @property
    def needs_output(self) -> bool:
        """Whether there are functions, which need the unmodified model output."""
        return self._functions.loss is not None or self._functions.metrics is not None

    def add_micro_batch(self, output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Add the metrics of a micro-batch; return the sum of its losses [], and add its count, if a loss is given."""
        if self._functions.metrics is not None:
            with torch.no_grad():
                found = self._functions.metrics(output, batch)
                _check_metrics(self._functions.metrics, found)
                for name, pair in found.items():
                    self.add_metric(name, *_check_pair(f"The metric {name}", self._functions.metrics, pair))
        if self._functions.loss is None:
            return None
        returned = self._functions.loss(output, batch)
        total, count = _check_pair("The loss function", self._functions.loss, returned)
        if torch.is_grad_enabled() and not total.requires_grad:
            raise ConfigError(
                "The loss function returned a sum without a gradient: it must be computed from the output. Where a "
                "micro-batch, or a rank's part of it, has nothing to predict, return output.logits.sum() * 0."
            )
        counted = self._number(count)
        self._count = counted if self._count is None else self._count + counted
        return total

    def rescale_gradients(self, module: nn.Module, loss: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        """Replace the division by the number of predictions with one by the loss function's count; a collective.

        Applied to the gradients of all micro-batches, as the count is known only after the last forward pass.

        Args:
            module: The model, whose gradients are changed in place.
            loss: This rank's sum divided by `divisor`, [].
            divisor: Predictions of all ranks divided by the number of ranks, [].

        Returns:
            This rank's part of the loss, [].
        """
        if self._count is None:
            return loss
        count = self.total_count() / self._context.world_size
        # A negative count, which only the device knows, makes the loss infinite, and so an error.
        factor = torch.where(count == 0, 0.0, divisor.double() / count.clamp(min=0))
        for param in module.parameters():
            if param.grad is not None:
                local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                local.mul_(factor.to(local.device, local.dtype))
        return loss * factor.to(loss.dtype)

    def total_count(self) -> torch.Tensor:
        """The loss count summed over all ranks, float64 []; a collective."""
        count = self._number(0.0) if self._count is None else self._count.clone()
        self._context.all_reduce_(count)
        return count

    def metrics(self) -> torch.Tensor:
        """Sum and count of each metric over all ranks, float64 [2 * num_metrics]; a collective."""
        if self._functions.metrics is None and not self._metrics:
            return torch.zeros(0, dtype=torch.float64, device=self._context.device)
        names = self._functions.agree_on_names(list(self._metrics), self._context)
        sums = torch.cat([self._metrics[name] for name in names])
        self._context.all_reduce_(sums)
        return sums

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Convert a result of `metrics` to means by name; NaN where nothing was counted."""
        return metric_means(self._functions.names or [], sums)

    def add_metric(self, name: str, total: torch.Tensor, count: torch.Tensor | float) -> None:
        """Add a scalar sum and a count to a metric; all ranks add the same metrics."""
        both = torch.stack([self._number(total), self._number(count)])
        self._metrics[name] = self._metrics[name] + both if name in self._metrics else both

    def _number(self, value: torch.Tensor | float) -> torch.Tensor:
        device = self._context.device
        if isinstance(value, torch.Tensor):
            return value.detach().reshape(()).to(device, torch.float64, non_blocking=True)
        return torch.full((), float(value), dtype=torch.float64, device=device)


def metric_means(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Return means by name, from a sum and a count for each of `names`; NaN where nothing was counted."""
    return {name: a / b if b else math.nan for name, a, b in zip(names, sums[::2], sums[1::2], strict=True)}


def check_returned_samples(function: SamplesFunction, samples: Any) -> None:
    """Raise ConfigError unless `samples`, returned by `function`, are prompts and completions."""
    if isinstance(samples, list | tuple):
        wrong = [one for one in samples if not _is_text_pair(one)]
        if not wrong:
            return
        described = f"a {type(samples).__name__} with {_describe(wrong[0])}"
    else:
        described = _describe(samples)
    raise ConfigError(
        f"The samples function must return a list of (prompt, completion), both strings; {_name(function)} has "
        f"returned {described}."
    )


def _is_text_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _check_metrics(function: MetricsFunction, metrics: Any) -> None:
    names = list(metrics) if isinstance(metrics, Mapping) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"The metrics function must return a dict of a sum and a count by name, a string; {_name(function)} has "
            f"returned {_describe(metrics) if names is None else f'the names {names}'}."
        )


def _check_pair(what: str, function: Callable[..., Any], pair: Any) -> SumAndCount:
    # Of a tensor only the dtype and the shape: to read its value would wait for the device.
    match pair:
        case (torch.Tensor() as total, count) if total.numel() == 1 and not total.is_complex() and _is_count(count):
            return total.reshape(()), count if isinstance(count, torch.Tensor) else float(count)
    raise ConfigError(
        f"{what} must return a tuple of a sum, which is a tensor of one number, and a count, a number from 0 on or a "
        f"tensor of one number; {_name(function)} has returned {_describe(pair)}."
    )


def _is_count(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    return not isinstance(value, bool) and isinstance(value, Real) and 0 <= float(value) < math.inf


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _describe(value: Any) -> str:
    """What a function has returned, without the values of tensors."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, list | tuple) and 0 < len(value) <= 3:
        return f"({', '.join(map(_describe, value))})"
    return repr(value)
