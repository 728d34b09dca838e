"""Prompts and conversations to token ids that leave room for an answer. Knows tokenizers and configs, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import DataError, ModelError
from fsdp_shard.inference.generation.prompts import Prompt
from fsdp_shard.models import check_causal

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Message = dict[str, str]


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
    and ModelError when the model has no chat template or does not generate text.
    """
    check_generates(config)
    if chat:
        check_chat(tokenizer)
    room = context(config)
    encoded = []
    for prompt in prompts:
        message = {"role": "user", "content": prompt.text}
        ids = chat_ids(tokenizer, [message]) if chat else list(tokenizer(prompt.text)["input_ids"])
        if not ids:
            raise DataError(f"{prompt.place} has no tokens that the model knows; give other text.")
        # An encoder reads the prompt and a decoder writes the answer: each has the whole context for it.
        taken = 0 if config.is_encoder_decoder else max_new_tokens
        if room is not None and max(len(ids) + taken, max_new_tokens) > room:
            fewer = room if config.is_encoder_decoder else room - len(ids)
            advice = f", or generate at most {fewer}" if 0 < fewer < max_new_tokens else ""
            raise DataError(
                f"{prompt.place} has {len(ids)} tokens, which with generation.max_new_tokens={max_new_tokens} exceeds "
                f"the model's context of {room}; shorten it{advice}."
            )
        encoded.append(ids)
    return encoded


def check_generates(config: PretrainedConfig) -> None:
    """Raise ModelError unless the model that `config` names goes on from text, decoder-only or encoder-decoder."""
    import transformers

    if not config.is_encoder_decoder:
        check_causal(config)
        return
    known = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if known is not None and not (known.can_generate() and known.main_input_name == "input_ids"):
        raise ModelError(f"The model is a {known.__name__}, which does not generate text from text.")


def check_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError unless the model says how it wants a conversation written."""
    if tokenizer.chat_template is None:
        raise ModelError("chat=true needs a chat template, and this model's tokenizer has none; leave chat out.")


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """The conversation through the model's template, up to where its answer begins."""
    ids: Any = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    return list(ids)


def context(config: PretrainedConfig) -> int | None:
    """Tokens that the model can look at, where it has a limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
