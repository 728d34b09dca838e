"""What `verify --against` and `diff` do before they compare tensors: they open both, and compare adapters' settings."""

from __future__ import annotations

from fsdp_shard.checkpoint.adapters.adapter_checks import check_adapter
from fsdp_shard.checkpoint.formats import peft
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.keys.lora_settings import setting_differences
from fsdp_shard.checkpoint.location import Location
from fsdp_shard.errors import CheckpointError


def refuse_unused_base(base: str | None, *locations: Location | None, are_run: bool = False) -> None:
    """Raise CheckpointError if `base` is passed and has no effect: no adapter is merged into it.

    Args:
        base: The base model, if one is passed.
        locations: The compared checkpoints. Two adapters are compared as they are, without a base.
        are_run: Whether the models are also run, each adapter on its base.
    """
    are_adapters = [location is not None and location.is_adapter for location in locations]
    if base is not None and not any(are_adapters):
        raise CheckpointError(
            f"The base model {base} is for an adapter, but neither of the two checkpoints is one; remove it."
        )
    if base is not None and all(are_adapters) and not are_run:
        raise CheckpointError(
            f"The base model {base} is for an adapter that is compared with a model, but both checkpoints are "
            f"adapters, which are compared as they are; remove it."
        )


def open_both(one: Location, two: Location) -> tuple[TensorIndex, TensorIndex]:
    """Open two checkpoints to compare them: an adapter compared with a model is merged into its base."""
    if one.is_adapter == two.is_adapter:
        return one.index, two.index
    return one.model_index, two.model_index


def differences_of_adapters(one: Location, two: Location) -> list[str]:
    """Return setting differences that make two adapters with equal matrices differ; none unless both are adapters."""
    if not (one.is_adapter and two.is_adapter):
        return []
    first, second = (peft.read_adapter_config(each.weights) for each in (one, two))
    lines = setting_differences(first, second)
    if first != second:
        lines += _targets_of_one(one.index, two.index)
    where = f"{one.weights / peft.ADAPTER_CONFIG} and {two.weights / peft.ADAPTER_CONFIG}"
    return [f"{where} differ: {line}." for line in lines]


def _targets_of_one(one: TensorIndex, two: TensorIndex) -> list[str]:
    """Describe a module whose tensors both hold, and only one of them uses."""
    try:
        (own, parts), (other, _) = check_adapter(one), check_adapter(two)
    except CheckpointError:  # of another kind than LoRA, which are compared by their tensors alone
        return []
    whole = (fqn.rpartition(".")[0].removesuffix(".base_layer") for fqn in parts.whole)
    alone = (module for module in (*parts.factors, *whole) if own.is_target(module) != other.is_target(module))
    return [] if (module := next(alone, None)) is None else [f"only one of them adapts {module}"]


def notes_on_bases(one: Location, two: Location) -> list[str]:
    """Return a note if two adapters name different base models; one model may have two names."""
    if not (one.is_adapter and two.is_adapter):
        return []
    bases = [peft.read_adapter_config(each.weights).get("base_model_name_or_path") for each in (one, two)]
    if bases[0] == bases[1]:
        return []
    return [f"The adapters name different base models, {bases[0]} and {bases[1]}, which were not compared."]
