"""Tokenizes prompts and conversations, and compares their lengths, with answers, with the model's context."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from fsdp_shard.data import render_conversation
from fsdp_shard.errors import DataError, ModelError
from fsdp_shard.inference.generation.prompts import Prompt
from fsdp_shard.models import ContextLength, check_causal, check_vocabulary, model_errors, tokenizer_files
from fsdp_shard.utils import run_limited

R = TypeVar("R")
Message = dict[str, str]

_PROBE = "4815162342"  # in the place of a message, to see whether a template writes it
_BYTES_OF_A_TEXT = 1024  # even a short text takes time to render


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: PretrainedConfig,
    *,
    chat: bool = False,
    system: str | None = None,
) -> list[list[int]]:
    """Tokenize each prompt.

    Args:
        tokenizer: The model's tokenizer.
        prompts: The prompts.
        config: The model's config.
        chat: Format each prompt with the chat template, as a user message or as the conversation it is.
        system: The system message before each prompt.

    Returns:
        Token ids of each prompt.

    Raises:
        DataError: A prompt has no tokens, or the chat template rejects a conversation.
        ModelError: The model does not generate text, has no chat template for `chat`, or its tokenizer or chat template
            takes too much time or memory.
    """
    check_generates(config)
    files = tokenizer_files(tokenizer)
    if chat and tokenizer.chat_template is None:
        raise ModelError(
            f"chat=true needs a chat template, and the tokenizer {files} has none; give a file with one in "
            f"chat_template=FILE, or remove chat=true."
        )

    def encode() -> list[list[int]]:
        if chat:
            return [_chat_ids(tokenizer, prompt, system) for prompt in prompts]
        closing = 0 if config.is_encoder_decoder else _num_closing(tokenizer)
        return [_without_closing(tokenizer(prompt.text)["input_ids"], closing) for prompt in prompts]

    encoded = _limited(tokenizer, encode, [json.dumps(prompt.conversation or prompt.text) for prompt in prompts])
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise DataError(f"{prompt.location} has no tokens that the tokenizer {files} knows; give other text.")
        check_vocabulary(ids, config)
    return encoded


def _chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, system: str | None) -> list[int]:
    if prompt.conversation is None:
        return _render(tokenizer, [*beginning_of_chat(system), {"role": "user", "content": prompt.text}])
    values = prompt.conversation if system is None else {**prompt.conversation, "system": system}
    text = render_conversation(values, prompt.location.removesuffix(","), tokenizer)
    if not _writes_last(tokenizer, values):
        raise DataError(
            f"{prompt.location} has a last message that the chat template of {tokenizer_files(tokenizer)} leaves out; "
            f"set chat_template to another one."
        )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _writes_last(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any]) -> bool:
    """Return whether the chat template writes the text of a conversation's last message, if it has one."""
    *earlier, last = values["messages"]
    name = "content" if "content" in last else "value"
    content: Any = _PROBE
    if isinstance(last.get(name), list):
        has_text = [isinstance(part, dict) and "text" in part for part in last[name]]
        content = [{**part, "text": _PROBE} if has else part for part, has in zip(last[name], has_text, strict=True)]
    probe = {**values, "messages": [*earlier, {**last, name: content}]}
    try:
        return _PROBE not in json.dumps(content) or _PROBE in render_conversation(probe, "the probe", tokenizer)
    except DataError:  # of a template that expects certain texts
        return True


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text for a decoder to continue; raises ModelError as `tokenize_prompts` does."""
    return _limited(tokenizer, lambda: _without_closing(tokenizer(text)["input_ids"], _num_closing(tokenizer)), [text])


def _num_closing(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of special tokens that the tokenizer adds after a text, like </s> or [SEP]: a decoder ends with them."""
    whole, text = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    added = len(whole) - len(text)
    return next((added - start for start in range(added + 1) if whole[start : start + len(text)] == text), 0)


def _without_closing(ids: Sequence[int], num_closing: int) -> list[int]:
    return list(ids[: len(ids) - num_closing])


def check_room(
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    max_new_tokens: int,
    context_length: ContextLength,
    *,
    has_encoder: bool = False,
) -> str | None:
    """Check that the longest prompt and its answer fit in the context.

    Args:
        prompts: The prompts.
        encoded: Their tokens.
        max_new_tokens: The most tokens of an answer.
        context_length: That of the model.
        has_encoder: An encoder reads the prompt and a decoder writes the answer: each has the whole context for it.

    Returns:
        A warning if the model was never trained on such positions.

    Raises:
        ConfigError: The model lacks such positions.
    """
    lengths = [len(ids) for ids in encoded]
    if not lengths:
        return None
    longest = max(lengths)
    prompt, limit = prompts[lengths.index(longest)], context_length.length or 0
    fewer = limit if has_encoder else limit - longest
    advice = f", or generate at most {fewer}" if 0 < fewer < max_new_tokens else ""
    what = f"{prompt.location} has {longest} tokens, which with generation.max_new_tokens={max_new_tokens}"
    total = max(longest, max_new_tokens) if has_encoder else longest + max_new_tokens
    return context_length.check(what, total, f"shorten it{advice}")


def check_generates(config: PretrainedConfig) -> None:
    """Raise ModelError unless the model generates text from text, as a decoder or an encoder-decoder."""
    if not config.is_encoder_decoder:
        check_causal(config)
        return
    known = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if known is not None and not (known.can_generate() and known.main_input_name == "input_ids"):
        raise ModelError(f"The model is a {known.__name__}, which does not generate text from text.")


def beginning_of_chat(system: str | None) -> list[Message]:
    """The messages at the start of each conversation."""
    return [] if system is None else [{"role": "system", "content": system}]


def apply_chat_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to the model's answer; raises ModelError as `tokenize_prompts` does."""
    return _limited(tokenizer, lambda: _render(tokenizer, messages), [message["content"] for message in messages])


def _limited(tokenizer: PreTrainedTokenizerBase, encode: Callable[[], R], texts: Sequence[str]) -> R:
    """Return `encode()`, run in a process that is ended if it needs too many resources for these texts."""
    num_bytes = sum(_BYTES_OF_A_TEXT + len(text) for text in texts)
    return run_limited(encode, f"tokenizing with {tokenizer.name_or_path}", num_bytes, error=ModelError)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Return the tokens of a conversation; templates of models for images may expect contents in parts."""
    files = tokenizer_files(tokenizer)

    def render(contents: Sequence[str], *, in_parts: bool) -> str:
        forms = [[{"type": "text", "text": content}] if in_parts else content for content in contents]
        given: Any = [{**message, "content": form} for message, form in zip(messages, forms, strict=True)]
        with model_errors(f"The chat template of {files} fails"):
            return str(tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False))

    contents = [message["content"] for message in messages]
    for in_parts in (False, True):
        if _PROBE in render([*contents[:-1], _PROBE], in_parts=in_parts):
            return list(tokenizer(render(contents, in_parts=in_parts), add_special_tokens=False)["input_ids"])
    raise ModelError(
        f"The chat template of {files} leaves out the text of a user's message; set chat_template to another one."
    )
