"""What the trainers and loops of others have in common when a step is resumed, or a run is asked to stop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from typing import Any

from accelerate.data_loader import get_sampler

from fsdp_shard.errors import CheckpointError, ConfigError, Interrupted
from fsdp_shard.training import Restored

_logger = logging.getLogger("fsdp_shard")
_NAMES = {
    "steps_per_epoch": "the number of steps of an epoch",
    "num_samples": "the number of samples",
    "seed": "the seed of their order",
}


def check_every(every: int | None) -> None:
    """Raise ConfigError unless `every` is a number of steps or None."""
    if every is not None and (type(every) is not int or every < 1):
        raise ConfigError(f"every={every!r} is neither a number of steps of at least 1 nor None.")


def data_of(loader: Any, global_batch_size: int) -> dict[str, Any]:
    """What the batches of a loader that accelerate has prepared depend on."""
    return {
        "global_batch_size": global_batch_size,
        "num_samples": len(loader.dataset) if has_length(loader.dataset) else None,
        "seed": getattr(get_sampler(loader), "initial_seed", None),
    }


def require_same_data(restored: Restored, now: Mapping[str, Any], factors: str) -> None:
    """Raise CheckpointError if a step was saved with other data than `data_of` finds now.

    Args:
        restored: The step, whose `extra` has `data`.
        now: What the batches depend on.
        factors: What makes the global batch size, for the error.
    """
    for name, before in restored.extra["data"].items():
        if now.get(name) != before:
            said = _NAMES.get(name, f"the global batch size ({factors})")
            raise CheckpointError(
                f"{restored.directory} was saved with {said} {before}, and now it is {now.get(name)}: the batches that "
                f"follow would be others. Use the same, or begin a new run with its weights."
            )


def report(restored: Restored) -> None:
    """Say which step is resumed, and what of it is not."""
    if not restored.has_random_state:
        _logger.warning(
            "%s was saved by another number of ranks: the random state of each rank (dropout) begins anew.",
            restored.directory,
        )
    _logger.info("resumed from %s", restored.directory)


def stopped(step: int, path: str | os.PathLike[str], call: str) -> Interrupted:
    """What ends a trainer that was asked to stop, once the step is on the disk; `call` is what resumes it."""
    return Interrupted(
        f"The run was asked to stop; step {step} is saved in {path}, and the same call of {call} resumes it.",
        signal_number=signal.SIGTERM,
    )


def has_length(data: Any) -> bool:
    """Whether a data set or a loader has a length: a DataLoader has `__len__` in any case."""
    try:
        len(data)
    except (TypeError, NotImplementedError):
        return False
    return True
