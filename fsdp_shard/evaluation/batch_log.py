"""The file with losses or rewards of finished batches, from which a killed evaluation continues.

The first line is the fingerprint of all inputs; each further line holds a batch. A line is on disk before the next
batch begins. The incomplete line that a kill may leave is dropped, and its batch is computed again.
"""

import fcntl
import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

from fsdp_shard.distributed import Stopped
from fsdp_shard.errors import ConfigError, Interrupted
from fsdp_shard.inference import BATCH_MAJOR, SCHEDULES
from fsdp_shard.utils import json_digest, name_in_errors, try_lock

_LONGEST_LINE = 64 << 20  # bytes


class BatchValues(NamedTuple):
    """The indices of a batch's windows or texts, their values, the seconds it took, and the schedule.

    A window's value is the sum of its losses in nats; a text's value is its reward.
    """

    items: list[int]
    values: list[float]
    seconds: float
    schedule: str = BATCH_MAJOR


class BatchLog:
    """The file of one model's losses or rewards. A context manager: the file is locked until `close`.

    A signal that ends the evaluation inside the context is raised as Interrupted, which explains how to continue.

    Args:
        path: The file, which may exist. Its directory is created.
        inputs: All inputs that the values depend on, as JSON.
        batches: The items of each batch, in the order of computation.
        names: The file's names for items and values.

    Attributes:
        finished: The batches already in the file.
        changed: Names of the inputs that differ from those of the existing file, whose values are dropped.

    Raises:
        ConfigError: Another process writes the file.
    """

    def __init__(
        self,
        path: Path,
        inputs: Mapping[str, Any],
        batches: Sequence[Sequence[int]],
        names: tuple[str, str] = ("windows", "losses"),
    ) -> None:
        self.finished: list[BatchValues] = []
        self.changed: list[str] = []
        self._path, self._names = path, names
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._file: BinaryIO = os.fdopen(handle, "r+b")
        if not try_lock(handle, fcntl.LOCK_EX):
            self._file.close()
            raise ConfigError(f"{path} is being written by another evaluation; wait for it, or give another run_dir.")
        plain = json.loads(json.dumps(inputs))
        self._begin({"fingerprint": json_digest(plain), "inputs": plain}, batches)

    def append(self, batch: BatchValues) -> None:
        """Append a batch, and wait until it is on disk."""
        values = zip(self._names, (batch.items, batch.values), strict=True)
        self._write({**dict(values), "seconds": batch.seconds, "schedule": batch.schedule})
        self.finished.append(batch)

    def close(self) -> None:
        """Close the file, and release the lock."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if isinstance(error, Stopped | KeyboardInterrupt):
            number = error.number if isinstance(error, Stopped) else signal.SIGINT
            raise Interrupted(
                f"Stopped by {signal.Signals(number).name}. The {self._names[1]} of finished batches are in "
                f"{self._path}; give the same command with run_dir={self._path.parent} to continue after them.",
                signal_number=number,
            ) from error

    def _begin(self, header: dict[str, Any], batches: Sequence[Sequence[int]]) -> None:
        """Read the existing file; keep its complete batches if the inputs are the same, otherwise nothing."""
        found = self._read_line()
        if found is not None and found.get("fingerprint") == header["fingerprint"]:
            end = self._file.tell()
            for items in batches:
                if (batch := _batch_of(self._read_line(), items, self._names)) is None:
                    break
                self.finished.append(batch)
                end = self._file.tell()
            self._file.seek(end)
            self._file.truncate()
            return
        if found is not None:
            before, now = found.get("inputs"), header["inputs"]
            self.changed = _differences(before if isinstance(before, dict) else {}, now)
        self._file.seek(0)
        self._file.truncate()
        self._write(header)

    def _read_line(self) -> dict[str, Any] | None:
        line = self._file.readline(_LONGEST_LINE)
        try:
            values = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            return None
        return values if isinstance(values, dict) else None

    def _write(self, values: Mapping[str, Any]) -> None:
        with name_in_errors(self._path):
            self._file.write((json.dumps(values) + "\n").encode())
            self._file.flush()
            os.fsync(self._file.fileno())


def _batch_of(line: dict[str, Any] | None, items: Sequence[int], names: tuple[str, str]) -> BatchValues | None:
    """Return the batch in a line; None unless it is complete and has these items."""
    if line is None or line.get(names[0]) != list(items):
        return None
    values, seconds = line.get(names[1]), line.get("seconds")
    numbers = [*values, seconds] if isinstance(values, list) else []
    if len(numbers) != len(items) + 1 or not all(isinstance(one, float) and math.isfinite(one) for one in numbers):
        return None
    schedule = line.get("schedule", BATCH_MAJOR)
    return BatchValues(list(items), numbers[:-1], numbers[-1], schedule) if schedule in SCHEDULES else None


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of values that differ; for sections, with the names inside."""
    names: list[str] = []
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if old != new:
            both = isinstance(old, dict) and isinstance(new, dict)
            names += [f"{name}.{inner}" for inner in _differences(old, new)] if both else [name]  # type: ignore[arg-type]  # `both` says so
    return names
