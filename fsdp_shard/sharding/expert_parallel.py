"""Expert parallelism: divides the experts of a mixture over neighboring ranks, and sends tokens to them.

For most mixtures, transformers defines the modules that hold experts (`ep_plan`), and implements the exchange of
tokens. This applies such a plan to a model on meta. Every rank has its own samples. An expert parameter is divided by
experts over the ranks of the mesh dimension `expert`, and its part again by experts over `shard`: whole rows, as
elsewhere.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import follows_plans_by_fqn, parallel_plan

_SETTING = "shard.expert_parallel"
# Styles of a module that sends tokens to its experts, and of a parameter that is divided by experts.
SENDS_TO_EXPERTS, DIVIDED_BY_EXPERTS = "ep_dispatch_experts", "grouped_gemm"


def check_experts(model: nn.Module, num_ranks: int) -> None:
    """Raise ConfigError unless `model` has experts, and a plan for them that works on `num_ranks` ranks."""
    where, name = f"{_SETTING}={num_ranks}", type(model).__name__
    plan, instead = parallel_plan(model, "ep_plan"), f"use {_SETTING}=1."
    if not follows_plans_by_fqn():  # until 5.23 is the oldest version
        raise ConfigError(
            f"{where} needs transformers 5.23 or newer, and {version('transformers')} is installed; install that, or "
            f"{instead}"
        )
    if not plan:
        raise ConfigError(
            f"{where}: transformers has no expert-parallel plan for {name}, or it has no experts, so there is nothing "
            f"to divide; {instead}"
        )
    if others := sorted(set(plan.values()) - {SENDS_TO_EXPERTS, DIVIDED_BY_EXPERTS}):
        raise ConfigError(
            f"{where}: the plan of {name} asks for {', '.join(others)}, which fsdp-shard cannot load and save; it "
            f"knows {SENDS_TO_EXPERTS}, {DIVIDED_BY_EXPERTS}. To train it, {instead}"
        )
    shapes = {fqn: tuple(param.shape) for fqn, param in model.named_parameters()}
    sending = [fqn for fqn in plan if fqn not in shapes]
    inside = {fqn for fqn in shapes if fqn.rpartition(".")[0] in sending}
    if uneven := sorted(inside ^ {fqn for fqn in shapes if plan.get(fqn) == DIVIDED_BY_EXPERTS}):
        raise ConfigError(
            f"{where}: the plan of {name} does not say of {uneven[0]} both that it is divided by experts and that "
            f"tokens are sent there, so it cannot be trained in parts; {instead}"
        )
    for fqn in sorted(inside):
        if shapes[fqn][0] % num_ranks:
            raise ConfigError(
                f"{where} does not divide the {shapes[fqn][0]} experts of {name} ({fqn}); give a divisor of it."
            )


def divide_experts(model: nn.Module, context: DistributedContext) -> dict[str, nn.Module]:
    """Divide the experts of `model`, on meta, over neighboring ranks, and make it send tokens to them.

    Returns the modules that hold experts, by FQN.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan, mesh = parallel_plan(model, "ep_plan"), context.expert_mesh
    assert mesh is not None
    assert plan, "check_experts was asked before"
    apply_expert_parallelism(model, mesh["expert"], mesh["tensor"], plan, "all_to_all")
    return {fqn: model.get_submodule(fqn) for fqn, style in plan.items() if style == SENDS_TO_EXPERTS}


def shard_experts(experts: Iterable[nn.Module], context: DistributedContext, options: Mapping[str, Any]) -> None:
    """Apply `fully_shard` with `options` to each expert module.

    A module's experts receive tokens of all data ranks, but its gradients are reduced only over the ranks that hold the
    same experts. `fully_shard` would divide by the number of these, so the divisor is set to the number of data ranks.
    """
    for module in experts:
        sharded = fully_shard(module, **options)
        sharded.set_gradient_divide_factor(float(context.num_data_ranks))
        # Only NCCL can scale during the sum; elsewhere, the sum is scaled afterwards. Without a sum, torch scales in
        # any case, and would do so twice.
        sharded.set_force_sum_reduction_for_comms(context.expert_mesh is not None and context.expert_mesh.size(1) > 1)
