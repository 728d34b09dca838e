"""Printing to the terminal, where lines may quote what files say."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from fsdp_shard.utils.text import printable


def say(text: object, stream: TextIO | None = None) -> None:
    """Print the program's own lines, made `printable`, on standard output unless another stream is given."""
    print(printable(str(text)), file=stream or sys.stdout, flush=True)


def make_output_printable() -> None:
    """Make what this process prints fit for a terminal: a program calls it once.

    The messages of every logger become `printable`, as libraries quote what they read from files; characters that the
    encoding of the output lacks are escaped, where Python would raise UnicodeEncodeError.
    """
    logging.setLogRecordFactory(_PrintableRecord)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not what replaces it in notebooks and tests
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def only_errors_of(library: str, level: int = logging.ERROR) -> Iterator[None]:
    """Drop what the loggers of a library say, except errors.

    Args:
        library: Name of its logger, such as `transformers`.
        level: What else is not dropped: `logging.WARNING` lets warnings through, too.
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
