"""What the trainers and loops of others have in common when a step is resumed, or a run is asked to stop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from accelerate.data_loader import get_sampler
from datasets import Dataset
from pyarrow import types

from fsdp_shard.errors import CheckpointError, ConfigError, Interrupted
from fsdp_shard.training import Restored

_logger = logging.getLogger("fsdp_shard")
_NAMES = {
    "steps_per_epoch": "the number of steps of an epoch",
    "num_samples": "the number of samples",
    "seed": "the seed of their order",
    "rows": "training data whose names of columns and rows here and there have the digest",
}
_NUM_ROWS = 16  # that are compared


def check_every(every: int | None) -> None:
    """Raise ConfigError unless `every` is a number of steps or None."""
    if every is not None and (type(every) is not int or every < 1):
        raise ConfigError(f"every={every!r} is neither a number of steps of at least 1 nor None.")


def data_of(loader: Any, global_batch_size: int, rows: str | None) -> dict[str, Any]:
    """What the batches of a loader that accelerate has prepared depend on; `rows` is the `digest_of_rows`."""
    found = {
        "global_batch_size": global_batch_size,
        "num_samples": len(loader.dataset) if has_length(loader.dataset) else None,
        "seed": getattr(get_sampler(loader), "initial_seed", None),
    }
    return found if rows is None else {**found, "rows": rows}


def digest_of_rows(data: Any) -> str | None:
    """Digest of the columns of a `datasets.Dataset`, and of the numbers and text in some rows spread over it.

    None of other data: reading a sample may draw from the random state, or give another one each time. So rows are read
    as they are stored, without transforms. Images and sounds are left out: they are stored with paths of a machine.
    """
    if not isinstance(data, Dataset) or not len(data):
        return None
    stored = data.with_format("arrow")
    hashed = xxhash.xxh3_128(repr(data.column_names).encode())
    for row in sorted({number * (len(data) - 1) // (_NUM_ROWS - 1) for number in range(_NUM_ROWS)}):
        table = stored[row]
        names = [field.name for field in table.schema if _is_plain(field.type)]
        hashed.update(repr(table.select(names).to_pydict()).encode())
    return hashed.hexdigest()


def _is_plain(kind: Any) -> bool:
    """Whether a type of arrow is of numbers, text or lists of them."""
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    return any(test(kind) for test in tests)


def require_same_data(restored: Restored, now: Mapping[str, Any], factors: str) -> None:
    """Raise CheckpointError if a step was saved with other data than `data_of` finds now.

    Args:
        restored: The step, whose `extra` has `data`.
        now: What the batches depend on.
        factors: What makes the global batch size, for the error.
    """
    for name, before in restored.extra["data"].items():
        if now.get(name, None if name != "rows" else before) != before:
            said = _NAMES.get(name, f"the global batch size ({factors})")
            raise CheckpointError(
                f"{restored.directory} was saved with {said} {before}, and now it is {now.get(name)}: the batches that "
                f"follow would be others. Use the same, or begin a new run with its weights."
            )


def report_change(restored: Restored, changes: Sequence[str]) -> None:
    """Say which settings a run goes on with that are others than those of the step."""
    _logger.warning("settings have changed since %s was saved: %s", restored.directory, ", ".join(changes))


def report(restored: Restored) -> None:
    """Say which step is resumed, and what of it is not."""
    if not restored.has_random_state:
        _logger.warning(
            "%s was saved by another number of ranks: the random state of each rank (dropout) begins anew.",
            restored.directory,
        )
    _logger.info("resumed from %s", restored.directory)


def report_no_best(path: str | os.PathLike[str], monitor: str) -> None:
    """Say that no step of a run is the best."""
    _logger.warning("%s has no best step: none that was saved has %s; evaluate at steps that are saved.", path, monitor)


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
