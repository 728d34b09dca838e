"""A JSON Lines log with one row per step, which a resumed run continues as if it had never stopped.

A row of metrics.jsonl is a `StepReport` of `training/loop.py`; `run_log.py` adds the MFU and writes the row.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import read_bounded, write_atomically

METRICS, EVALUATIONS, SAMPLES = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl"  # in a run directory
_MAX_LINE = 1 << 20  # bytes; a row has a few hundred
_MAX_STEP = 1 << 53  # below, every integer is exact as a float


class MetricsLog:
    """Appends rows with a `step` to a file, each as soon as it is known.

    Args:
        path: The file.
        resumed_step: Rows of later steps, from a run that went beyond its last checkpoint, and an incomplete line are
            removed. None starts a new file.
    """

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        kept = [] if resumed_step is None else [row for row in read_rows(path) if row["step"] <= resumed_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._stream = path.open("ab", buffering=0)
        self._pending = b""

    def write(self, row: Mapping[str, Any]) -> OSError | None:
        """Append a row. A row that cannot be written, as on a full disk, is kept and retried with the next one.

        Returns:
            The error, which need not end the training, or None.
        """
        self._pending += json.dumps(row).encode() + b"\n"
        try:
            while self._pending:
                self._pending = self._pending[self._stream.write(self._pending) :]
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a log, skipping incomplete or damaged lines; an empty list if there is no file.

    Raises:
        CheckpointError: See `read_lines`.
    """
    return [row for row in read_lines(path) if row is not None]


def read_lines(path: Path) -> list[dict[str, Any] | None]:
    """Read the row in each line of a log, None for an incomplete or damaged line; an empty list if there is no file.

    Raises:
        CheckpointError: The path is a link or not a regular file, or the file is too large.
    """
    if not os.path.lexists(path):
        return []
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}; it is not followed. Copy the file in its place."
        )
    return [_parse(line) for line in read_bounded(path, "metadata_bytes").splitlines()]


def of_last_held_out(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of evaluations.jsonl since a resume last changed the held-out data; earlier ones do not compare.

    A row's `held_out` is that of `TrainerState`. Rows of older runs lack it; they count as rows of the same data.
    """
    names = [str(row.get("held_out", "")) for row in rows]
    first = len(rows)
    while first and names[first - 1] == names[-1]:
        first -= 1
    return [dict(row) for row in rows[first:]]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line) if len(line) <= _MAX_LINE else None
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < _MAX_STEP
    return row if is_row else None
