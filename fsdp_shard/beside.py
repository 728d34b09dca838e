"""Two things at once as a program begins: a call in a process forked for it, while imports go on in this one.

Imports keep one core busy for seconds, and the interpreter's lock lets no thread use another. Knows nothing of configs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


def call_beside(function: Callable[[], T], meanwhile: Callable[[], object]) -> T:
    """What `function()` returns or raises, computed in a process of its own while `meanwhile()` runs here.

    `meanwhile` ends with the first import after the function has raised, and is not called where processes cannot be
    forked: it is to be what would be done later anyhow. To be called before there are other threads. What cannot be
    sent from there, or comes from nowhere as a process was killed, is computed here.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return function()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(function, sender), daemon=True)
    process.start()
    sender.close()
    try:
        assert process.pid is not None
        _until_failed(meanwhile, process.pid)
        told: tuple[T, Exception | None] | None = _received(receiver)
    finally:
        receiver.close()
        process.join()
    if told is None:
        return function()
    result, error = told
    if error is not None:
        raise error
    return result


def _received(receiver: Connection) -> Any:
    """What was sent, or None when nothing was."""
    try:
        return receiver.recv()
    except EOFError:
        return None


def _call(function: Callable[[], T], sender: Connection) -> None:
    """The process: sends what the function returned and what it raised, and fails if it has raised."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # its parent hears of them too, and is the one to speak
    result, error = None, None
    try:
        result = function()
    except Exception as raised:
        error = raised
    with suppress(Exception):  # of what cannot be pickled nothing comes, and the parent sees for itself
        sender.send((result, error))
    sys.exit(error is not None)


class _Failed(BaseException):
    """What is done meanwhile is not needed any more. Imports catch any Exception here and there, and so not this."""


class _Cut:
    """A finder of modules that finds none, and cuts the imports short when the process has failed.

    An import may fail wherever one is made, also within C++. What a handler of SIGCHLD raises comes anywhere, and where
    that is in a C++ function that may not throw, the program aborts.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        try:
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # whoever started this program had it ignore SIGCHLD, so the system keeps no account
            return
        # One that was killed has found nothing wrong: Ctrl-C is for both, and what is raised here must not replace it.
        if ended is not None and ended.si_code == os.CLD_EXITED and ended.si_status:
            raise _Failed


def _until_failed(meanwhile: Callable[[], object], pid: int) -> None:
    """Call `meanwhile()` to its end, or to the first import after the process has failed."""
    cut: Any = _Cut(pid)
    sys.meta_path.insert(0, cut)
    try:
        with suppress(_Failed):
            meanwhile()
    finally:
        sys.meta_path.remove(cut)
