"""Runs work on whose errors all ranks agree, so that no rank continues alone after another has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fsdp_shard.errors import FsdpShardError, StorageError, os_error_text

if TYPE_CHECKING:  # it imports torch, which commands that only inspect a run avoid
    from fsdp_shard.distributed.communicator import Communicator

T = TypeVar("T")


def run_on_all(ranks: Communicator, work: Callable[[], T]) -> T:
    """Call `work` on every rank, and raise an error of any rank on all ranks. A collective.

    Only errors of this package and of the operating system are raised on all ranks; any other is a bug and ends its
    rank.

    Args:
        ranks: The ranks.
        work: This rank's work.

    Returns:
        The result of `work` on this rank.

    Raises:
        FsdpShardError: The error of the first rank that raised one; an OSError becomes a StorageError.
    """
    value: T | None = None
    error: FsdpShardError | None = None
    try:
        value = work()
    except FsdpShardError as raised:
        error = raised
    except OSError as raised:
        error = StorageError(f"Rank {ranks.rank}: {os_error_text(raised)}.")
    # Even with a thousand ranks, each receives only one number unless a rank has failed.
    if ranks.all_reduce([float(error is not None)], "max")[0]:
        raise next(found for found in ranks.all_gather_object(error) if found is not None)
    return value  # type: ignore[return-value]  # no error, so work() returned it


def run_on_main(ranks: Communicator, work: Callable[[], T]) -> T:
    """Call `work` on rank 0 and return its result on every rank. A collective.

    Use it to inspect a disk, which may change between the reads of two ranks.

    Args:
        ranks: The ranks.
        work: The work of rank 0; its result must be a small picklable object.

    Returns:
        The result of `work` on rank 0.

    Raises:
        FsdpShardError: As in `run_on_all`, on every rank.
    """
    value: T = ranks.broadcast_object(run_on_all(ranks, lambda: work() if ranks.is_main else None))
    return value
