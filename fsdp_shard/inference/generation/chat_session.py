"""A conversation on the terminal: what is typed goes to the model through its template, the answer comes as it is made.

Ctrl-C ends an answer, and what there is of it stays in the conversation. Knows a decoder and two streams, no files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from fsdp_shard.distributed import noting_ctrl_c
from fsdp_shard.inference.generation.tokenize_prompts import Message, chat_ids, context

if TYPE_CHECKING:
    from fsdp_shard.inference.generation.decoder import Decoder
    from fsdp_shard.inference.generation.prefix_cache import Turns

HELP = "/quit ends the conversation, /new begins another; Ctrl-C stops an answer"


def converse(decoder: Decoder, ask: Callable[[str], str], say: Callable[[str], object], seed: int = 0) -> int:
    """Talk until `ask` (as `input`) raises EOFError or gives /quit; returns the number of answers.

    What is drawn for an answer depends on `seed` and on how many were given before.
    """
    import torch

    from fsdp_shard.inference.generation.prefix_cache import Turns

    say(f"{HELP}\n")
    messages: list[Message] = []
    turns = Turns()
    num_answers = 0
    while True:
        try:
            text = ask("> ").strip()
        except KeyboardInterrupt:
            say(f"\n{HELP}\n")
            continue
        except EOFError:
            say("\n")
            return num_answers
        if text == "/quit":
            return num_answers
        if text == "/new":
            messages = []
        elif text.startswith("/"):
            say(f"there is no {text.split()[0]}; {HELP}\n")
        elif text:
            messages.append({"role": "user", "content": text})
            torch.manual_seed((seed * 1_000_003 + num_answers) % 2**63)
            if (answer := _answer(decoder, messages, turns, say)) is None:
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})
            num_answers += 1


def _answer(decoder: Decoder, messages: list[Message], turns: Turns, say: Callable[[str], object]) -> str | None:
    """The answer, or what there was of it at Ctrl-C; None where the question is too long."""
    parts: list[str] = []

    def hear(text: str) -> None:
        parts.append(text)
        say(text)

    with noting_ctrl_c() as is_stopped:
        with suppress(KeyboardInterrupt):  # the second: a token may take long
            if (ids := _fitting(decoder, messages, say)) is None:
                return None
            decoder.run([ids], hear, turns, is_stopped)
        if is_stopped():
            say(" [stopped]")
    say("\n")
    return "".join(parts).strip()


def _fitting(decoder: Decoder, messages: list[Message], say: Callable[[str], object]) -> list[int] | None:
    """The tokens of the conversation; its oldest turns are forgotten where the model's context has no room for them."""
    room = context(decoder.model.config)
    while True:
        ids = chat_ids(decoder.tokenizer, messages)
        over = 0 if room is None else len(ids) + decoder.settings.max_new_tokens - room
        if over <= 0:
            return ids
        if len(messages) == 1:
            say(f"That is {over} tokens more than the model's context of {room} has room for; shorten it.\n")
            return None
        del messages[:2]
        say("[the oldest turn is forgotten: the model's context is full]\n")
