"""Values that plans of one model share, each computed once per combination of its settings.

A search plans one model hundreds of times, and most candidates differ in one or two settings.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from fsdp_shard.errors import InputError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import ShardConfig

T = TypeVar("T")

# Settings that affect neither a model, its units nor the activations of a micro-batch.
_OF_RANKS: dict[str, Any] = {
    "cpu_offload": False,
    "replicas": 1,
    "context_parallel": 1,
    "context_method": "auto",
    "reshard_after_forward": True,
    "prefetch_forward": None,
    "prefetch_backward": None,
    "sync_every_micro_batch": True,
}


class PlanCache:
    """Values by kind and settings. An InputError is also kept, and raised again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Any] = {}

    def get(self, kind: str, settings: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return what `make` returned on the first call with these settings.

        Args:
            kind: Kind of the value.
            settings: Everything the value depends on other than the model, compared by repr.
            make: Computes the value.

        Raises:
            InputError: As `make` raised it.
        """
        key = (kind, *map(repr, settings))
        if key not in self._known:
            try:
                self._known[key] = make()
            except InputError as error:
                self._known[key] = error
        found: T | InputError = self._known[key]
        if isinstance(found, InputError):
            raise type(found)(str(found)) from found.__cause__
        return found


def without_ranks(shard: ShardConfig) -> ShardConfig:
    """`shard` without the settings for how ranks work together."""
    return replace(shard, **_OF_RANKS)


def without_activations(shard: ShardConfig) -> ShardConfig:
    """`shard` without the settings for activations, and for how ranks work together."""
    return replace(without_ranks(shard), activation_checkpointing=False, activation_offload=False)


def without_dtype(model: ModelConfig) -> ModelConfig:
    """`model` without the stored dtype; compute dtypes are those of the units."""
    return replace(model, dtype="float32")


def without_loss(model: ModelConfig) -> ModelConfig:
    """`model` without the settings that do not affect its parameters."""
    return replace(model, chunked_loss="auto")
