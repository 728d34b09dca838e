"""Completes a few prompts with the model in training, to show its text besides its loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fsdp_shard.data import encode_prompts
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import ContextLength, continued_text, end_tokens, kv_cache_of, until_end
from fsdp_shard.sharding import ShardedModel
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.loss.custom_functions import SamplesFunction
from fsdp_shard.training.loss.forward_loss import forward_pass
from fsdp_shard.utils import no_cudnn_attention


def sample_completions(
    config: FinetuneSettings, open_tokenizer: Callable[[], PreTrainedTokenizerBase], context: DistributedContext
) -> SamplesFunction | None:
    """Return the function for `run.functions.samples` that completes `train.sample_prompts` greedily; None without any.

    Args:
        config: The settings of the run; `data.kind` determines how a prompt is written.
        open_tokenizer: Opens the model's tokenizer.
        context: The ranks, over which the prompts are divided.
    """
    texts, num_new = config.train.sample_prompts, config.train.sample_tokens
    if not texts:
        return None
    tokenizer = open_tokenizer()
    prompts = encode_prompts(config.data, texts, tokenizer)

    def samples(model: ShardedModel) -> list[tuple[str, str]]:
        ends = end_tokens(model.module, tokenizer)
        answers = complete_greedily(model, prompts, num_new, ends, context)
        return [
            (text, continued_text(tokenizer, prompt, answer))
            for text, prompt, answer in zip(texts, prompts, answers, strict=True)
        ]

    return samples


def check_samples(config: FinetuneSettings, tokenizer: PreTrainedTokenizerBase, context_length: ContextLength) -> None:
    """Raise ConfigError or DataError if `data.kind` cannot write a prompt, or no room is left for its completion.

    Args:
        config: The settings of the run.
        tokenizer: The tokenizer of the model.
        context_length: The context length of the model.
    """
    num_new = config.train.sample_tokens
    encoded = encode_prompts(config.data, config.train.sample_prompts, tokenizer)
    for number, ids in enumerate(encoded):
        if context_length.length is not None and len(ids) + num_new > context_length.length:
            raise ConfigError(
                f"train.sample_prompts[{number}] has {len(ids)} tokens, which with train.sample_tokens={num_new} "
                f"exceeds the model's context of {context_length.length} tokens; shorten it, or lower "
                f"train.sample_tokens."
            )


def complete_greedily(
    model: ShardedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Collection[int],
    context: DistributedContext,
) -> list[list[int]]:
    """Complete each prompt with the most likely tokens, up to the first of `ends`; a collective.

    Each forward pass calls the wrapped module, as in training. transformers' `generate` would call the inner module,
    without the parameters that FSDP1 gathers for the root.

    Args:
        model: The model, in eval mode.
        prompts: Token ids, at least one for each prompt.
        max_new_tokens: Maximum number of new tokens.
        ends: Tokens that end a completion; the first one generated is part of it.
        context: The ranks; tensor-parallel ranks work on the same prompt.

    Returns:
        The new tokens of each prompt, on all ranks.
    """
    answers: dict[int, list[int]] = {}
    for first in range(0, len(prompts), context.num_data_ranks):
        # Every rank makes the same number of forward passes; ranks without a prompt repeat the last one.
        own = min(first + context.data_rank, len(prompts) - 1)
        new = _continue(model, prompts[own], max_new_tokens, context.device)
        for number, ids in context.all_gather_object((own, new)):
            answers[number] = ids
    return [until_end(answers[number], ends) for number in range(len(prompts))]


def _continue(model: ShardedModel, prompt: Sequence[int], count: int, device: torch.device) -> list[int]:
    """Return exactly `count` tokens after `prompt`, because other ranks wait for each forward pass."""
    ids = torch.tensor([list(prompt)], device=device)  # [1, length]
    next_ids, cache = ids, dict[str, Any]()
    # Otherwise, each length would be compiled again.
    with torch.compiler.set_stance("force_eager"), forward_pass(model.module), no_cudnn_attention():
        for _ in range(count):
            output = model.module(input_ids=next_ids, **cache, use_cache=True)
            new = output.logits[:, -1].argmax(-1, keepdim=True)  # [1, 1]
            ids = torch.cat([ids, new], 1)
            cache = kv_cache_of(output)
            next_ids = new if cache else ids  # some recurrent models return their state otherwise
    return [int(token) for token in ids[0, len(prompt) :].tolist()]
