"""Turns prompts and conversations into token ids that leave room for an answer in the model's context."""

from collections.abc import Sequence
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from fsdp_shard.errors import DataError, ModelError
from fsdp_shard.inference.generation.prompts import Prompt
from fsdp_shard.models import check_causal

Message = dict[str, str]


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: PretrainedConfig,
    max_new_tokens: int,
    *,
    chat: bool = False,
) -> list[list[int]]:
    """Tokenize each prompt.

    Args:
        tokenizer: The model's tokenizer.
        prompts: The prompts.
        config: The model's config, whose context length is the limit.
        max_new_tokens: Tokens to leave room for.
        chat: Put each prompt through the chat template, as a user's message.

    Returns:
        Token ids of each prompt.

    Raises:
        DataError: A prompt has no tokens, or leaves no room for `max_new_tokens`.
        ModelError: The model does not generate text, or has no chat template for `chat`.
    """
    check_generates(config)
    if chat and tokenizer.chat_template is None:
        raise ModelError("chat=true needs a chat template, and this model's tokenizer has none; remove chat=true.")
    limit = context_length(config)
    encoded = []
    for prompt in prompts:
        message = {"role": "user", "content": prompt.text}
        ids = apply_chat_template(tokenizer, [message]) if chat else list(tokenizer(prompt.text)["input_ids"])
        if not ids:
            raise DataError(f"{prompt.location} has no tokens that the model knows; give other text.")
        # An encoder reads the prompt and a decoder writes the answer: each has the whole context for it.
        reserved = 0 if config.is_encoder_decoder else max_new_tokens
        if limit is not None and max(len(ids) + reserved, max_new_tokens) > limit:
            fewer = limit if config.is_encoder_decoder else limit - len(ids)
            advice = f", or generate at most {fewer}" if 0 < fewer < max_new_tokens else ""
            raise DataError(
                f"{prompt.location} has {len(ids)} tokens, which with generation.max_new_tokens={max_new_tokens} "
                f"exceeds the model's context of {limit}; shorten it{advice}."
            )
        encoded.append(ids)
    return encoded


def check_generates(config: PretrainedConfig) -> None:
    """Raise ModelError unless the model generates text from text, as a decoder or an encoder-decoder."""
    if not config.is_encoder_decoder:
        check_causal(config)
        return
    known = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if known is not None and not (known.can_generate() and known.main_input_name == "input_ids"):
        raise ModelError(f"The model is a {known.__name__}, which does not generate text from text.")


def apply_chat_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to where the model's answer begins."""
    ids: Any = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    return list(ids)


def context_length(config: PretrainedConfig) -> int | None:
    """Tokens that the model can attend to; None if there is no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
