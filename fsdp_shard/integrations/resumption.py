"""Shared code of the integrations for resuming a step and for requests to stop."""

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
_NUM_ROWS = 16  # to compare


def check_every(every: int | None) -> None:
    """Raise ConfigError unless `every` is a number of steps or None."""
    if every is not None and (type(every) is not int or every < 1):
        raise ConfigError(f"every={every!r} is neither a number of steps of at least 1 nor None.")


def data_of(loader: Any, global_batch_size: int, rows: str | None) -> dict[str, Any]:
    """The values that the batches of a loader prepared by accelerate depend on; `rows` is the `digest_of_rows`."""
    found = {
        "global_batch_size": global_batch_size,
        "num_samples": len(loader.dataset) if has_length(loader.dataset) else None,
        "seed": getattr(get_sampler(loader), "initial_seed", None),
    }
    return found if rows is None else {**found, "rows": rows}


def digest_of_rows(data: Any) -> str | None:
    """Digest of the columns of a `datasets.Dataset`, and of numbers and text in sample rows spread over it.

    None for other data: reading a sample may draw from the random state, or return different values each time. Rows are
    therefore read as stored, without transforms. Images and sounds are skipped, because they are stored with local
    paths.
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
    """Whether an Arrow type consists of numbers, text or lists of them."""
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    return any(test(kind) for test in tests)


def require_same_data(restored: Restored, now: Mapping[str, Any], factors: str) -> None:
    """Raise CheckpointError if a step was saved with data other than what `data_of` finds now.

    Args:
        restored: The step, whose `extra` contains `data`.
        now: The values that the batches depend on.
        factors: The factors of the global batch size, for the error message.
    """
    for name, before in restored.extra["data"].items():
        if now.get(name, None if name != "rows" else before) != before:
            said = _NAMES.get(name, f"the global batch size ({factors})")
            raise CheckpointError(
                f"{restored.directory} was saved with {said} {before}, and now it is {now.get(name)}: the batches that "
                f"follow would be others. Use the same, or begin a new run with its weights."
            )


def report_change(restored: Restored, changes: Sequence[str]) -> None:
    """Report the settings with which a run continues that differ from those of the step."""
    _logger.warning("settings have changed since %s was saved: %s", restored.directory, ", ".join(changes))


def report(restored: Restored) -> None:
    """Report which step is resumed, and which parts of it are not."""
    if not restored.has_random_state:
        _logger.warning(
            "%s was saved by another number of ranks: the random state of each rank (dropout) starts over.",
            restored.directory,
        )
    _logger.info("resumed from %s", restored.directory)


def report_no_best(path: str | os.PathLike[str], monitor: str) -> None:
    """Report that a run has no best step."""
    _logger.warning("%s has no best step: none that was saved has %s; evaluate at steps that are saved.", path, monitor)


def stopped(step: int, path: str | os.PathLike[str], call: str) -> Interrupted:
    """The exception that ends a trainer asked to stop, once the step is on disk; `call` resumes the run."""
    return Interrupted(
        f"The run was asked to stop; step {step} is saved in {path}, and the same call of {call} resumes it.",
        signal_number=signal.SIGTERM,
    )


def has_length(data: Any) -> bool:
    """Whether a dataset or a loader has a length; every DataLoader defines `__len__`."""
    try:
        len(data)
    except (TypeError, NotImplementedError):
        return False
    return True
