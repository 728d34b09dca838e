"""How much memory the keys and values of earlier tokens will take, block by block, from the config alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_shard.inference.config import GenerationSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fsdp_shard.models import Block


@dataclass(frozen=True)
class Room:
    """What a model is to keep in mind at once: `num_tokens` (prompt and answer) of each of `batch_size` texts."""

    batch_size: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.batch_size} texts of {self.num_tokens} tokens"


_CONVERSATION = 4096  # tokens to keep room for where nobody knows how long it gets


def room_for(encoded: Sequence[Sequence[int]], settings: GenerationSettings) -> Room | None:
    """The room that completing these prompts takes, of a conversation if there are none; None without a cache."""
    if settings.cache == "none":
        return None
    longest = max(map(len, encoded), default=_CONVERSATION)
    num_texts = max(min(settings.batch_size, len(encoded)), 1) * settings.num_beams
    return Room(num_texts, longest + settings.max_new_tokens)


def cache_bytes(config: PretrainedConfig, blocks: Sequence[Block], element_bytes: int, room: Room) -> dict[str, int]:
    """Block FQN -> bytes of its keys and values: at most that, for a sliding window is counted as if it were whole.

    Nothing for a model whose config does not speak of heads, such as a state space model.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    hidden, all_heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    if not heads or not hidden or not all_heads:
        return {}
    width = getattr(text, "head_dim", None) or hidden // all_heads
    layers = [block.fqn for block in blocks if block.repeated and _decodes(block.fqn, config)]
    each = 2 * heads * width * element_bytes * room.batch_size * room.num_tokens
    return dict.fromkeys(layers, each)


def _decodes(fqn: str, config: PretrainedConfig) -> bool:
    return not config.is_encoder_decoder or "decoder" in fqn.split(".")
