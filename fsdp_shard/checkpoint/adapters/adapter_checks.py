"""Checks an adapter's files, on their own and against their base model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_shard.checkpoint.base_model import (
    BaseModel,
    config_changes,
    is_base_model,
    read_base_model,
    vocabulary,
)
from fsdp_shard.checkpoint.formats import peft
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import kind_of
from fsdp_shard.checkpoint.keys.lora_settings import LoraSettings, parse_lora
from fsdp_shard.checkpoint.keys.quantized_weights import DEQUANTIZED, quantization, refuse_quantized
from fsdp_shard.checkpoint.keys.wrapper_prefixes import ADAPTER, PEFT_PREFIX
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import format_count

_LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<factor>[AB])(?:\.default)?(?:\.weight)?")
# peft stores some tensors of modules_to_save twice more under these names, but does not read them: biases with
# bias=all, and embeddings if the vocabulary was changed.
_UNREAD_COPY = re.compile(r"\.(modules_to_save|original_module)\.(.*bias|weight$)")
_TOKENS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\.default)?")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")


class QuantizedBaseError(CheckpointError):
    """The weights that an adapter changes are quantized in its base."""


def quantized_base_error(adapter: TensorIndex, base: TensorIndex, method: str) -> QuantizedBaseError:
    """Return the error for a base that is quantized by a `method`."""
    advice = (
        f"dequantize it by fsdp-shard convert source={base.path} target=DIR dequantize=true, and give base=DIR"
        if method in DEQUANTIZED
        else "give base=DIR, the model that it was made from, or one that transformers has dequantized and saved"
    )
    return QuantizedBaseError(
        f"{adapter.root} is an adapter whose base {base.path} is quantized ({method}), and adapters are merged "
        f"into weights in floating point only; {advice}."
    )


@dataclass(frozen=True)
class AdapterParts:
    """The tensors of an adapter file, by the model's module names.

    Attributes:
        factors: Module -> the names of its factors A and B, and with DoRA of its magnitude M.
        whole: Name of a parameter in peft's model -> the name of the tensor that replaces it.
        tokens: Module -> the name of the rows that replace some of its own (`trainable_token_indices`).
    """

    factors: dict[str, dict[str, str]]
    whole: dict[str, str]
    tokens: dict[str, str]


def check_on_base(adapter: TensorIndex, base: TensorIndex, side: Path) -> tuple[LoraSettings, AdapterParts]:
    """Check an adapter like `check_adapter`, and check that it belongs to a base model.

    Args:
        adapter: The adapter's own tensors.
        base: The weights of the base model.
        side: The directory with the base model's config.

    Raises:
        CheckpointError: The adapter belongs to another base, is neither LoRA nor DoRA, or contradicts itself.
    """
    settings, parts = check_adapter(adapter)
    recorded = read_base_model(adapter.root)
    if recorded is not None:
        refuse_other_base(adapter.root, base, side, recorded)
    refuse_other_config(adapter.root, side)
    return settings, parts


def check_unmerged(adapter: TensorIndex, base: TensorIndex, side: Path) -> tuple[LoraSettings, AdapterParts]:
    """Check an adapter that will be switched on and off, and so is not merged into its base.

    The arguments are those of `check_on_base`.

    Raises:
        CheckpointError: The adapter belongs to another base, or is more than products of two matrices.
    """
    settings, parts = check_on_base(adapter, base, side)
    others = [*parts.whole.values(), *parts.tokens.values()]
    has = "the magnitudes of DoRA" if settings.is_dora else next(iter(others), None)
    if has is None and settings.saved:
        has = f"modules_to_save ({', '.join(settings.saved)})"
    if settings.parameters:
        has = f"matrices for each expert ({settings.parameters[0]})"
    if has is not None:
        raise CheckpointError(
            f"{adapter.root} has {has}, and only adapters that are products of two matrices can be switched; read it "
            f"alone, as checkpoint={adapter.root}, where it is merged into its base."
        )
    return settings, parts


def check_adapter(adapter: TensorIndex) -> tuple[LoraSettings, AdapterParts]:
    """Check an adapter's files without its base: settings, names, and the ranks of adapted modules.

    Raises:
        CheckpointError: It is neither LoRA nor DoRA, or its settings and tensors contradict each other.
    """
    settings = parse_lora(adapter.root / peft.ADAPTER_CONFIG, peft.read_adapter_config(adapter.root))
    parts = AdapterParts({}, {}, {})
    for name in adapter.names:
        fqn = name.removeprefix(PEFT_PREFIX)
        match = _LOW_RANK.fullmatch(fqn) or (_MAGNITUDE.fullmatch(fqn) if settings.is_dora else None)
        if fqn == name or ("lora_" in fqn and not match):
            raise CheckpointError(
                f"{adapter.root} holds {name}, which is not a part of LoRA or DoRA; merge it with peft."
            )
        if match:
            held, factor = parts.factors.setdefault(match["module"], {}), match.groupdict().get("factor", "M")
            if other := held.get(factor):
                raise CheckpointError(f"{adapter.root} holds both {other} and {name}, which are one tensor for peft.")
            held[factor] = name
        elif match := _TOKENS.fullmatch(fqn):
            parts.tokens[match["module"]] = name
        elif not is_unread_copy(fqn):
            parts.whole[fqn] = name
    settings.try_patterns(
        [*parts.factors, *(fqn.rpartition(".")[0].removesuffix(".base_layer") for fqn in parts.whole)]
    )
    for module, names in parts.factors.items():
        if settings.is_target(module):
            check_factors(adapter, module, names, settings, settings.rank(module))
    return settings, parts


def is_unread_copy(name: str) -> bool:
    """Whether a tensor of an adapter is one that the adapter also stores under the name that peft reads."""
    return _UNREAD_COPY.search(name) is not None


def check_factors(
    adapter: TensorIndex, module: str, names: Mapping[str, str], settings: LoraSettings, rank: int
) -> None:
    if not names.keys() >= {"A", "B"}:
        raise CheckpointError(f"{adapter.root} has only one of lora_A and lora_B of {module}.")
    if settings.is_dora and "M" not in names:
        raise CheckpointError(f"{adapter.root} has no lora_magnitude_vector of {module}, which use_dora needs.")
    for factor, name in names.items():
        entry = adapter.tensors[name]
        if kind_of(entry.dtype) != "floating-point":
            raise CheckpointError(
                f"{adapter.root}: {name} is stored as {entry.dtype}; a factor of LoRA is floating-point."
            )
        if len(entry.shape) != (1 if factor == "M" else 2):
            expected = "expected a vector" if factor == "M" else "only matrices can be merged"
            raise CheckpointError(f"{adapter.root}: {name} has shape {list(entry.shape)}; {expected}.")
    found = (adapter.tensors[names["A"]].shape[0], adapter.tensors[names["B"]].shape[1])
    if found != (rank, rank):
        raise CheckpointError(
            f"{adapter.root}: lora_A and lora_B of {module} have the ranks {found[0]} and {found[1]}, but r and "
            f"rank_pattern of {settings.path.name} give it {rank}."
        )


def check_loadable(index: TensorIndex) -> None:
    """Raise CheckpointError unless the stored weights are those with which the model computes.

    This excludes quantized weights, and weights of a base model stored together with its LoRA.
    """
    refuse_quantized(index.path, quantization(index))
    refuse_adapter_within(index)


def refuse_adapter_within(index: TensorIndex) -> None:
    """Raise CheckpointError if an adapter is stored together with its base, whose weights are then not the model's."""
    if ADAPTER in index.extras:
        found = format_count(index.extras[ADAPTER].num_tensors, "tensor")
        raise CheckpointError(
            f"{index.path} holds {found} of an adapter together with the weights of its base, which alone are another "
            f"model; merge the two with peft, or save the adapter by its save_pretrained."
        )


def refuse_other_base(root: Path, base: TensorIndex, side: Path, recorded: BaseModel) -> None:
    """Reject weights of the same shapes that are not those recorded as the adapter's base."""
    if not is_base_model(base, recorded, side):
        raise CheckpointError(
            f"{root} is an adapter that was trained on {recorded.path}, but the weights in {base.path} are others; "
            f"give that model as base, with the names and dtypes that it had."
        )


def refuse_other_config(root: Path, side: Path) -> None:
    """Reject a base whose config has changed since an adapter was trained on it.

    Args:
        root: The directory of the adapter.
        side: The directory with the base model's config.

    Raises:
        CheckpointError: The base computes something else.
    """
    recorded = read_base_model(root)
    if recorded is not None and (changes := config_changes(recorded, side)):
        raise CheckpointError(
            f"{root} is an adapter that was trained on {recorded.path}, and config.json in {side} differs from its "
            f"config.json: {', '.join(changes)}. Restore these values, or give another base; convert, generate and "
            f"evaluate use another config where config=PATH names it."
        )


def refuse_other_tokenizer(root: Path, directory: Path) -> None:
    """Reject a base's tokenizer if its token ids have changed since an adapter was trained on it.

    Args:
        root: The directory of the adapter.
        directory: The directory with the tokenizer.

    Raises:
        CheckpointError: A text would become other tokens.
    """
    recorded = read_base_model(root)
    before = None if recorded is None else recorded.vocabulary
    if recorded is not None and before is not None and vocabulary(directory) not in (before, None):
        raise CheckpointError(
            f"{root} is an adapter that was trained on {recorded.path}, and the tokenizer in {directory} has other "
            f"tokens, or others of their numbers, than that had. Set it back, or name the tokenizer that it was "
            f"trained with: tokenizer=PATH in convert, generate and evaluate."
        )
