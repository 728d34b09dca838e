"""Lists of modules of which only some run, depending on the input, such as the experts of Switch Transformers.

A module may run on one rank but not on another, so it cannot be a unit, which all ranks gather together. Where it did
not run, it receives a zero gradient: `fully_shard` reduces the gradients that a rank has, regardless of other ranks,
and would add up gradients of different modules.
"""

from collections import Counter
from collections.abc import Iterator, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_ALL_RUN = ("transformers.", "torch.", "peft.")  # modules whose plain lists run as a whole


def routed_lists(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield FQN and module of each list that defines its own forward, in module order."""
    for fqn, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is not nn.Module.forward:
            yield fqn, module


def skippable_modules(model: nn.Module) -> Iterator[str]:
    """Yield the FQN of each module in a plain list of similar modules, over which a user's module loops.

    That module may skip some of them. transformers models do so only in `routed_lists`.
    """
    for fqn, owner in model.named_modules():
        lists = [] if type(owner).__module__.startswith(_ALL_RUN) else list(owner.named_children())
        for name, modules in lists:
            if type(modules) in (nn.ModuleList, nn.ModuleDict):
                number = Counter(type(module) for module in modules.children())
                prefix = f"{fqn}.{name}" if fqn else name
                yield from (f"{prefix}.{key}" for key, module in modules.named_children() if number[type(module)] > 1)


def is_within(fqn: str, modules: Set[str]) -> bool:
    """Whether `fqn` is one of `modules`, which may be tens of thousands, or is inside one."""
    parts = fqn.split(".")
    return any(".".join(parts[:number]) in modules for number in range(1, len(parts) + 1))


def complete_gradients(model: nn.Module) -> None:
    """Give each module of a routed list that runs on any rank a gradient on all ranks.

    A module that runs on no rank has no gradient, as in a single process.
    """
    for _, modules in routed_lists(model):
        _Routed(list(modules.children()), modules)


class _Routed:
    def __init__(self, modules: list[nn.Module], owner: nn.Module) -> None:
        self.modules = modules
        self.has_run: set[nn.Module] = set()
        owner.register_forward_pre_hook(lambda *_: self.has_run.clear())
        owner.register_forward_hook(self._complete)
        for module in modules:
            module.register_forward_hook(lambda module, *_: self.has_run.add(module))

    def _complete(self, owner: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        is_trained = any(param.requires_grad for param in owner.parameters())
        if not (torch.is_grad_enabled() and is_trained):
            return output
        runs = torch.tensor([module in self.has_run for module in self.modules], dtype=torch.int32)
        runs = runs.to(output.device)
        dist.all_reduce(runs, dist.ReduceOp.MAX)
        only_elsewhere = [
            module
            for module, runs_somewhere in zip(self.modules, runs.tolist(), strict=True)
            if runs_somewhere and module not in self.has_run
        ]
        params = [param for module in only_elsewhere for param in module.parameters() if param.requires_grad]
        completed: torch.Tensor = _ZeroGradients.apply(output, *params)  # type: ignore[no-untyped-call]  # untyped in torch
        return completed


class _ZeroGradients(torch.autograd.Function):
    """Returns its first argument; the others receive zero gradients."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.like = [(param.shape, param.dtype, param.device) for param in params]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
