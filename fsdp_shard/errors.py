"""All errors that users can encounter, as one tree.

    FsdpShardError                  anything this package raises on purpose
    ├── InputError (ValueError)     the input is wrong; exit status 2, nothing was written
    │   ├── ConfigError             a setting is unknown, out of range, or in conflict with another one
    │   ├── DataError               a data file or dataset is missing, empty or malformed
    │   ├── ModelError              a model does not exist, has no weights, or has an unknown architecture
    │   ├── CheckpointError         a checkpoint is missing, damaged, incomplete, or differs from its index
    │   └── PlanError               a model does not fit a device map or memory budget
    ├── RunError                    the work itself failed; exit status 1
    │   ├── RankError               a rank died or raised; holds the rank's traceback
    │   ├── SaveError               a checkpoint could not be written; earlier ones are untouched
    │   │   └── StorageError        because the disk is full or fails; training can continue
    │   │       └── RemoteError     or because a remote store is unreachable, rejects the request or fails
    │   ├── LossError               the loss or a gradient became NaN or infinite
    │   └── DifferenceError         verify or diff found that contents differ
    └── Interrupted                 a signal asked the run to stop; the message says what is saved

A message is one paragraph that names the file or setting, what was found, what was expected and what to do. It is safe
to print on a terminal: names read from files may contain any characters and have any length, so `one_line` sanitizes
them. Bugs of this package are `assert`s and never part of this tree.
"""

import errno
import re
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

_LONGEST_MESSAGE = 2_000  # characters; a file may contain millions in place of a name or number
_LONGEST_LINE = 20_000
_LONG_WORD = re.compile(r"\S{500,}")


class FsdpShardError(Exception):
    """Base class of every error this package raises on purpose; `exit_status` is what the commands return."""

    exit_status = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message, _LONGEST_MESSAGE))


class InputError(FsdpShardError, ValueError):
    """The input is wrong; nothing was written."""

    exit_status = 2


class ConfigError(InputError):
    """A setting is unknown, out of range, or in conflict with another one."""


class DataError(InputError):
    """A data file or dataset is missing, empty or malformed."""


class ModelError(InputError):
    """The model does not exist, has no weights, or its architecture cannot be built."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, incomplete, or differs from its own index."""


class PlanError(InputError):
    """The model does not fit a device map or a memory budget."""


class RunError(FsdpShardError):
    """The work itself failed."""


class RankError(RunError):
    """A rank died or raised; `traceback` is the rank's traceback, if it could still report it."""

    def __init__(self, message: str, *, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class SaveError(RunError):
    """A checkpoint could not be written; earlier ones are untouched."""


class StorageError(SaveError):
    """A checkpoint could not be written because a disk is full or fails; training can continue for a while."""


class RemoteError(StorageError):
    """A remote store is unreachable, rejects a request, or fails; local files are untouched."""


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
        # Ranks send errors to each other, and by default an exception is pickled with its message only.
        return partial(Interrupted, signal_number=self.exit_status - 128), self.args


def os_error_text(error: OSError) -> str:
    """Return the file, reason and errno of an operating system error."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"


def deleted_meanwhile(path: Path) -> str:
    """Return the error for a checkpoint that has been deleted since it was found."""
    return (
        f"{path} was deleted while it was read, as a running training deletes old steps (checkpoint.keep_last). Read a "
        f"step that is kept, such as RUN@latest or RUN@best, or have the training keep more of them."
    )


def one_line(text: str, longest: int = _LONGEST_LINE) -> str:
    """Return text for one terminal line: control characters and direction changes escaped, and overlong text cut.

    Names in files may contain any characters: those that move the cursor, forge a line or reverse what follows.
    """
    text = _LONG_WORD.sub(lambda word: f"{word[0][:200]}...{word[0][-50:]}", _cut(text, longest))
    return text if text.isprintable() else _cut("".join(map(_shown, text)), longest)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 4 :]}"


def _shown(character: str) -> str:
    # Joiners are part of words (Persian, emoji); spaces may have any width.
    is_harmless = character.isprintable() or character in "\u200c\u200d" or unicodedata.category(character) == "Zs"
    return character if is_harmless else character.encode("unicode_escape").decode()
