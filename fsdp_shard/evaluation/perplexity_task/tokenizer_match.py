"""Checks that two models read the same tokens, without which losses per token are not comparable."""

import json
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_shard.checkpoint import Location
from fsdp_shard.data import MapDataset
from fsdp_shard.errors import ConfigError

# The parts of a tokenizer.json that determine the tokens of ordinary text.
_SECTIONS = ("normalizer", "pre_tokenizer", "model")


def check_same_tokens(
    windows: MapDataset,
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    source: Location,
    other_source: Location,
) -> None:
    """Raise ConfigError unless both tokenizers split text alike, and give the same tokens in `windows`.

    Special tokens that do not occur in the windows may differ, such as chat tokens that fine-tuning added.
    """
    used = np.unique(np.concatenate([windows.sample(index).inputs["input_ids"] for index in range(len(windows))]))
    named = [_named(one, used.tolist()) for one in (tokenizer, other)]
    different = [(number, *both) for number, *both in zip(used.tolist(), *named, strict=True) if both[0] != both[1]]
    if different:
        number, ours, theirs = different[0]
        problem = f"token {number} is {ours!r} in the first and {theirs!r} in the second"
    elif _division(tokenizer) != _division(other):
        problem = "they divide text in different ways"
    else:
        return
    raise ConfigError(
        f"checkpoint={source} and against={other_source} have different tokenizers, {source.tokenizer_directory} and "
        f"{other_source.tokenizer_directory}: {problem}. Their losses per token do not compare; evaluate each alone, "
        f"and compare bits_per_byte in their result.json."
    )


def _named(tokenizer: PreTrainedTokenizerBase, numbers: list[int]) -> list[str | None]:
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    return [names.get(number) for number in numbers]


def _division(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return, as JSON, how a tokenizer splits ordinary text."""
    if tokenizer.is_fast:
        document = json.loads(tokenizer.backend_tokenizer.to_str())
        return [document.get(name) for name in _SECTIONS]
    return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
