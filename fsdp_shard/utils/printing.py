"""Prints to the terminal safely, as lines may quote the content of files."""

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from fsdp_shard.utils.text import printable


def say(text: object, stream: TextIO | None = None) -> None:
    """Print the program's own lines, made `printable`, on standard output or the given stream."""
    print(printable(str(text)), file=stream or sys.stdout, flush=True)


@contextmanager
def until_unread(stream: TextIO) -> Iterator[None]:
    """Within the block, discard what is written to a stream from the time that nobody reads it.

    The terminal is closed, or the reader of a pipe has ended: Ctrl-C also ends `tee`, and a run has yet to save.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        discard(stream)


def discard(stream: TextIO) -> None:
    """Discard what is written to a stream, and what it holds: Python fails when it cannot flush that at exit."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a replacement in a notebook, or a closed stream
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def make_output_printable() -> None:
    """Make all output of this process safe for a terminal; a program calls this once.

    The messages of every logger become `printable`, as libraries quote the content of files. Characters that the output
    encoding lacks are escaped instead of raising UnicodeEncodeError.
    """
    logging.setLogRecordFactory(_PrintableRecord)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not its replacement in notebooks and tests
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def only_errors_of(library: str, level: int = logging.ERROR) -> Iterator[None]:
    """Drop log messages of a library, except errors.

    Args:
        library: Name of its logger, such as `transformers`.
        level: The lowest level to keep; `logging.WARNING` also keeps warnings.
    """
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


class _PrintableRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())
