"""What plans of one model have in common, each computed once by the settings that it depends on.

A search plans one model hundreds of times, and most candidates differ in a setting or two.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from fsdp_shard.errors import InputError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import ShardConfig

T = TypeVar("T")

# What neither a model, its units nor the activations of a micro-batch depend on.
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
    """Values by their kind and settings. An InputError is kept too, and raised again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Any] = {}

    def of(self, kind: str, settings: tuple[object, ...], make: Callable[[], T]) -> T:
        """What `make` returned the first time that it was asked for with these settings.

        Args:
            kind: What it is.
            settings: All that it depends on, other than the model; compared by their repr.
            make: Computes it.

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


def of_one_rank(shard: ShardConfig) -> ShardConfig:
    """`shard` without what says how ranks work together."""
    return replace(shard, **_OF_RANKS)


def of_parameters(shard: ShardConfig) -> ShardConfig:
    """`shard` without what says how ranks work together, and what is done with activations."""
    return replace(of_one_rank(shard), activation_checkpointing=False, activation_offload=False)


def of_activations(model: ModelConfig) -> ModelConfig:
    """`model` without the dtype that weights are stored in: what is computed has those of the units."""
    return replace(model, dtype="float32")


def with_any_loss(model: ModelConfig) -> ModelConfig:
    """`model` without what its parameters do not depend on."""
    return replace(model, chunked_loss="auto")
