"""Rows in which two answers share their prompt: their masks, and a check that a model computes such rows correctly.

A row consists of several pairs, each as prompt, chosen answer and rejected answer. The rejected answer must attend to
the prompt and to itself, as if the chosen answer were absent, and its positions continue from the prompt. transformers
uses a four-dimensional mask unchanged, or one for each type of layer if these differ. Here it makes the masks for a
single text (`create_masks_for_generate`). They are then indexed by token positions, so a sliding window counts only
tokens of the answer's own text.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from fsdp_shard.errors import ModelError
from fsdp_shard.models.loading import attention_implementations, named_class
from fsdp_shard.models.packing_check import try_tiny_model, why_unsuitable

Masks: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"
_LayerMasks: TypeAlias = dict[str, torch.Tensor | None]

_LOWEST = torch.finfo(torch.bfloat16).min  # added to the scores of other tokens; a number or -inf in every dtype
_LARGEST_TOKEN = 90  # in the texts of the trial
_ROUNDING = 1e-3  # relative to the largest value: experts multiply tokens of several texts at once
# Parts of the names of settings that make layers treat distant tokens differently, and their value in a tiny model.
_LIMITS, _TINY_LIMIT = ("window", "chunk", "local_attention", "floor_scale", "index_topk", "index_block"), 4

_known: WeakKeyDictionary[nn.Module, dict[tuple[int, torch.device], _LayerMasks]] = WeakKeyDictionary()


def shared_prompt_masks(
    model: PreTrainedModel, segments: torch.Tensor, prompts: torch.Tensor, positions: torch.Tensor
) -> Masks:
    """Return the `attention_mask` of rows whose answers share prompts.

    Args:
        model: The model.
        segments: The number of the prompt or answer that each token belongs to, int64 [num_rows, length].
        prompts: The number of the prompt that each token also attends to, such as its own, int64 [num_rows, length].
        positions: The position of each token in its text, int64 [num_rows, length].

    Returns:
        Bool [num_rows, 1, length, length], true where a query may attend to a key; for eager attention the float32
        values to add to the scores. If the types of layers differ, a mask for each type by its name in the config.
    """
    length, keys = segments.shape[1], segments[:, None, None, :]
    allowed = (segments[:, None, :, None] == keys) | (prompts[:, None, :, None] == keys)
    allowed &= torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    is_added = attention_implementations(model) == ["eager"]

    def finished(of_layers: torch.Tensor | None) -> torch.Tensor:
        mask = allowed
        if of_layers is not None:
            mask = mask & of_layers[positions[:, None, :, None], positions[:, None, None, :]]
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, _LOWEST) if is_added else mask

    found = {name: finished(mask) for name, mask in _layer_masks(model, length, segments.device).items()}
    return found.get("", found)


def _layer_masks(model: PreTrainedModel, length: int, device: torch.device) -> _LayerMasks:
    """The masks of a single text, bool [length, length] by type of layer; None if all preceding tokens count.

    There is only one mask, named "", if no layer has a window that is shorter than the text.
    """
    known = _known.setdefault(model, {})
    if (length, device) not in known:
        # sdpa needs no mask where torch's flag for a causal one is enough.
        config = type(model.config).from_dict(model.config.to_dict(), attn_implementation="sdpa")
        embeddings = torch.empty(1, length, 1)
        made: Any = create_masks_for_generate(config, embeddings, None, None)
        by_type: dict[str, Any] = made if isinstance(made, dict) else {"": made}
        masks: _LayerMasks = {name: None if mask is None else mask[0, 0].to(device) for name, mask in by_type.items()}
        known[length, device] = masks if any(mask is not None for mask in masks.values()) else {"": None}
    return known[length, device]


@contextmanager
def head_returns_answer_scores(model: PreTrainedModel, ends: torch.Tensor) -> Iterator[None]:
    """Within the block, a classifier returns the scores of some tokens as its `logits`, [num_rows, num_tokens].

    It takes the output of its head at one token of each row; here that is the same for all rows and tokens.

    Args:
        model: The classifier, with one output.
        ends: Positions in the flat tokens of the batch, int64 [num_tokens].

    Raises:
        ModelError: Its head is not one module, or not applied to each token.
    """

    def gather(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        if output.ndim != 3:
            raise ModelError(f"{type(model).__name__} does not apply its head to each token.")
        scores = output.flatten()[ends]
        return scores.expand(*output.shape[:2], len(scores))

    hook = _score_head(model).register_forward_hook(gather)
    try:
        yield
    finally:
        hook.remove()


def _score_head(model: PreTrainedModel) -> nn.Module:
    """Return the module of a classifier that follows its base model."""
    base = model.base_model_prefix
    heads = [child for name, child in model.named_children() if name != base and not isinstance(child, nn.Dropout)]
    if len(heads) != 1:
        raise ModelError(f"{type(model).__name__} has {len(heads)} modules after its base model, and not one head.")
    return heads[0]


def check_shared_prompts(config: PretrainedConfig, attention: str, sequence_length: int) -> None:
    """Check that a model computes answers that share a prompt as it computes each of them alone.

    The check runs a tiny model of the same architecture on both. Its attention windows and similar limits are shorter
    than its texts, if those of the model are shorter than its rows.

    Args:
        config: The model's config; `architectures` names its class.
        attention: The setting `model.attention`.
        sequence_length: Number of tokens in a row.

    Raises:
        ModelError: The results differ, or no tiny model can be run.
    """
    instead, reason = "data.packing=false for this model", why_unsuitable(config, ("position_ids", "attention_mask"))
    if not reason and attention == "flash_attention_2":
        reason, instead = "flash attention takes no masks", "model.attention=sdpa, or data.packing=false"
    reason = reason or _problem(config, "eager" if attention == "eager" else None, sequence_length)
    if reason:
        name, _ = named_class(config)
        raise ModelError(f"{name} cannot compute the prompt of two answers once: {reason}. Set {instead}.")


def _problem(config: PretrainedConfig, attention: str | None, sequence_length: int) -> str:
    """Return why shared prompts are wrong in models of `config`; empty if they are right."""
    limited = type(config).from_dict(_with_limits(config.to_dict(), sequence_length))
    limited.architectures = config.architectures
    failure = (
        "a row with several pairs gives other results than each answer alone, so masks and positions do not decide"
    )
    return try_tiny_model(limited, attention, _is_same_as_alone, f"{failure} what its tokens depend on")


def _with_limits(values: Mapping[str, Any], sequence_length: int) -> dict[str, Any]:
    """Return the settings of a config, or of a part of it, with tiny windows where they are shorter than rows."""

    def limit(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _with_limits(value, sequence_length)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        is_limit = is_number and _TINY_LIMIT < value < sequence_length and any(part in name for part in _LIMITS)
        return _TINY_LIMIT if is_limit else value

    return {name: limit(str(name), value) for name, value in values.items()}


def _is_same_as_alone(model: PreTrainedModel) -> bool:
    """Return whether the answers of two rows have the same results as each answer alone after its prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = ((9, 8, 5), (1, 4, 7), (11, 3, 12))  # of prompt, chosen and rejected answer
    pairs = [[torch.randint(5, _LARGEST_TOKEN, (size,), generator=generator) for size in each] for each in lengths]
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    for part in (part for pair in pairs for part in pair):
        part[part == padding] = _LARGEST_TOKEN  # classifiers ignore padding
    rows = [_row(pairs[:2]), _row(pairs[2:])]
    width = max(row.shape[1] for row in rows)
    ids, segments, prompts, positions = torch.stack([F.pad(row, (0, width - row.shape[1])) for row in rows], dim=1)
    masks = shared_prompt_masks(model, segments, prompts, positions)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": masks, "position_ids": positions, "use_cache": False}
    numbers = [(row, 3 * pair + part) for row, pair in ((0, 0), (0, 1), (1, 0)) for part in (2, 3)]
    places = [torch.nonzero(segments[row] == number).flatten() + row * width for row, number in numbers]
    answers = [torch.cat([prompt, answer]) for prompt, *both in pairs for answer in both]
    with torch.no_grad():
        alone = [model(input_ids=text[None], use_cache=False).logits[0] for text in answers]
        if alone[0].ndim == 1:  # a classifier
            with head_returns_answer_scores(model, torch.stack([place[-1] for place in places])):
                packed = list(model(**given).logits[0, :, None])
        else:
            logits = model(**given).logits.flatten(0, 1)
            packed = [logits[place] for place in places]
            alone = [logits[-len(place) :] for logits, place in zip(alone, places, strict=True)]
    most = max(float(each.abs().max()) for each in alone)
    return all(
        one.shape == other.shape and float((one - other).abs().max()) <= _ROUNDING * most
        for one, other in zip(packed, alone, strict=True)
    )


def _row(pairs: list[list[torch.Tensor]]) -> torch.Tensor:
    """Return tokens, segments, prompts and positions of a row with these pairs, int64 [4, length]."""
    parts = []
    for number, pair in enumerate(pairs):
        prompt = 3 * number + 1
        for part, ids in enumerate(pair):
            first = len(pair[0]) if part else 0
            own, its_prompt = torch.full_like(ids, prompt + part), torch.full_like(ids, prompt)
            parts.append(torch.stack([ids, own, its_prompt, torch.arange(first, first + len(ids))]))
    return torch.cat(parts, dim=1)
