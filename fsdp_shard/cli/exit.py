"""How a command ends: its exit status, and the one-paragraph error on standard error."""

import errno
import gc
import os
import resource
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeGuard

from fsdp_shard.distributed import Stopped, interrupt_on_signals, is_joined_rank, joined_rank
from fsdp_shard.errors import FsdpShardError, InputError, Interrupted, RunError, one_line
from fsdp_shard.utils import discard, make_output_printable, printable, redact, until_unread

_MANY_FILES = 65_536


def run_as_program(body: Callable[[], None], *, debug: bool) -> NoReturn:
    """Call `body` and exit the process with the status of its outcome; print an error as one paragraph.

    The garbage collector is off until `body` calls `start_garbage_collection`: imports create a million permanent
    objects, and visiting them repeatedly takes a fifth of the import time.

    Args:
        body: The work of the program.
        debug: Whether to print the traceback of an error.
    """
    gc.disable()
    _allow_many_files()
    _open_closed_outputs()
    make_output_printable()
    interrupt_on_signals(ctrl_c=False)
    status = _outcome(body, debug)
    if status:
        # Objects in the error's frames, such as process groups, must be freed before interpreter shutdown: torch aborts
        # if its threads outlive the interpreter.
        gc.collect()
    # At exit, Python would visit all remaining objects three times, which takes a second with torch and transformers
    # imported. Unreferenced objects and modules are still destroyed.
    gc.freeze()
    sys.exit(status)


def _allow_many_files() -> None:
    """Raise the limit of open files (`ulimit -n`), often 1,024, as far as the system allows.

    A checkpoint of a thousand ranks has a thousand files, and every tensor spans all of them.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if most == resource.RLIM_INFINITY else min(most, _MANY_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _open_closed_outputs() -> None:
    """Discard output to a closed stream (`>&-`), for which Python has None and whose descriptor is free."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8", closefd=False))


def start_garbage_collection() -> None:
    """Enable the garbage collector after a program's imports, without visiting the imported objects again.

    Has no effect in a process that `run_as_program` did not start.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _outcome(body: Callable[[], None], debug: bool) -> int:
    """Call `body`, print its error, and return the exit status, without keeping a reference to the error."""
    try:
        body()
        sys.stdout.flush()
    except SystemExit:
        raise
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # the reader has exited, like `head`
            discard(stream)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        with until_unread(sys.stderr):
            print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BaseException as raised:  # torch has errors that are not Exceptions
        error = raised.as_error() if isinstance(raised, Stopped) else raised
        if _has_no_room_to_print(error):
            error = RunError(f"Standard output cannot be written: {error.strerror}. Make room, or send it elsewhere.")
            discard(sys.stdout)
        if not (isinstance(error, Interrupted) and joined_rank() > 0):  # of several stopped ranks, only one reports it
            with until_unread(sys.stderr):
                print_error(error, debug)
        return error.exit_status if isinstance(error, FsdpShardError) else 1
    return 0


def _has_no_room_to_print(error: BaseException) -> TypeGuard[OSError]:
    """Whether standard output is full: errors of files have names, and even a line break cannot be printed."""
    if not isinstance(error, OSError) or error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return False
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def wants_debug(arguments: Sequence[str]) -> bool:
    """Return whether a command line requests tracebacks, even if it cannot be composed."""
    return "--debug" in arguments or any(argument.lower() == "debug=true" for argument in arguments)


def print_error(error: BaseException, debug: bool) -> None:
    """Print an error to standard error as one paragraph, which names the rank if another program started this process.

    Args:
        error: The error.
        debug: Whether to print its traceback first, or the rank's if a rank raised it.
    """
    if debug:
        sys.stderr.write(printable(redact(traceback_of(error))))
    # Wrong input is the same on all ranks: the first one reports it, without a number.
    is_shared = isinstance(error, InputError) and joined_rank() == 0
    rank = f"rank {joined_rank()}: " if is_joined_rank() and not is_shared else ""
    # Only a traceback can explain other errors, and those that a rank sent with one.
    is_explained = (isinstance(error, FsdpShardError) or _names_a_file(error)) and not getattr(error, "traceback", "")
    hint = "" if is_explained or debug else " Give debug=true or --debug to see the traceback."
    print(_paragraph(f"{rank}{message_of(error)}{hint}", error), file=sys.stderr)


def traceback_of(error: BaseException) -> str:
    """The traceback of an error, or the rank's if a rank raised it."""
    of_rank: str = getattr(error, "traceback", "") or getattr(error.__cause__, "traceback", "")
    return of_rank or "".join(traceback.format_exception(error))


def message_of(error: BaseException) -> str:
    """The error in one line; for a bug, including where it was raised."""
    if isinstance(error, FsdpShardError):
        return str(error)
    if _names_a_file(error):
        return f"{error.filename}: {error.strerror}."
    last = traceback.extract_tb(error.__traceback__)[-1:]
    line = f" at {last[0].filename}:{last[0].lineno}" if last else ""
    return f"{type(error).__name__}: {error}{line}."


def _names_a_file(error: BaseException) -> TypeGuard[OSError]:
    """Whether the error of the operating system is complete: it names the file and the problem."""
    return isinstance(error, OSError) and error.filename is not None and bool(error.strerror)


def _paragraph(text: str, error: BaseException) -> str:
    """Format `error: ...` on one line, or wrapped to the terminal's width without breaking words."""
    start = "" if isinstance(error, Interrupted) else "error: "
    text = one_line(redact(start + " ".join(text.split())))
    if not sys.stderr.isatty():
        return text
    width = os.get_terminal_size(sys.stderr.fileno()).columns
    return textwrap.fill(text, max(width - 1, 40), break_long_words=False, break_on_hyphens=False)
