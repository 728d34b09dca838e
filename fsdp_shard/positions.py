"""Where a model's tokens are: how many it has places for, and whether it keeps documents apart by them.

Read from its config and from transformers' source of it; nothing is computed.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from fsdp_shard.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LEARNED_POSITIONS = frozenset({"position_embeddings", "position_embedding", "embed_positions", "wpe"})
# What makes a causal mask in a model's source (the last is a name for one of the two), and what computes attention.
_MASKS = frozenset({"create_causal_mask", "create_sliding_window_causal_mask", "mask_function"})
_ATTENTION = frozenset({"attention_interface", "_flash_attention_forward"})


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
    """Raise ModelError unless the model that `config` names can keep apart several documents in one window.

    It can when it takes positions and makes its masks by transformers' functions, which see from the positions where a
    document begins, and every layer is attention: a recurrent or convolutional one runs on. Flash attention gets no
    mask, and has to be given the positions.
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
    elif getattr(cls, "_is_stateful", False) or others:
        reason = f"it has layers that are no attention ({', '.join(others) or 'recurrent ones'})"
    elif not _masks_by_position(source := _source(sys.modules[cls.__module__])):
        reason = "its attention mask does not depend on positions"
    elif attention == "flash_attention_2" and not _attends_by_position(source):
        reason, instead = (
            "flash attention is not told of positions there",
            "model.attention=sdpa, or data.packing=false",
        )
    else:
        return
    raise ModelError(f"{name} cannot keep documents that share a window apart, as {reason}; set {instead}.")


def _source(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _masks_by_position(source: ast.Module) -> bool:
    """Whether all calls that make a causal mask hand on the positions, and there is one."""
    calls = [_keywords(call) for call in _calls(source, _MASKS)]
    return bool(calls) and all(names & {"position_ids", None} for names in calls)  # None: **kwargs


def _attends_by_position(source: ast.Module) -> bool:
    """Whether positions are given to all layers, and by each to what computes attention."""
    functions = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    given = [
        "position_ids" in names or (None in names and "position_ids" not in _parameters(function))
        for function in functions
        for names in map(_keywords, _calls(function, _ATTENTION))
    ]
    loops = [node for node in ast.walk(source) if isinstance(node, ast.For)]
    layers = [
        "position_ids" in _keywords(call)
        for loop in loops
        for call in _calls(loop, {name.id for name in ast.walk(loop.target) if isinstance(name, ast.Name)})
    ]
    return bool(given) and all(given) and any(layers)


def _calls(source: ast.AST, names: frozenset[str] | set[str]) -> Iterator[ast.Call]:
    """The calls of functions of these names."""
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


def _keywords(call: ast.Call) -> set[str | None]:
    """What is given by name; None stands for **kwargs."""
    return {keyword.arg for keyword in call.keywords}


def _parameters(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
