"""`error.txt` in a run directory: the error that ended the run, in case nobody saw the output."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fsdp_shard.cli.exit import message_of, traceback_of
from fsdp_shard.utils import ERROR, redact


def remove_error(run_dir: str) -> None:
    """Remove the file of an earlier start, so a killed run is not shown with that error."""
    with suppress(OSError):  # a failure to remove it must not prevent a run from starting
        (Path(run_dir) / ERROR).unlink(missing_ok=True)


def write_error(run_dir: str, error: BaseException) -> None:
    """Write an error to RUN_DIR/error.txt: its message on the first line, then its traceback.

    Of several ranks that another program started, only the first one writes. Nothing is written if the directory does
    not exist or is not writable: the raised error is more important.
    """
    with suppress(OSError), (Path(run_dir) / ERROR).open("x", encoding="utf-8", errors="replace") as file:
        file.write(redact(f"{' '.join(message_of(error).split())}\n\n{traceback_of(error)}"))
