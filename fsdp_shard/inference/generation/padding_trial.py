"""Tests with a tiny model of the same architecture whether padding before a prompt changes its answer.

Models receive a mask with padded prompts. Some ignore it where they number positions, or have layers that mix tokens
by means other than attention, and no config reports this.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel

from fsdp_shard.models import frequency_limit, is_stateful, try_tiny_model

_LENGTH, _PADDING, _NEW = 5, 7, 4  # tokens of a prompt, before it, and after it
_LARGEST_TOKEN = 92
_ROUNDING = 1e-3  # relative to the largest logit; experts multiply tokens of several texts at once


def reads_padding(
    model: PreTrainedModel,
    config: GenerationConfig,
    pad: int,
    batches: Sequence[Sequence[int]],
    log: Callable[[str], object] = print,
) -> bool:
    """Return whether answers depend on the padding of their batch, so that each batch must have one length.

    Args:
        model: The model; it is not run.
        config: How it generates.
        pad: The token that fills up shorter prompts.
        batches: The lengths of the prompts of each batch. A model is tried only if those of one batch differ: that
            takes up to a second, of models of many layers three.
        log: Called with a warning if no tiny model runs.

    Returns:
        Whether they do, or may, because no tiny model runs; False for encoder-decoder models, which are padded at the
        end.
    """
    if is_stateful(model):
        return True
    if all(len(set(lengths)) == 1 for lengths in batches) or model.config.is_encoder_decoder:
        return False
    if _counts_padding(config, pad) or _changes_frequencies(model, config, batches):
        return True
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if any("linear" in kind for kind in kinds):  # MiniMax's have a state, which a trial with many layers misses
        return True
    differs = "padding changes the answers"
    found = try_tiny_model(model.config, None, partial(_ignores_padding, pad=pad), differs)
    if found not in ("", differs):
        log(
            f"warning: {type(model).__name__} generates in batches of prompts of equal length, because it is unknown "
            f"whether padding changes its answers: {found}"
        )
    return bool(found)


def _changes_frequencies(model: PreTrainedModel, config: GenerationConfig, batches: Sequence[Sequence[int]]) -> bool:
    """Return whether a long text changes the rotary frequencies of shorter ones in its batch."""
    limit = frequency_limit(model.config)
    longest = max(max(lengths) for lengths in batches if len(set(lengths)) > 1)
    return limit is not None and longest + (config.max_new_tokens or 0) > limit


def _counts_padding(config: GenerationConfig, pad: int) -> bool:
    """Return whether a decoding option takes the padding before a prompt for a part of it."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    penalties = [config.encoder_repetition_penalty]  # the padding is often the token that ends a text
    if Version(transformers.__version__) < Version("5.23"):
        penalties.append(config.repetition_penalty)
    # Of longer ones, a token that ends a text is never a part but the last.
    longest = 1 if pad in ends else math.inf
    return (
        any(penalty not in (None, 1.0) for penalty in penalties)
        or 0 < (config.no_repeat_ngram_size or 0) <= longest
        or 0 < (config.encoder_no_repeat_ngram_size or 0) <= longest
        or bool(config.min_length)
        or config.forced_bos_token_id is not None
        or config.watermarking_config is not None
    )


def _ignores_padding(model: PreTrainedModel, pad: int) -> bool:
    """Return whether a prompt with padding before it has the same logits as alone, including those that follow."""
    pad = min(pad, int(model.config.get_text_config().vocab_size) - 1)
    ids = torch.randint(5, _LARGEST_TOKEN, (1, _LENGTH), generator=torch.Generator().manual_seed(1))
    ids[ids == pad] = _LARGEST_TOKEN
    padded = torch.nn.functional.pad(ids, (_PADDING, 0), value=pad)
    mask = torch.ones_like(padded)
    mask[:, :_PADDING] = 0
    model.generation_config = GenerationConfig(pad_token_id=pad, max_new_tokens=_NEW)
    method: Any = model.generate
    generate = partial(method, do_sample=False, return_dict_in_generate=True, output_logits=True)
    alone = torch.stack(generate(input_ids=ids, attention_mask=mask[:, _PADDING:]).logits)
    filled = torch.stack(generate(input_ids=padded, attention_mask=mask).logits)
    return float((alone - filled).abs().max()) <= _ROUNDING * float(alone.abs().max())
