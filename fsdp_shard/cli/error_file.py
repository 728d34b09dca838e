"""`error.txt` in a run directory: the error that ended the run, where nobody may have read what it printed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fsdp_shard.cli.exit import message_of, traceback_of
from fsdp_shard.utils import ERROR, redact


def remove_error(run_dir: str) -> None:
    """Remove what an earlier start has left, so that a run that is killed is not shown with that error."""
    with suppress(OSError):  # what cannot be removed is nothing that keeps a run from starting
        (Path(run_dir) / ERROR).unlink(missing_ok=True)


def write_error(run_dir: str, error: BaseException) -> None:
    """Write an error to RUN_DIR/error.txt: its message on the first line, then its traceback.

    Of several ranks that others have started the first one writes. Nothing is written where there is no directory, or
    where it takes no more files: the error that is raised says more than that.
    """
    with suppress(OSError), (Path(run_dir) / ERROR).open("x", encoding="utf-8", errors="replace") as file:
        file.write(redact(f"{' '.join(message_of(error).split())}\n\n{traceback_of(error)}"))
