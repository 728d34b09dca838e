"""Bytes of an optimizer's state, measured by letting the real one take a step on fake tensors.

Parameters whose names differ only in the numbers of layers, with one dtype, shape and shard, have equal states: one of
each kind takes the step, so that a model of a thousand parameters on a thousand ranks is measured in milliseconds.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch
from torch import nn

from fsdp_shard.sharding import Shape
from fsdp_shard.training import OptimConfig
from fsdp_shard.utils import DataDependentOutputException, FakeTensorMode, one_thread

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")  # of a layer or an expert, in an FQN

_Kind = tuple[str, Shape, Shape, torch.dtype]  # name without numbers, local and unsharded shape, dtype


class OptimizerSizes:
    """The bytes of the state of one optimizer, for any parameters of one model.

    Args:
        optim: The optimizer settings.
        shapes: The unsharded shape of every parameter, by FQN.
        dtypes: The dtype of every parameter, by FQN.
    """

    def __init__(self, optim: OptimConfig, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> None:
        self._optim, self._shapes, self._dtypes = optim, shapes, dtypes
        self._patterns = {name: _NUMBER.sub("*", name) for name in shapes}
        self._known: dict[_Kind, int] = {}

    def num_bytes(self, local: Mapping[str, Shape]) -> int:
        """Bytes of the state after the first step of a rank that updates `local`: FQN -> local shape."""
        counts: Counter[_Kind] = Counter()
        examples: dict[_Kind, str] = {}
        for name, shape in local.items():
            kind = self._patterns[name], shape, self._shapes[name], self._dtypes[name]
            counts[kind] += 1
            examples.setdefault(kind, name)
        if new := [kind for kind in counts if kind not in self._known]:
            self._measure(new, [examples[kind] for kind in new])
        return sum(count * self._known[kind] for kind, count in counts.items())

    def _measure(self, kinds: Iterable[_Kind], names: Iterable[str]) -> None:
        with one_thread():
            _step(self._optim, {"weight": nn.Parameter(torch.zeros(64, 64))})  # torchao computes tables at first use
        with FakeTensorMode():
            # Numbered anew: two kinds may have their example in one parameter, on two ranks.
            pairs = list(zip(kinds, names, strict=True))
            params = {
                f"{number}.{name}": nn.Parameter(torch.empty(local, dtype=dtype))
                for number, ((_, local, _, dtype), name) in enumerate(pairs)
            }
            shapes = {name: shape for name, ((_, _, shape, _), _) in zip(params, pairs, strict=True)}
            state = _step(self._optim, params, shapes).state
            for param, (kind, _) in zip(params.values(), pairs, strict=True):
                self._known[kind] = sum(_num_bytes(value) for value in state.get(param, {}).values())


def optimizer_bytes(
    optim: OptimConfig, local: Mapping[str, Shape], shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
) -> int:
    """Bytes of the state of `optim` on one rank.

    Args:
        optim: The optimizer settings.
        local: The local shape of each parameter that the rank updates, by FQN.
        shapes: The unsharded shape of every parameter.
        dtypes: The dtype of every parameter.

    Returns:
        The bytes of the state after the first step.
    """
    return OptimizerSizes(optim, shapes, dtypes).num_bytes(local)


def _step(
    optim: OptimConfig, params: Mapping[str, nn.Parameter], shapes: Mapping[str, Shape] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of `params`, after a step."""
    optimizer = optim.build(params, shapes or {name: tuple(param.shape) for name, param in params.items()})
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
        # Adafactor looks at values, which fake tensors do not have, after it has made the state of a group.
        with suppress(DataDependentOutputException):
            optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _num_bytes(value: object) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    if not hasattr(value, "__tensor_flatten__"):
        return value.numel() * value.element_size()
    parts, _ = value.__tensor_flatten__()  # a quantized state
    return sum(_num_bytes(getattr(value, part)) for part in parts)
