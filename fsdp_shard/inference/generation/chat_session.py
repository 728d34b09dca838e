"""A conversation on the terminal: each message goes through the chat template, and answers appear as they are
generated.

Ctrl-C stops an answer; the part generated so far stays in the conversation.
"""

from collections.abc import Callable
from contextlib import suppress

from fsdp_shard.distributed import noting_ctrl_c
from fsdp_shard.inference.generation.decoder import Decoder, seed_draws
from fsdp_shard.inference.generation.prefix_cache import PrefixCache
from fsdp_shard.inference.generation.tokenize_prompts import Message, apply_chat_template, beginning_of_chat

HELP = "/quit ends the conversation, /new starts another; Ctrl-C stops an answer"

Write = Callable[[str], object]


def converse(
    decoder: Decoder,
    ask: Callable[[str], str],
    write: Write,
    limit: int | None = None,
    seed: int = 0,
    system: str | None = None,
) -> int:
    """Hold a conversation until end of input or /quit.

    Args:
        decoder: Generates the answers.
        ask: Returns the user's next line, like `input`; raises EOFError at the end.
        write: Called with text to display.
        limit: The model's context in tokens, beyond which the oldest turns are dropped; None for no limit.
        seed: Seed of sampling; the draws of an answer depend on it and on the number of earlier answers.
        system: The system message.

    Returns:
        The number of answers.
    """
    write(f"{HELP}\n")
    messages = beginning_of_chat(system)
    cache = PrefixCache()
    num_answers = 0
    while True:
        try:
            text = ask("> ").strip()
        except KeyboardInterrupt:
            write(f"\n{HELP}\n")
            continue
        except EOFError:
            write("\n")
            return num_answers
        if text == "/quit":
            return num_answers
        if text == "/new":
            messages = beginning_of_chat(system)
        elif text.startswith("/"):
            write(f"unknown command {text.split()[0]}; {HELP}\n")
        elif text:
            messages.append({"role": "user", "content": text})
            seed_draws(seed, num_answers)
            if (answer := _answer(decoder, messages, cache, write, limit)) is None:
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})
            num_answers += 1


def _answer(
    decoder: Decoder, messages: list[Message], cache: PrefixCache, write: Write, limit: int | None
) -> str | None:
    """Return the answer, or its part generated before Ctrl-C; None if the question is too long."""
    parts: list[str] = []

    def on_text(text: str) -> None:
        parts.append(text)
        write(text)

    with noting_ctrl_c() as is_stopped:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C, because a token may take long
            if (ids := _fitting(decoder, messages, write, limit)) is None:
                return None
            decoder.run([ids], on_text, cache, is_stopped)
        if is_stopped():
            write(" [stopped]")
    write("\n")
    return "".join(parts).strip()


def _fitting(decoder: Decoder, messages: list[Message], write: Write, limit: int | None) -> list[int] | None:
    """Return the conversation's tokens, without the oldest turns if the context cannot hold all; None if none fit."""
    while True:
        ids = apply_chat_template(decoder.tokenizer, messages)
        excess = 0 if limit is None else len(ids) + decoder.settings.max_new_tokens - limit
        if excess <= 0:
            return ids
        first = 1 if messages[0]["role"] == "system" else 0
        if len(messages) == first + 1:
            write(f"The message exceeds the model's context of {limit} tokens by {excess}; shorten it.\n")
            return None
        del messages[first : first + 2]
        write("[the oldest turn was dropped: the model's context is full]\n")
