"""Prompts to completions with transformers' `generate`, in batches, and how long that took."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from fsdp_shard.errors import DataError, ModelError
from fsdp_shard.inference.base import GenerationSettings
from fsdp_shard.inference.prompts import Completion, Prompt
from fsdp_shard.models import check_causal

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Figures:
    """Seconds until the first token of the first batch, seconds of all batches, and how many tokens they gave."""

    first_token_seconds: float | None = None
    seconds: float = 0.0
    num_new_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.num_new_tokens / self.seconds if self.seconds else 0.0


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: PretrainedConfig,
    max_new_tokens: int,
    *,
    chat: bool = False,
) -> list[list[int]]:
    """Token ids of each prompt; with `chat`, of a conversation in which it is what the user said.

    Raises DataError for a prompt that leaves no room for `max_new_tokens` in the model's context, or has no tokens,
    and ModelError when the model has no chat template or does not predict the next token.
    """
    check_causal(config)
    if chat and tokenizer.chat_template is None:
        raise ModelError("chat=true needs a chat template, and this model's tokenizer has none; leave chat out.")
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    encoded = []
    for prompt in prompts:
        ids = _chat_ids(tokenizer, prompt.text) if chat else list(tokenizer(prompt.text)["input_ids"])
        if not ids:
            raise DataError(f"{prompt.place} has no tokens that the model knows; give other text.")
        if room is not None and len(ids) + max_new_tokens > room:
            raise DataError(
                f"{prompt.place} has {len(ids)} tokens, which with generation.max_new_tokens={max_new_tokens} exceeds "
                f"the model's context of {room}; shorten it, or generate at most {max(room - len(ids), 0)}."
            )
        encoded.append(ids)
    return encoded


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    settings: GenerationSettings,
    figures: Figures,
) -> Iterator[Completion]:
    """A completion for each prompt, in their order; `figures` is brought up to date with every batch."""
    config = generation_config(model, tokenizer, settings)
    for first in range(0, len(prompts), settings.batch_size):
        batch = list(encoded[first : first + settings.batch_size])
        start = time.perf_counter()
        rows = _generate(model, batch, config, _Watch(figures, start))
        figures.seconds += time.perf_counter() - start
        for prompt, new in zip(prompts[first:], rows, strict=False):
            figures.num_new_tokens += len(new)
            yield Completion(prompt.text, str(tokenizer.decode(new, skip_special_tokens=True)), len(new))


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings
) -> GenerationConfig:
    """The model's own generation config with `settings` in it; what only sampling looks at is unset without it."""
    config = copy.deepcopy(model.generation_config)
    assert config is not None, "encode refuses models that cannot generate"
    config.max_new_tokens, config.max_length, config.do_sample = settings.max_new_tokens, None, settings.do_sample
    for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
        value = getattr(settings, name)
        if value is not None:
            setattr(config, name, value)
        elif not settings.do_sample and name != "repetition_penalty":
            setattr(config, name, None)
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        config.pad_token_id = next((t for t in (tokenizer.pad_token_id, *_end_tokens(config)) if t is not None), 0)
    return config


def _generate(
    model: PreTrainedModel, batch: Sequence[Sequence[int]], config: GenerationConfig, watch: _Watch
) -> list[list[int]]:
    """New tokens of each row of `batch`, up to and including the first end-of-text token."""
    length = max(map(len, batch))
    ids = torch.full((len(batch), length), int(config.pad_token_id or 0))
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(batch):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    generate: Any = model.generate
    output = generate(
        input_ids=ids, attention_mask=mask, generation_config=config, stopping_criteria=StoppingCriteriaList([watch])
    )
    ends = set(_end_tokens(config))
    return [_until_end(row, ends) for row in output[:, length:].tolist()]


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


def _end_tokens(config: GenerationConfig) -> list[int]:
    ends: Any = config.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]


def _chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(ids)


class _Watch(StoppingCriteria):
    """Stops nothing; notes when the first token of all was there."""

    def __init__(self, figures: Figures, start: float) -> None:
        self._figures, self._start = figures, start

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self._figures.first_token_seconds is None:
            self._figures.first_token_seconds = time.perf_counter() - self._start
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
