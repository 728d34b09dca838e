"""Tensor parallelism: layers divided over neighboring ranks as the model's own plan says, before they are sharded.

transformers names, for many models, how each linear layer is cut (`tp_plan`), and has the layers' communication. This
applies such a plan to a model on meta. A parameter is then cut by columns or rows over the tensor ranks, and its part
by rows over the sharding ranks: one box of the whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_shard.errors import ConfigError
from fsdp_shard.models import apply_tensor_plan, follows_plans_by_fqn, parallel_plan, tied_names

# Styles that cut a parameter along one dimension, or leave it whole on each rank with the same gradient.
_STYLES = frozenset({"colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_rep", "embedding_rowwise"})


# Styles of what is whole on each rank, and whose gradient would have to be added up.
INFERENCE_STYLES = frozenset({"replicated_with_grad_allreduce"})


def check_tensor_parallel(
    model: nn.Module, num_ranks: int, setting: str = "shard.tensor_parallel", *, also: frozenset[str] = frozenset()
) -> None:
    """Raise ConfigError, naming `setting`, unless `model` has a plan that can be followed on `num_ranks` ranks.

    `also` are styles that are understood in addition to those that can be trained.
    """
    styles = _STYLES | also
    where, name = f"{setting}={num_ranks}", type(model).__name__
    plan = parallel_plan(model, "tp_plan")
    if not plan:
        raise ConfigError(
            f"{where}: transformers has no tensor-parallel plan for {name}, so its layers cannot be divided; use "
            f"{setting}=1."
        )
    if others := sorted(set(plan.values()) - styles):
        raise ConfigError(
            f"{where}: the plan of {name} asks for {', '.join(others)}, which fsdp-shard cannot load and save; it "
            f"knows {', '.join(sorted(styles))}. Use {setting}=1."
        )
    if uneven := [] if follows_plans_by_fqn() else _uneven_outputs(model, plan, num_ranks):
        raise ConfigError(
            f"{where} does not divide the outputs of {uneven[0]} of {name}, which transformers before 5.23 needs; "
            f"install that, or give a divisor."
        )
    # A matter of gradients, so of no concern to who only runs the model.
    if not also and (alone := _between_cut_layers(model, plan)):
        raise ConfigError(
            f"{where}: {name} has {alone} among layers that are cut, and its plan does not name it: each rank would "
            f"train it on its own heads alone. Use {setting}=1."
        )
    config: Any = model.config
    text = config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, key, None)) is not None and heads % num_ranks:
            raise ConfigError(
                f"{where} does not divide the {heads} {key} of {name}, and a head cannot be cut; give a divisor of it."
            )


def _between_cut_layers(model: nn.Module, plan: Mapping[str, str]) -> str:
    """A module with parameters in the same parent as a cut layer, such as a norm of its queries; empty if none."""
    cut = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}
    siblings = (
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[0] in cut and name not in plan and next(module.parameters(), None) is not None
    )
    return next(siblings, "")


def _uneven_outputs(model: nn.Module, plan: Mapping[str, str], num_ranks: int) -> list[str]:
    """Parameters whose outputs are gathered and not divided evenly: of no concern once 5.23 is the oldest version."""
    gathered = {name for name, style in plan.items() if style in ("colwise_gather_output", "colwise_rep")}
    return [name for name, param in model.named_parameters() if name in gathered and len(param) % num_ranks]


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the parameters of `model`, on meta, over the ranks of `mesh`, and have its layers communicate."""
    ties = tied_names(model)
    plan = {name: style for name, style in parallel_plan(model, "tp_plan").items() if name not in ties}
    apply_tensor_plan(model, mesh, plan)
    for alias, kept in ties.items():  # each parameter was replaced, under its first name only
        owner, _, name = alias.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(kept))


def clip_grads(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """`clip_grad_norm_` over parameters that lie on several meshes, or on none, which torch's own does not take."""
    groups = by_mesh(param for param in parameters if param.grad is not None)
    squares = [_squared_norm([grad for param in its if (grad := param.grad) is not None]) for its in groups.values()]
    total = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
    for members in groups.values():  # one call of a foreach kernel takes one mesh
        nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


def _squared_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of `grads`, all on one mesh, over all ranks."""
    norm = torch.nn.utils.get_total_norm(grads)
    if not isinstance(norm, DTensor):
        return norm.square()
    square = norm.to_local().square()
    for dim, placement in enumerate(norm.placements):  # as `full_tensor` does, which warns of doing so
        if placement.is_partial():
            dist.all_reduce(square, group=norm.device_mesh.get_group(dim))
    return square


def by_mesh(tensors: Iterable[torch.Tensor]) -> Mapping[Any, list[torch.Tensor]]:
    """`tensors` in groups of those that are divided over the same mesh."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return groups


def split_groups_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters on different meshes groups of their own: one call of a fused kernel takes one mesh."""
    groups = [(group, members) for group in optimizer.param_groups for members in by_mesh(group["params"]).values()]
    optimizer.param_groups = [{**group, "params": members} for group, members in groups]
