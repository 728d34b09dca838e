"""What all ranks agree on: errors, so that no rank continues alone after another has failed, and settings."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from fsdp_shard.distributed.config import Launchable
from fsdp_shard.errors import ConfigError, FsdpShardError, StorageError, os_error_text
from fsdp_shard.utils import in_yaml, redact_setting, walk

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


def check_same_settings(ranks: Communicator, config: Launchable) -> None:
    """Raise ConfigError on all ranks if one has other settings than rank 0. A collective.

    Ranks that a launcher starts are compared before; this is for programs that change a config, or make one per rank.
    """
    first: Mapping[str, str] = ranks.broadcast_object(common_settings(config) if ranks.is_main else None)

    def compare() -> None:
        if error := describe_other_setting(config, first, ranks.rank):
            raise ConfigError(error)

    run_on_all(ranks, compare)


def common_settings(config: Launchable) -> dict[str, str]:
    """Return the settings that must be the same on all ranks: dotted names and values, without secrets."""
    return {
        name: redact_setting(name, in_yaml(value))
        for name, _, value in walk(config)
        if name not in ("run_dir", "debug", *config.per_machine) and not name.startswith("launch.")
    }


def describe_other_setting(config: Launchable, first: Mapping[str, str], rank: int) -> str | None:
    """Describe the first setting of rank `rank` that is not that of rank 0, as an error; None if there is none."""
    own = common_settings(config)
    name = next((name for name in {**first, **own} if own.get(name) != first.get(name)), None)
    if name is None:
        return None
    return (
        f"Rank {rank} on {socket.gethostname()} has {name}={own.get(name)}, but rank 0 has {name}={first.get(name)}; "
        f"start all ranks with the same settings."
    )
