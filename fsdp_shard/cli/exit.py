"""How a command ends: its exit status, and the one paragraph on standard error that says why."""

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
from fsdp_shard.utils import make_output_printable, printable, redact

_MANY_FILES = 65_536


def run_as_program(body: Callable[[], None], *, debug: bool) -> NoReturn:
    """Call `body` and exit the process with the status of its outcome; print an error as one paragraph.

    The garbage collector is off until `body` calls `start_garbage_collection`: imports make a million objects, all of
    which stay, and visiting them again and again takes a fifth of the import time.

    Args:
        body: What the program does.
        debug: Whether to print the traceback of an error.
    """
    gc.disable()
    _allow_many_files()
    _open_closed_outputs()
    make_output_printable()
    interrupt_on_signals(ctrl_c=False)
    status = _outcome(body, debug)
    if status:
        # What the error's frames held, such as process groups, must go while the interpreter is whole: torch aborts
        # when its threads outlive it.
        gc.collect()
    # Python would visit all remaining objects three times as it exits, which takes a second after importing torch and
    # transformers. Objects without references are still destroyed, and so are the modules.
    gc.freeze()
    sys.exit(status)


def _allow_many_files() -> None:
    """Raise the limit of open files (`ulimit -n`), often 1,024, as far as the system lets this process.

    A checkpoint of a thousand ranks has a thousand files, and each tensor is in all of them.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if most == resource.RLIM_INFINITY else min(most, _MANY_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _open_closed_outputs() -> None:
    """Send what is printed to a closed output (`>&-`) nowhere: Python has None for it, and its number is free."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8", closefd=False))


def start_garbage_collection() -> None:
    """Enable the garbage collector once a program has imported what it needs, without visiting that again.

    Does nothing in a process that `run_as_program` has not started.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _outcome(body: Callable[[], None], debug: bool) -> int:
    """Call `body`, print its error, and return the exit status. No reference to what was raised is left."""
    try:
        body()
        sys.stdout.flush()
    except SystemExit:
        raise
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BaseException as raised:  # torch has errors that are no Exception
        error = raised.as_error() if isinstance(raised, Stopped) else raised
        if _has_no_room_to_print(error):
            error = RunError(f"Standard output cannot be written: {error.strerror}. Make room, or send it elsewhere.")
        if not (isinstance(error, Interrupted) and joined_rank() > 0):  # of several stopped ranks, one says so
            print_error(error, debug)
        return error.exit_status if isinstance(error, FsdpShardError) else 1
    return 0


def _has_no_room_to_print(error: BaseException) -> TypeGuard[OSError]:
    """Whether standard output is full: errors of files have their names, and a line break cannot be printed either."""
    if not isinstance(error, OSError) or error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return False
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def wants_debug(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for tracebacks; it may be too wrong to be composed."""
    return "--debug" in arguments or any(argument.lower() == "debug=true" for argument in arguments)


def print_error(error: BaseException, debug: bool) -> None:
    """Print an error to standard error as one paragraph, which names the rank if others started this process.

    Args:
        error: What was raised.
        debug: Whether to print its traceback first; if a rank raised it, that of the rank.
    """
    if debug:
        sys.stderr.write(printable(redact(traceback_of(error))))
    # Wrong input is the same on all ranks: the first one reports it, without a number.
    is_shared = isinstance(error, InputError) and joined_rank() == 0
    rank = f"rank {joined_rank()}: " if is_joined_rank() and not is_shared else ""
    # Only a traceback can explain what others raised, or what a rank has sent with one.
    is_explained = (isinstance(error, FsdpShardError) or _names_a_file(error)) and not getattr(error, "traceback", "")
    hint = "" if is_explained or debug else " Give debug=true or --debug to see the traceback."
    print(_paragraph(f"{rank}{message_of(error)}{hint}", error), file=sys.stderr)


def traceback_of(error: BaseException) -> str:
    """The traceback of an error; if a rank raised it, that of the rank."""
    of_rank: str = getattr(error, "traceback", "") or getattr(error.__cause__, "traceback", "")
    return of_rank or "".join(traceback.format_exception(error))


def message_of(error: BaseException) -> str:
    """What went wrong, in one line; for a bug, where it was raised too."""
    if isinstance(error, FsdpShardError):
        return str(error)
    if _names_a_file(error):
        return f"{error.filename}: {error.strerror}."
    last = traceback.extract_tb(error.__traceback__)[-1:]
    line = f" at {last[0].filename}:{last[0].lineno}" if last else ""
    return f"{type(error).__name__}: {error}{line}."


def _names_a_file(error: BaseException) -> TypeGuard[OSError]:
    """Whether the operating system says all there is to say: which file, and what is wrong with it."""
    return isinstance(error, OSError) and error.filename is not None and bool(error.strerror)


def _paragraph(text: str, error: BaseException) -> str:
    """`error: ...` on one line, or filled to the width of the terminal, without breaking words."""
    start = "" if isinstance(error, Interrupted) else "error: "
    text = one_line(redact(start + " ".join(text.split())))
    if not sys.stderr.isatty():
        return text
    width = os.get_terminal_size(sys.stderr.fileno()).columns
    return textwrap.fill(text, max(width - 1, 40), break_long_words=False, break_on_hyphens=False)
