"""Every error that a user can meet, as one tree.

    FsdpShardError                  anything this package raises on purpose
    ├── InputError (ValueError)     what was asked for cannot work; exit status 2, nothing was written
    │   ├── ConfigError             a setting: unknown, out of range, or at odds with another
    │   ├── DataError               a data file or data set: missing, empty, malformed
    │   ├── ModelError              a model: no such directory or hub id, no weights, an architecture we cannot build
    │   ├── CheckpointError         a checkpoint: absent, damaged, incomplete, or not what its index says
    │   └── PlanError               a device map or budget that the model does not fit
    └── RunError                    the work itself failed; exit status 1
        ├── RankError               a rank died or raised; carries that rank's traceback
        ├── SaveError               a checkpoint could not be written; the earlier ones are untouched
        │   └── StorageError        as the disk is full or fails: training can go on without it
    │       └── RemoteError     or as a remote store cannot be reached, refuses or fails
        ├── LossError               the loss or a gradient became NaN or infinite
        └── DifferenceError         verify or diff found that contents differ
    Interrupted                     a signal asked the run to stop; the message says what is saved

A message is one paragraph that names the file or setting, what was found, what was expected and what to do.
Mistakes of our own are `assert`s and never part of this tree. This module imports nothing of the package.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class FsdpShardError(Exception):
    """Base of everything this package raises on purpose; `exit_status` is what the commands return."""

    exit_status = 1


class InputError(FsdpShardError, ValueError):
    """What was asked for cannot work; nothing was written."""

    exit_status = 2


class ConfigError(InputError):
    """A setting is unknown, out of range, or at odds with another one."""


class DataError(InputError):
    """A data file or data set is missing, empty or malformed."""


class ModelError(InputError):
    """There is no such model, it has no weights, or its architecture cannot be built."""


class CheckpointError(InputError):
    """A checkpoint is absent, damaged, incomplete, or not what its own index says."""


class PlanError(InputError):
    """A device map or a memory budget that the model does not fit."""


class RunError(FsdpShardError):
    """The work itself failed."""


class RankError(RunError):
    """A rank died or raised; `traceback` is that rank's own, when it could still tell."""

    def __init__(self, message: str, *, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class SaveError(RunError):
    """A checkpoint could not be written; the earlier ones are untouched."""


class StorageError(SaveError):
    """A disk is full or fails, so a checkpoint could not be written; training can go on without it for a while."""


class RemoteError(StorageError):
    """A remote store cannot be reached, or refuses what was asked, or fails; what is on this machine is untouched."""


class LossError(RunError):
    """The loss or a gradient became NaN or infinite."""


class DifferenceError(RunError):
    """`verify` or `diff` found that contents differ."""


class Interrupted(FsdpShardError):
    """A signal asked the run to stop; the message says what is saved and how to resume."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks send each other what they met, and an exception is otherwise made anew of its message alone.
        return partial(Interrupted, signal_number=self.exit_status - 128), self.args
