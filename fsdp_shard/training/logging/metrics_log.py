"""A log of JSON lines, one row a step, that a resumed run goes on with as if it had never stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsLog:
    """Appends rows that have a `step` to a file, each one written as soon as it is known.

    Rows after `resumed_step` are left over from a run that went further than its last checkpoint: they are cut off at
    the start, and so is a line that was never finished. With None the file begins anew.
    """

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        kept = [] if resumed_step is None else [row for row in read_rows(path) if row["step"] <= resumed_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._stream = path.open("ab", buffering=0)
        self._left = b""

    def write(self, row: Mapping[str, Any]) -> OSError | None:
        """Append one row; it must have a `step`. What the disk has no room for is kept, and tried with the next row.

        Returns why, as training is not to end for it.
        """
        self._left += _line(row).encode()
        try:
            while self._left:
                self._left = self._left[self._stream.write(self._left) :]
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of such a log; none when there is no file. Lines that are not whole are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [row for line in lines if (row := _parse(line)) is not None]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
