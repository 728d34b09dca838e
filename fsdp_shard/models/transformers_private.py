"""All private names of transformers that the package uses, and public ones that differ between its versions.

CONTRIBUTING.md lists where each private name would break.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel


def parallel_plan(model: Any, kind: str) -> dict[str, str]:
    """Return the style of each module and parameter in the plan of `model`, by FQN; parameters before their module.

    Args:
        model: A transformers model; others have no plan.
        kind: `tp_plan` or `ep_plan`, which map names with `*` for numbers to styles.

    Returns:
        FQN -> style; empty without a plan.
    """
    plan: dict[str, str] = getattr(model, kind, None) or {}
    found: dict[str, str] = {}
    for fqn, module in model.named_modules() if plan else ():
        for name, _ in module.named_parameters(recurse=False):
            param = f"{fqn}.{name}" if fqn else name
            if (style := plan.get(_with_wildcards(param), plan.get(_with_wildcards(fqn)))) is not None:
                found[param] = style
        if (style := plan.get(_with_wildcards(fqn))) is not None:
            found[fqn] = style
    return found


def _with_wildcards(fqn: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", fqn)


def apply_tensor_plan(model: Any, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Shard the parameters in `plan`, from `parallel_plan(model, "tp_plan")`, and make modules communicate."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply: Any = apply_tensor_parallelism
    # Before transformers 5.23, it did not accept FQNs, but expanded the model's own plan itself.
    apply(model, mesh, *([plan] if follows_plans_by_fqn() else []))


def keep_experts(module: Any, num_experts: int) -> None:
    """Set the number of experts of a module, like an expert-parallel plan.

    Without `_is_expert_parallel`, `plan` would not count the masking of rows for other ranks' experts.
    """
    module.num_experts = num_experts
    module._is_expert_parallel = True


def follows_plans_by_fqn() -> bool:
    """Whether transformers, from 5.23, accepts expanded plans and supports expert parallelism with a batch per rank."""
    import transformers

    return Version(transformers.__version__) >= Version("5.23")


def kv_cache_of(output: Any) -> dict[str, Any]:
    """The KV cache that a model or `generate` returned, by the name of the argument that takes it; empty without one.

    Its name is `cache` from transformers 5.24 on, and before that `past_key_values`. `cache_params`, of Mamba before
    5.24, is not found.
    """
    for name in ("cache", "past_key_values"):
        if (cache := getattr(output, name, None)) is not None:
            return {name: cache}
    return {}


def no_split_modules(model: nn.Module) -> set[str]:
    """Class names of the modules that must stay on one device; without it, blocks are found by structure alone."""
    return {str(name) for name in getattr(model, "_no_split_modules", None) or ()}


def model_classes(auto_class: Any, config: PretrainedConfig) -> list[type]:
    """The classes that `auto_class` builds for `config`; without it, a wrong `model.task` is found after loading."""
    found = auto_class._model_mapping.get(type(config), None)
    return [cls for cls in (found if isinstance(found, tuple) else (found,)) if cls is not None]


def build_from_config(model_class: Any, config: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """Build a model of exactly `model_class`, with dtype and attention; only the auto classes are public."""
    model: PreTrainedModel = model_class._from_config(config, **kwargs)
    return model


def forget_implementations(config: PretrainedConfig) -> None:
    """Unset the attention and expert kernels that a file named, also in configs of parts, as there is no option.

    transformers downloads and loads native code for such a name, if the package `kernels` is installed.
    """
    for part in _parts(config):
        if isinstance(part, dict):
            for key in _IMPLEMENTATIONS & part.keys():
                del part[key]
        else:
            vars(part).pop("attribute_map", None)  # a file could rename the attributes set below
            part._attn_implementation = "eager" if part.output_attentions else None  # others return no attentions
            part._experts_implementation = None


_IMPLEMENTATIONS = frozenset(
    f"{start}{kind}_implementation{end}"
    for start in ("", "_")
    for kind in ("attn", "experts")
    for end in ("", "_internal")
)


def model_types(config: PretrainedConfig) -> set[str]:
    """The types of a model and its parts."""
    types = (part.get("model_type") if isinstance(part, dict) else part.model_type for part in _parts(config))
    return {name for name in types if isinstance(name, str)}


def _parts(config: PretrainedConfig) -> Iterator[Any]:
    """Yield a config and its nested ones, outer ones first: configs, and dicts from which models create configs."""
    from transformers import PretrainedConfig as Config

    seen: set[int] = set()
    found: list[Any] = [config]
    for value in found:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Config):
            yield value
            found.extend(vars(value).values())
        elif isinstance(value, dict):
            yield value
            found.extend(value.values())
        elif isinstance(value, (list, tuple)):
            found.extend(value)


def initialize(model: Any, module: nn.Module) -> None:
    """Compute tensors of `module` in `model` that `from_pretrained` does not read, such as rotary frequencies."""
    model._init_weights(module)


def dtypes_to_keep(model: Any, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Glob of parameter names -> the dtype in which `from_pretrained`, loading in `dtype`, keeps them."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    return plan


def ignored_unexpected_keys(model: Any) -> list[str]:
    """Patterns of stored names that `from_pretrained` skips; without it, old checkpoints with such tensors fail."""
    return list(model._keys_to_ignore_on_load_unexpected or ())


def ignored_missing_keys(model: Any) -> list[str]:
    """Patterns of names that `from_pretrained` does not require; without it, computed positions would be missing."""
    return list(model._keys_to_ignore_on_load_missing or ())


def is_stateful(model: Any) -> bool:
    """Whether the model keeps a recurrent state, which reads padding; without it, shorter prompts would be wrong."""
    return bool(getattr(model, "_is_stateful", False))


def attention_implementation(config: PretrainedConfig) -> str:
    """The attention with which the model of `config` was built, such as `sdpa`; there is no public getter."""
    return str(config._attn_implementation)


def is_plain_fast_tokenizer(tokenizer: Any) -> bool:
    """Whether calling `tokenizer` only calls its Rust backend, so that texts can be passed there directly."""
    from transformers import PreTrainedTokenizerFast

    cls, plain = type(tokenizer), PreTrainedTokenizerFast
    return cls.__call__ is plain.__call__ and getattr(cls, "_encode_plus", None) is plain._encode_plus
