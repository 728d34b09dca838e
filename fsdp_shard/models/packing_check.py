"""Checks whether a model keeps packed documents apart, by running a tiny model of the same architecture.

The model itself masks attention between packed documents, by `position_ids` that restart with each document, which
`data/samples/packing.py` writes. Packing is rejected for models that ignore them.

`try_tiny_model` also tests other properties of an architecture that no config states.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from fsdp_shard.errors import ModelError
from fsdp_shard.models.file_errors import config_file
from fsdp_shard.models.loading import build_on_meta, named_class, rebuild_buffers
from fsdp_shard.utils import one_thread, persistent_buffers

# The settings of transformers' configs that determine the size of a model, and their values in a tiny one.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "index_n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size", "intermediate_dim", "lora_rank")
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k", "moe_topk", "moe_k", "n_group")
_TINY_INNER, _TINY_VOCABULARY = 64, 97
_MOST_PARAMETERS = 150_000_000  # half a second to initialize; larger ones are rejected

# The settings of transformers' configs that make a language model attend to earlier tokens only. Models without them
# skip the trial, which takes up to three seconds: no class attends both ways without such a setting.
_LEFT_TO_RIGHT = {
    "is_decoder": True,
    "causal": True,
    "is_causal": True,
    "attn_type": "uni",
    "use_bidirectional_attention": False,
}
_IMAGES = "vision"  # a value of the last one: for the tokens of images only

_FIRST, _SECOND = 7, 9  # tokens of the two documents
_ROUNDING = 1e-3  # relative to the largest logit: experts multiply tokens of several documents at once
_FLASH_LIKE = "fsdp_shard_by_positions"  # transformers looks for kernels if a name contains "flash"


def check_packing(config: PretrainedConfig, attention: str = "sdpa") -> None:
    """Check that a model keeps packed documents, whose positions restart, apart.

    The check runs a tiny model of the same architecture on a window of two documents, as in training. Flash attention
    receives no mask, so each layer must pass the positions on; a function with the same inputs replaces it, so no GPU
    is needed.

    Args:
        config: The model's config; `architectures` names its class.
        attention: The setting `model.attention`.

    Raises:
        ModelError: One document changes the logits of the other, or no tiny model can be run.
    """
    instead = "data.packing=false for this model"
    reason = why_unsuitable(config, ("position_ids",)) or _leak(config, "eager" if attention == "eager" else None)
    if not reason and attention == "flash_attention_2" and _leak(config, _flash_like()):
        reason = "its layers do not pass positions to flash attention"
        instead = "model.attention=sdpa, or data.packing=false"
    if reason:
        raise ModelError(f"{named_class(config)[0]} cannot keep packed documents apart: {reason}. Set {instead}.")


def check_left_to_right(config: PretrainedConfig) -> None:
    """Check with a tiny model of the same architecture that no token of a causal language model depends on later ones.

    Masked language models also have classes that predict the next token, but unless config.json says otherwise, those
    still attend to later tokens: they would copy what they should predict.

    Args:
        config: The model's config; `architectures` names its class, which `check_causal` accepts.

    Raises:
        ModelError: A token depends on later ones. A model passes if no tiny version of it can run.
    """
    name, cls = named_class(config)
    text = config.get_text_config().to_dict()
    settings = {key: value for key, value in _LEFT_TO_RIGHT.items() if text.get(key) not in (None, value, _IMAGES)}
    failure = "it attends to later tokens"
    if cls is None or not settings or try_tiny_model(config, None, _is_left_to_right, failure) != failure:
        return
    key, value = next(iter(settings.items()))
    raise ModelError(
        f"{config_file(config)} is of a {name} that attends to later tokens, too, so it does not predict them. Set "
        f'"{key}": {json.dumps(value)} there if the model was trained to predict the next token; else give a causal '
        f"language model, or train this one with another model.task."
    )


def why_unsuitable(config: PretrainedConfig, arguments: Sequence[str]) -> str:
    """Return why a model cannot process several texts in a row, if its class or config shows that; else "".

    Args:
        config: Its config.
        arguments: Arguments that its forward pass needs.
    """
    _, cls = named_class(config)
    if cls is None:
        return "its code is not part of transformers"
    if missing := [name for name in arguments if name not in inspect.signature(cls.forward).parameters]:
        return f"it takes no {missing[0]}"
    # Layers that mix tokens by other means than attention, if the config lists types of layers.
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    others = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    return f"it has layers without attention ({', '.join(others)})" if others else ""


def _leak(config: PretrainedConfig, attention: str | None) -> str:
    """Return why packed windows are wrong in models of `config`; empty if they are right."""
    return try_tiny_model(config, attention, _keeps_apart, "its attention does not depend on positions")


def try_tiny_model(
    config: PretrainedConfig, attention: str | None, test: Callable[[PreTrainedModel], bool], failure: str
) -> str:
    """Test a small model with the architecture of `config`, on the CPU, with random weights.

    Args:
        config: The config of the model.
        attention: Attention implementation, as named by transformers; None leaves the choice to it.
        test: Whether a model, in eval mode with a vocabulary of 97 tokens, has the property.
        failure: The result if it lacks the property.

    Returns:
        `failure`, or why no tiny model of the architecture runs; empty if the test passes.
    """
    reason = ""
    for num_heads in (1, 4, None):  # some architectures need several heads, or a fixed ratio of widths
        try:
            with torch.random.fork_rng(devices=[]), one_thread():
                return "" if test(_tiny_model(config, attention, num_heads)) else failure
        except Exception as error:  # of any type, from code that does not expect such sizes
            text = " ".join(f"{type(error).__name__}: {error}".split())
            reason = reason or f"a tiny model of this architecture, which would test it, does not run ({text})"
    return reason


def _is_left_to_right(model: PreTrainedModel) -> bool:
    """Return whether changing the last token leaves the logits of the preceding tokens unchanged."""
    window = torch.randint(5, _TINY_VOCABULARY - 5, (1, _FIRST), generator=torch.Generator().manual_seed(1))
    another = window.clone()
    another[:, -1] = _TINY_VOCABULARY - 5
    with torch.no_grad():
        one, other = (model(input_ids=ids, use_cache=False).logits[:, :-1] for ids in (window, another))
    return _distance(one, other) <= _ROUNDING * float(one.abs().max())


def _keeps_apart(model: PreTrainedModel) -> bool:
    """Return whether the second document of a window has the same logits with and without the first one."""
    generator = torch.Generator().manual_seed(1)
    window, another = torch.randint(5, _TINY_VOCABULARY - 5, (2, 1, _FIRST + _SECOND), generator=generator)
    second = another[:, _FIRST:] = window[:, _FIRST:]
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]

    def logits(ids: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, use_cache=False, **kwargs).logits
        return found[:, -_SECOND:]

    with torch.no_grad():
        alone, packed = logits(second), logits(window, position_ids=positions)
        changed, without_positions = logits(another, position_ids=positions), logits(window)
    most = _distance(without_positions, alone)
    rounding = _ROUNDING * float(alone.abs().max())
    if not most > 10 * rounding:
        raise ValueError("it does not attend to earlier tokens")
    return _distance(packed, changed) <= rounding and _distance(packed, alone) <= most / 10


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _tiny_model(config: PretrainedConfig, attention: str | None, num_heads: int | None) -> PreTrainedModel:
    """Build a small model with the architecture of `config` on the CPU, with random weights.

    It has all layers, because not every config lists the kind of each layer.
    """
    small = type(config).from_dict(_shrunk(config.to_dict(), num_heads))
    model = build_on_meta(small, "float32", attention=attention)
    if sum(param.numel() for param in model.parameters()) > _MOST_PARAMETERS:
        raise ValueError("it would have too many parameters")
    rebuild_buffers(model, "cpu")
    generator = torch.Generator().manual_seed(0)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param not in filled:
                # Random, unlike the architecture's own initialization, whose zeros would hide a leak.
                spread = param.shape[-1] ** -0.5 if param.ndim > 1 else 0.1
                values = torch.empty(param.shape).normal_(0, spread, generator=generator)
                values += param.ndim == 1 and name == "weight"  # of a norm
                filled[param] = nn.Parameter(values, requires_grad=False)
            setattr(module, name, filled[param])
    for owner, name, _, buffer in persistent_buffers(model):
        setattr(owner, name, torch.ones_like(buffer, device="cpu"))
    return model


def _shrunk(values: Mapping[str, Any], num_heads: int | None, heads: int = 0) -> dict[str, Any]:
    """Return the settings of a config, or of a part of it, for a tiny model; `heads` is the full model's number."""
    heads = next((values[name] for name in _HEADS if isinstance(values.get(name), int)), heads)
    chosen = [values[name] for name in _CHOSEN_EXPERTS if isinstance(values.get(name), int)]

    def shrink(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _shrunk(value, num_heads, heads)
        if isinstance(value, list):
            return [shrink(name, item) for item in value]
        if name == "n_inner":  # None: four times the width
            return _TINY_INNER
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if name.startswith("vocab_size") or name == "n_words":
            return _TINY_VOCABULARY  # that of the model may be smaller: letters, bases
        if name.endswith(("token_id", "token_index")):
            return min(value, _TINY_VOCABULARY - 1)
        if name.endswith(_INNER):
            return min(value, _TINY_INNER)
        if name in NUM_EXPERTS:
            return min(value, 2 * max(chosen, default=1))
        if num_heads is not None and heads > num_heads:
            if name in _HIDDEN:
                return -(-value * num_heads // heads // 8) * 8  # grouped products of experts need multiples of 8
            if name in (*_HEADS, *_KEY_VALUE_HEADS):
                return num_heads if value >= heads else 1
        return value

    return {name: shrink(str(name), value) for name, value in values.items()}


def _flash_like() -> str:
    """Register an attention function with the inputs of flash attention, positions but no mask; return its name."""
    AttentionInterface.register(_FLASH_LIKE, _attend_like_flash)
    return _FLASH_LIKE


def _attend_like_flash(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    positions = kwargs.get("position_ids")
    if positions is not None and positions.ndim == 2:
        document = (positions[0] == 0).cumsum(0)
        mask &= document[:, None] == document
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=kwargs.get("scaling"), enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None
