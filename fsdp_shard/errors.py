"""Every error that a user can meet, as one tree.

    FsdpShardError                  anything this package raises on purpose
    ├── InputError (ValueError)     the input is wrong; exit status 2, nothing was written
    │   ├── ConfigError             a setting: unknown, out of range, or in conflict with another
    │   ├── DataError               a data file or dataset: missing, empty, malformed
    │   ├── ModelError              a model: no such directory or hub id, no weights, an unknown architecture
    │   ├── CheckpointError         a checkpoint: missing, damaged, incomplete, or not what its index says
    │   └── PlanError               a device map or memory budget that the model does not fit
    ├── RunError                    the work itself failed; exit status 1
    │   ├── RankError               a rank died or raised; has the traceback of that rank
    │   ├── SaveError               a checkpoint could not be written; earlier ones are untouched
    │   │   └── StorageError        because the disk is full or fails; training can continue without it
    │   │       └── RemoteError     or because a remote store cannot be reached, refuses or fails
    │   ├── LossError               the loss or a gradient became NaN or infinite
    │   └── DifferenceError         verify or diff found that contents differ
    └── Interrupted                 a signal asked the run to stop; the message says what is saved

A message is one paragraph that names the file or setting, what was found, what was expected and what to do. It can be
shown on a terminal: names that files give may have any characters and any length, so it is made `one_line`.
Bugs of this package are `assert`s and never part of this tree.
"""

import errno
import re
import unicodedata
from functools import partial
from typing import Any

_LONGEST_MESSAGE = 2_000  # characters; what a file has in the place of a name or number may have millions
_LONGEST_LINE = 20_000
_LONG_WORD = re.compile(r"\S{500,}")


class FsdpShardError(Exception):
    """Base of everything this package raises on purpose; `exit_status` is what the commands return."""

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
    """There is no such model, it has no weights, or its architecture cannot be built."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, incomplete, or not what its own index says."""


class PlanError(InputError):
    """The model does not fit a device map or a memory budget."""


class RunError(FsdpShardError):
    """The work itself failed."""


class RankError(RunError):
    """A rank died or raised; `traceback` is that of the rank, if it could still report it."""

    def __init__(self, message: str, *, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class SaveError(RunError):
    """A checkpoint could not be written; earlier ones are untouched."""


class StorageError(SaveError):
    """A disk is full or fails, so a checkpoint could not be written; training can continue without it for a while."""


class RemoteError(StorageError):
    """A remote store cannot be reached, refuses a request, or fails; local files are untouched."""


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
        # Ranks send each other errors, and an exception is otherwise pickled with its message only.
        return partial(Interrupted, signal_number=self.exit_status - 128), self.args


def os_error_text(error: OSError) -> str:
    """File, reason and errno of an error of the operating system."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"


def one_line(text: str, longest: int = _LONGEST_LINE) -> str:
    """Text on one line of a terminal: control characters and changes of direction as escapes, what is too long cut.

    Names in files may have any characters: those that move the cursor, forge a line or reverse what follows.
    """
    text = _LONG_WORD.sub(lambda word: f"{word[0][:200]}...{word[0][-50:]}", _cut(text, longest))
    return text if text.isprintable() else _cut("".join(map(_shown, text)), longest)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 4 :]}"


def _shown(character: str) -> str:
    # Joiners are part of words (Persian, emoji); spaces are of any width.
    is_harmless = character.isprintable() or character in "\u200c\u200d" or unicodedata.category(character) == "Zs"
    return character if is_harmless else character.encode("unicode_escape").decode()
