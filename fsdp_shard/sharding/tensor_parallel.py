"""Tensor parallelism: divides layers over neighboring ranks according to the model's own plan, before sharding.

For many models, transformers defines how each linear layer is divided (`tp_plan`), and implements the layers'
communication. This applies such a plan to a model on meta. A parameter is divided by columns or rows over the tensor
ranks, and its part by rows over the sharding ranks, so a rank holds one box of the whole.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_shard.errors import ConfigError
from fsdp_shard.models import apply_tensor_plan, follows_plans_by_fqn, parallel_plan, tied_names

# Styles that divide a parameter along one dimension: outputs of a layer, of which the last two gather them; inputs; and
# rows of an embedding.
COLUMN_STYLES = ("colwise", "colwise_gather_output", "colwise_rep")
GATHERED_STYLES = COLUMN_STYLES[1:]
ROW_STYLES = ("rowwise", "rowwise_rep")
EMBEDDING_STYLE = "embedding_rowwise"
_STYLES = frozenset({*COLUMN_STYLES, *ROW_STYLES, EMBEDDING_STYLE})
# Styles of replicated parameters whose gradients would have to be summed.
INFERENCE_STYLES = frozenset({"replicated_with_grad_allreduce"})


def check_tensor_parallel(
    model: nn.Module, num_ranks: int, setting: str = "shard.tensor_parallel", *, also: frozenset[str] = frozenset()
) -> None:
    """Raise ConfigError, naming `setting`, unless `model` has a plan that works on `num_ranks` ranks.

    `also` are styles supported in addition to those that can be trained.
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
    # This concerns only gradients, and so does not matter for inference.
    if not also and (alone := _between_divided_layers(model, plan)):
        raise ConfigError(
            f"{where}: {name} has {alone} among divided layers, and its plan does not name it: each rank would "
            f"train it on its own heads alone. Use {setting}=1."
        )
    config: Any = model.config
    text = config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, key, None)) is not None and heads % num_ranks:
            raise ConfigError(
                f"{where} does not divide the {heads} {key} of {name}, and a head cannot be divided; give a "
                f"divisor of it."
            )


def _between_divided_layers(model: nn.Module, plan: Mapping[str, str]) -> str:
    """A module with parameters in the same parent as a divided layer, such as a norm of its queries; empty if none."""
    divided = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}
    siblings = (
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[0] in divided and name not in plan and next(module.parameters(), None) is not None
    )
    return next(siblings, "")


def _uneven_outputs(model: nn.Module, plan: Mapping[str, str], num_ranks: int) -> list[str]:
    """Parameters whose outputs are gathered but not evenly divided; irrelevant once 5.23 is the oldest version."""
    gathered = {name for name, style in plan.items() if style in GATHERED_STYLES}
    params = model.named_parameters(remove_duplicate=False)  # a tied head is gathered, too
    return [name for name, param in params if name in gathered and len(param) % num_ranks]


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the parameters of `model`, on meta, over the ranks of `mesh`, and make its layers communicate."""
    ties = tied_names(model)
    plan = {name: style for name, style in parallel_plan(model, "tp_plan").items() if name not in ties}
    apply_tensor_plan(model, mesh, plan)
    for alias, kept in ties.items():  # each parameter was replaced only under its first name
        owner, _, name = alias.rpartition(".")
        setattr(model.get_submodule(owner), name, model.get_parameter(kept))
