"""Runs work that a file may make endless, such as rendering its chat template, in a forked process with limits.

Limits apply to processor time and to memory beyond that at the fork. They also hold in native code.
"""

import gc
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from fsdp_shard.errors import FsdpShardError
from fsdp_shard.utils.file_limits import exceeded, limits
from fsdp_shard.utils.process_memory import is_out_of_memory, proc_field
from fsdp_shard.utils.text import first_line

A = TypeVar("A")
R = TypeVar("R")

UNIT_BYTES = 32 << 10
"""Argument bytes for which a call's limits are granted once more."""

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the parent ends the process when it needs no more results
_WALL_SECONDS, _WALL_FACTOR = 60.0, 20.0  # for a process that waits forever and uses no processor time
_WATCH_SECONDS = 0.02  # between checks of the used memory
# The system limits allocated memory; building a model allocates more than it uses (XLNet's parameters).
_UNTOUCHED = {"build": 6, "render": 1}
_MEMORY = "memory"


class LimitedProcess(Generic[A, R]):
    """Calls a function in a forked process; the function and the objects that it refers to are not sent.

    Thread-safe: one call after the other.

    Args:
        work: The function. Its argument and result are sent as pickles. Its other effects are lost.
        what: The work and its file, for errors: `rendering the chat template of DIR`.
        kind: Whose limits apply: `build` or `render`.
        error: The class of errors for exceeded limits and for exceptions of `work` that are not ours.
    """

    def __init__(self, work: Callable[[A], R], what: str, *, kind: str = "render", error: type[FsdpShardError]) -> None:
        self._what, self._kind, self._error = what, kind, error
        self._lock = Lock()
        self._connection, theirs = Pipe()
        self._owner, self._pid = os.getpid(), os.fork()
        if not self._pid:
            self._connection.close()
            _serve(work, theirs, self._failure)
        theirs.close()

    def __call__(self, argument: A, num_bytes: int = 0) -> R:
        """Return `work(argument)`; the limits are those of `num_bytes` of text. Raises what `work` raises."""
        with self._lock:
            return self._call(argument, num_bytes)

    def _call(self, argument: A, num_bytes: int) -> R:
        if not self._pid:
            raise self._error(f"{self._what} ended the process that did it, which was said before.")
        granted = 1 + num_bytes / UNIT_BYTES
        seconds: float = getattr(limits(), f"{self._kind}_seconds") * granted
        most_bytes = int(getattr(limits(), f"{self._kind}_bytes") * granted)
        before, deadline = _memory_bytes(self._pid), time.monotonic() + _WALL_SECONDS + _WALL_FACTOR * seconds
        try:
            self._connection.send((argument, seconds, _UNTOUCHED[self._kind] * most_bytes))
            while not self._connection.poll(_WATCH_SECONDS):
                if (is_large := _memory_bytes(self._pid) - before > most_bytes) or time.monotonic() > deadline:
                    os.kill(self._pid, signal.SIGKILL)
                    self._wait()
                    raise self._excess("memory", "bytes") if is_large else self._excess("time", "seconds")
            result, error = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._death() from None
        if error == _MEMORY:
            raise self._excess("memory", "bytes")
        if error is not None:
            raise error
        value: R = result
        return value

    def close(self) -> None:
        """End the process, unless it was already ended for exceeding a limit, or another process started it."""
        self._connection.close()
        if self._pid and self._owner == os.getpid():
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pid", 0):
            self.close()

    def _wait(self) -> int:
        """Wait until the process has ended; return the number of the signal that ended it, 0 for none."""
        pid, self._pid = self._pid, 0
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) * -1
        return 0

    def _death(self) -> FsdpShardError:
        number = self._wait() if self._pid else 0
        if number == signal.SIGPROF:
            return self._excess("time", "seconds")
        name = signal.Signals(number).name if number > 0 else "no signal"
        return self._error(f"{self._what} ended the process that did it ({name}): the file is damaged or hostile.")

    def _excess(self, of: str, unit: str) -> FsdpShardError:
        return self._error(f"{self._what} takes too much {of}: {exceeded(f'{self._kind}_{unit}')}.")

    def _failure(self, error: BaseException) -> FsdpShardError:
        return self._error(f"{self._what} fails: {type(error).__name__}: {first_line(error)}")


def run_limited(
    work: Callable[[], R], what: str, num_bytes: int = 0, *, kind: str = "render", error: type[FsdpShardError]
) -> R:
    """Return `work()`, called once in a `LimitedProcess`."""
    with LimitedProcess[None, R](lambda _: work(), what, kind=kind, error=error) as process:
        return process(None, num_bytes)


def _serve(
    work: Callable[[Any], Any], connection: Connection, failure: Callable[[BaseException], FsdpShardError]
) -> None:
    """Answer calls until the other end is closed. Never returns: the parent's code must not run on here."""
    try:
        gc.freeze()  # or a collection could end a process group, whose threads are only in the parent
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):  # Rust writes a traceback there
            os.dup2(nowhere, descriptor)
        unlimited = resource.getrlimit(resource.RLIMIT_DATA)
        while True:
            argument, seconds, most_bytes = connection.recv()
            _limit_memory(most_bytes, unlimited)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = _answer(work, argument, failure)
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_DATA, unlimited)
            try:
                connection.send(answer)
            except Exception as error:  # a result that cannot be pickled
                connection.send((None, failure(error)))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _answer(work: Callable[[Any], Any], argument: Any, failure: Callable[[BaseException], FsdpShardError]) -> Any:
    """Return (result, error) of a call."""
    try:
        return work(argument), None
    except FsdpShardError as error:
        return None, error
    except BaseException as error:  # Rust's panics are not an Exception
        if is_out_of_memory(error):
            return None, _MEMORY
        found = failure(error)
        found.add_note(traceback.format_exc())
        return None, found


def _memory_bytes(pid: int, field: str = "RssAnon") -> int:
    """Return a process's memory, by default the private memory in RAM; 0 if unknown."""
    return (proc_field("status", field, pid) or 0) << 10


def _limit_memory(most_bytes: int, unlimited: tuple[int, int]) -> None:
    """Limit this process's private memory to `most_bytes` more than now."""
    soft, hard = unlimited
    used = _memory_bytes(os.getpid(), "VmData")
    known = [limit for limit in (used + most_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
