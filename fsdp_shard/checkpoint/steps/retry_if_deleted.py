"""Handles steps that a running training job deletes during a read: reports the deletion, or reads the newer step."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from fsdp_shard.checkpoint.io import refuse_deleted
from fsdp_shard.errors import InputError


class LocatedWeights(Protocol):
    """A located source, all of which is in `weights`, a directory or a file."""

    @property
    def weights(self) -> Path:
        """The directory or file."""


S = TypeVar("S", bound=LocatedWeights)
R = TypeVar("R")


def retry_if_deleted(find: Callable[[], S], read: Callable[[S], R]) -> R:
    """Read the source that `find` locates; if it is deleted meanwhile, read the one that `find` then locates.

    Args:
        find: Locates the source, such as the latest step of a run.
        read: Reads it; its errors and results are ignored if the source was deleted.

    Raises:
        CheckpointError: The source was deleted, and there is no other one.
    """
    source = find()
    while True:
        result, failure = None, None
        try:
            result = read(source)
        except Exception as error:
            failure = error
        if source.weights.exists():
            if failure is not None:
                raise failure
            return result  # type: ignore[return-value]  # without a failure it is what `read` returned
        gone = source.weights
        try:
            source = find()
        except InputError:  # there is no other source; if this one is back, it is read again
            refuse_deleted(gone)
        if not source.weights.exists():
            refuse_deleted(gone)
