"""Builds the optimizer of a sharded model, and checks one that a recipe built."""

import inspect
from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import nn, optim

from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import ShardedModel, split_groups_by_mesh
from fsdp_shard.training.optim.config import OptimConfig
from fsdp_shard.training.optim.whole_param_optimizer import FullParamOptimizer


class Rates(Protocol):
    """An adapter that may define separate learning rates for some of its parameters."""

    def learning_rates(self, lr: float, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, float]:
        """Return peak learning rates by FQN, for parameters whose rate is not `lr`; `shapes` are unsharded."""


def build_optimizer(
    config: OptimConfig,
    model: ShardedModel,
    context: DistributedContext,
    adapter: Rates | None = None,
    lengths: Mapping[str, list[int]] | None = None,
) -> optim.Optimizer:
    """Build the optimizer of a model's trainable parameters; a collective.

    Unsharded shapes decide which parameters receive weight decay.

    Args:
        config: Settings of the optimizer.
        model: The sharded model.
        context: The ranks that the model is sharded over.
        adapter: The trained adapter, if any, for its separate learning rates (`adapter.lora_plus_ratio`).
        lengths: Number of elements of each parameter on each rank, by FQN; None gathers them.

    Raises:
        ConfigError: The optimizer needs full parameters, but layers or experts are divided over ranks, or parameters
            are on several devices.

    Example:
        >>> optimizer = fs.build_optimizer(config.optim, loaded.model, start.context, loaded.adapter)  # doctest: +SKIP
    """
    shards = {name: shard for name, shard in model.local_shards().items() if isinstance(shard.tensor, nn.Parameter)}
    shapes = {name: shard.shape for name, shard in shards.items()}
    trained = {name: shape for name, shape in shapes.items() if shards[name].tensor.requires_grad}
    rates = {} if adapter is None else adapter.learning_rates(config.lr, trained)
    config.check_divided(context.num_tensor_ranks, context.num_expert_ranks)
    if config.needs_full_params:
        group = context.mesh[model.shard_mesh_dim].get_group()
        _refuse_several_devices({name: shards[name] for name in trained}, group.size())
        return FullParamOptimizer(shards, group, lambda params: config.build(params, shapes, rates), lengths)
    params = {name: cast("nn.Parameter", shard.tensor) for name, shard in shards.items()}
    optimizer = config.build(params, shapes, rates)
    split_groups_by_mesh(optimizer)
    return optimizer


def _refuse_several_devices(trained: Mapping[str, LocalShard], num_ranks: int) -> None:
    """Raise ConfigError if scalars are on the GPU and other parameters in CPU memory: update rounds combine them."""
    scalars = [name for name, shard in trained.items() if not shard.shape]
    if scalars and num_ranks > 1 and len({shard.data.device for shard in trained.values()}) > 1:
        raise ConfigError(
            f"This optimizer needs full parameters for an update, which it cannot gather with shard.cpu_offload=true "
            f"under shard=fsdp2: the scalar parameter {scalars[0]} stays on the GPU; use optim=adamw or optim=sgd, or "
            f"shard.cpu_offload=false."
        )


def check_rates(optimizer: optim.Optimizer, *, has_rates: bool) -> None:
    """Raise ConfigError if LoRA+ is set (`has_rates`) but a recipe's optimizer has one learning rate for all."""
    if has_rates and len({float(group["lr"]) for group in optimizer.param_groups}) == 1:
        raise ConfigError(
            f"adapter.lora_plus_ratio is set, but all groups of {type(optimizer).__name__} have one learning rate; "
            f"in a recipe of your own, give build_optimizer the adapter (loaded.adapter), or remove the setting."
        )


def check_steps(optimizer: optim.Optimizer) -> None:
    """Raise ConfigError unless the loop can set the learning rate of an optimizer, step it, and see its steps."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), int | float | torch.Tensor):
            has = f"lr={group['lr']!r}" if "lr" in group else "no lr"
            raise ConfigError(
                f"A parameter group of {kind} has {has}, and the loop sets the learning rate of each step: make the "
                f"optimizer with a number, the peak of train.schedule, such as lr=config.optim.lr."
            )
    if needs_closure(optimizer):
        raise ConfigError(
            f"{kind}.step() requires a closure, and the loop computes the gradients once per step and calls step() "
            f"without one; choose another optimizer, or write your own loop with fs.Checkpointer."
        )
    if not runs_step_hooks(optimizer):
        raise ConfigError(
            f"{kind} does not call Optimizer.__init__, so that its steps run no hooks, and a save in the background "
            f"would mix two steps; call super().__init__(params, defaults) in it."
        )


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Whether `step()` cannot be called without arguments."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(one.default is one.empty and one.kind not in variable for one in arguments)


def runs_step_hooks(optimizer: optim.Optimizer) -> bool:
    """Whether `step()` runs step hooks: torch's `Optimizer.__init__` wraps the step of each class for that."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def check_parameters(optimizer: optim.Optimizer, model: ShardedModel) -> None:
    """Raise ConfigError if the optimizer updates tensors that are not the model's: training would change nothing."""
    given = [param for group in optimizer.param_groups for param in group["params"]]
    known = {id(param) for param in model.module.parameters()}
    if any(id(param) not in known for param in given):
        known |= {id(shard.tensor) for shard in model.local_shards().values()}  # unless they are gathered
    foreign = [param for param in given if id(param) not in known]
    if foreign:
        raise ConfigError(
            f"{type(optimizer).__name__} has a parameter of shape {list(foreign[0].shape)} that the model does not "
            f"have; make the optimizer of model.module.parameters() after the model is sharded. What else is "
            f"learned belongs into the model, where checkpoints keep it."
        )
