"""Steps that a running training deletes while they are read: reported as such, or the newer one is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from fsdp_shard.checkpoint.io import refuse_deleted
from fsdp_shard.errors import InputError


class LocatedWeights(Protocol):
    """What was located: all of it is in `weights`, a directory or a file."""

    @property
    def weights(self) -> Path:
        """The directory or file."""


S = TypeVar("S", bound=LocatedWeights)
R = TypeVar("R")


def read_kept(find: Callable[[], S], read: Callable[[S], R]) -> R:
    """Read what `find` locates. If it is deleted meanwhile, read what `find` locates then, as the next latest step.

    Args:
        find: Locates the source.
        read: Reads it; whatever it raises or returns of a source that is gone counts for nothing.

    Raises:
        CheckpointError: The source was deleted, and there is no other.
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
        except InputError:
            refuse_deleted(gone)
        if not source.weights.exists():
            refuse_deleted(gone)
