"""A tokenizer of bytes: one token a byte, 256 ends a text, so that every expected token can be written down."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 256


def byte_tokenizer(end: str | None = "<|end|>") -> PreTrainedTokenizerFast:
    """Bytes are their own ids; `end` is id 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))  # GPT-2's table of bytes to characters
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def predicted_texts(example: Any, tokenizer: Any) -> list[str]:
    """The stretches of an example's text that are predicted, each as it is written."""
    runs = groupby(zip(example.ids, example.predicted, strict=True), lambda pair: bool(pair[1]))
    return [tokenizer.decode([token for token, _ in run]) for predicted, run in runs if predicted]


def positions_of_rank(first: int, count: int, rank: int, num_ranks: int) -> range:
    """The positions of a rank in a global batch, in micro-batches of one sample."""
    return range(first + rank, first + count, num_ranks)
