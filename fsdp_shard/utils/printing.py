"""Printing for people, where lines may quote what files say."""

import logging
import sys
from typing import TextIO

from fsdp_shard.utils.text import printable


def say(text: object, stream: TextIO | None = None) -> None:
    """Print lines of our own, made `printable`, on standard output unless another stream is given."""
    print(printable(str(text)), file=stream or sys.stdout, flush=True)


def make_logs_printable() -> None:
    """Make the messages of every logger of this process `printable`: libraries quote what they read from files."""
    logging.setLogRecordFactory(_PrintableRecord)


class _PrintableRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())
