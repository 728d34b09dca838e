"""Where a model's tokens are: how many positions it has learned, and whether it keeps packed documents apart by them.

The second is found out by running a tiny model of the same architecture: what the code says is not what it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ModelError
from fsdp_shard.models.loading import build_on_meta, rebuild_buffers

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_LEARNED_POSITIONS = frozenset({"position_embeddings", "position_embedding", "embed_positions", "wpe"})

# The settings of transformers' configs that decide how large a model is, and what they are in a tiny one.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "index_n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "embed_dim")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size", "intermediate_dim", "lora_rank")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k", "moe_topk", "moe_k", "n_group")
_TINY_INNER, _TINY_VOCABULARY = 64, 97
_MOST_PARAMETERS = 150_000_000  # half a second to fill; a model that cannot be made smaller is refused

_FIRST, _SECOND = 7, 9  # tokens of the two documents
_ROUNDING = 1e-3  # of the largest logit: experts compute other tokens in one product with a document's
_FLASH_LIKE = "fsdp_shard_by_positions"  # transformers looks for kernels where a name has "flash" in it


def num_positions(model: PreTrainedModel) -> int | None:
    """Tokens that a model has learned positions for; None where it computes them, so that there is no end."""
    from torch import nn

    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    rooms = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _LEARNED_POSITIONS and isinstance(module, nn.Embedding):
            # RoBERTa counts from its padding token on, and OPT and BART leave room in front.
            padding = module.padding_idx
            front = int(getattr(module, "offset", 0)) if padding is None else padding + 1
            if limit in (module.num_embeddings, module.num_embeddings - front):  # or they are those of pictures
                rooms.append(module.num_embeddings - front)
    return min(rooms, default=None)


def check_packing(config: PretrainedConfig, attention: str = "sdpa") -> None:
    """Check that a model keeps documents apart that share a window and differ by positions that start again.

    A tiny model of the same architecture is run on a window of two documents, as training calls it. Flash attention is
    given no mask, so there each layer has to hand on the positions; a function that does as it does stands for it, and
    no GPU is needed.

    Args:
        config: The model's config; `architectures` names its class.
        attention: `sdpa`, `eager` or `flash_attention_2`.

    Raises:
        ModelError: One document changes the logits of the other, or no tiny model can be run.
    """
    import transformers

    name = next(iter(config.architectures or ()), config.model_type)
    cls = getattr(transformers, name, None)
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    others = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    instead = "data.packing=false for this model"
    if cls is None:
        reason = "its code is not part of transformers"
    elif "position_ids" not in inspect.signature(cls.forward).parameters:
        reason = "it takes no position_ids"
    elif others:
        reason = f"it has layers that are no attention ({', '.join(others)})"
    elif problem := _leak(config, "eager" if attention == "eager" else None):
        reason = problem
    elif attention == "flash_attention_2" and _leak(config, _flash_like()):
        reason, instead = (
            "flash attention is not told of positions there",
            "model.attention=sdpa, or data.packing=false",
        )
    else:
        return
    raise ModelError(f"{name} cannot keep documents that share a window apart, as {reason}; set {instead}.")


def _leak(config: PretrainedConfig, attention: str | None) -> str:
    """What is wrong with packed windows in models of `config`; empty when nothing is."""
    import torch

    reason = ""
    for num_heads in (1, 4, None):  # a few architectures want several heads, or a certain ratio of their widths
        try:
            with torch.random.fork_rng(devices=[]), _one_thread():
                is_apart = _keeps_apart(_tiny_model(config, attention, num_heads))
            return "" if is_apart else "what it attends to does not depend on positions"
        except Exception as error:  # whatever the code of an architecture raises for sizes that it does not expect
            text = " ".join(f"{type(error).__name__}: {error}".split())
            reason = reason or f"a tiny model of its kind, which would show it, does not run ({text})"
    return reason


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several would wait for each other at each of thousands of tiny operations, for seconds on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _keeps_apart(model: PreTrainedModel) -> bool:
    """Whether the second document of a window has the logits that it has alone, whatever the first one is."""
    import torch

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
    """A model on the CPU as `config` describes it but for its sizes, with random weights.

    All layers are there, as no list says for every architecture of which kind each is.
    """
    import torch
    from torch import nn

    small = type(config).from_dict(_shrunk(config.to_dict(), num_heads))
    model = build_on_meta(small, "float32", attention=attention)
    if sum(param.numel() for param in model.parameters()) > _MOST_PARAMETERS:
        raise ValueError("it would have too many parameters")
    generator = torch.Generator().manual_seed(0)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if param not in filled:
                    # Not as the architecture does, which may start with zeros that would hide what is looked for.
                    spread = param.shape[-1] ** -0.5 if param.ndim > 1 else 0.1
                    values = torch.empty(param.shape).normal_(0, spread, generator=generator)
                    values += param.ndim == 1 and name == "weight"  # of a norm
                    filled[param] = nn.Parameter(values, requires_grad=False)
                module._parameters[name] = filled[param]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.ones_like(buffer, device="cpu")
    rebuild_buffers(model, "cpu")
    return model


def _shrunk(values: Mapping[str, Any], num_heads: int | None, heads: int = 0) -> dict[str, Any]:
    """The settings of a config, or of a part of it, for a tiny model; `heads` are those of the whole."""
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
        if name.startswith("vocab_size"):
            return min(value, _TINY_VOCABULARY)
        if name.endswith(("token_id", "token_index")):
            return min(value, _TINY_VOCABULARY - 1)
        if name.endswith(_INNER):
            return min(value, _TINY_INNER)
        if name in _EXPERTS:
            return min(value, 2 * max(chosen, default=1))
        if num_heads is not None and heads > num_heads:
            if name in _HIDDEN:
                return -(-value * num_heads // heads // 8) * 8  # what products of several experts want
            if name in (*_HEADS, *_KEY_VALUE_HEADS):
                return num_heads if value >= heads else 1
        return value

    return {name: shrink(str(name), value) for name, value in values.items()}


def _flash_like() -> str:
    """The name of an attention function that sees what flash attention sees: no mask, and positions if it gets them."""
    from transformers import AttentionInterface

    AttentionInterface.register(_FLASH_LIKE, _attend_like_flash)
    return _FLASH_LIKE


def _attend_like_flash(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    import torch

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
