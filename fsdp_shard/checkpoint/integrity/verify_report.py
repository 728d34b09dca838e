"""The result of `verify`: the report, and its problems with their files, tensors and bytes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_shard.checkpoint.io import member
from fsdp_shard.checkpoint.steps.manifest import FileRecord
from fsdp_shard.errors import CheckpointError, one_line
from fsdp_shard.utils import format_count, format_size

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, stop) of a file of the checkpoint; None for the file as a whole."""

    file: str
    start: int | None = None
    stop: int | None = None

    def text(self, root: Path) -> str:
        """Return `PATH, bytes FIRST-LAST`, for messages."""
        return f"{root / self.file}" + (f", bytes {self.start}-{self.stop - 1}" if self.stop is not None else "")


@dataclass(frozen=True)
class Problem:
    """An error in a checkpoint. If `places` has several ranges, any or all of them may be damaged."""

    message: str
    places: tuple[ByteRange, ...] = ()
    tensor: str | None = None

    @property
    def file(self) -> str | None:
        """The file of the first range."""
        return self.places[0].file if self.places else None

    @property
    def start(self) -> int | None:
        """The first byte that may be damaged, in `file`."""
        return self.places[0].start if self.places else None

    @property
    def stop(self) -> int | None:
        """The end of these bytes."""
        return self.places[0].stop if self.places else None


def size_problem(root: Path, name: str, record: FileRecord) -> Problem | None:
    """Return a problem if a file of a manifest is missing or does not have its written size."""
    try:
        path = member(root, name)
        size = path.stat().st_size
    except CheckpointError as error:
        return Problem(str(error), (ByteRange(name),))
    if size == record.size:
        return None
    return Problem(f"{path} has {size:,} bytes, but {record.size:,} were written.", (ByteRange(name),))


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`.

    Example:
        >>> report = fsdp_shard.verify("outputs/run")  # doctest: +SKIP
        >>> report.is_sound, [problem.message for problem in report.problems]  # doctest: +SKIP

    Attributes:
        path: The checkpoint.
        format: The name of its format; None if it could not be opened.
        num_tensors: The number of its tensors.
        num_bytes: Their logical bytes.
        content_checked: Whether there was a manifest with digests to compare every byte with.
        seconds: The duration of the check.
        problems: All errors found.
        checked: The checks other than of digests; the text names them if there is no manifest.
        against: The other checkpoint, if one was given.
        num_cast: The number of tensors whose dtype differs in the other checkpoint.
        not_read: The kinds of unchecked tensors that are not weights.
        notes: What was not compared or is unused.
    """

    path: str
    format: str | None
    num_tensors: int
    num_bytes: int
    content_checked: bool
    seconds: float
    problems: tuple[Problem, ...]
    checked: tuple[str, ...] = ()
    against: str | None = None
    num_cast: int = 0
    not_read: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_json(self) -> str:
        """Return a JSON object with the attributes above and `is_sound`, for programs."""
        return json.dumps({"is_sound": self.is_sound, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        """Return a line per problem (the first ones of many), then what was checked, for a terminal."""
        lines = [one_line(problem.message) for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"... and {len(self.problems) - _SHOWN:,} more problems; --json lists all.")
        lines += map(one_line, self.notes)
        if self.format is not None:
            lines.append(self._against() if self.against is not None else self._alone())
        return "\n".join(lines)

    def _size(self) -> str:
        return f"{format_count(self.num_tensors, 'tensor')}, {format_size(self.num_bytes)}"

    def _alone(self) -> str:
        verdict = "DAMAGED" if self.content_checked else "WRONG"
        if self.content_checked:
            checked = f"every byte was compared with its digest in {self.seconds:.1f} s"
        else:
            checked = (
                f"checked in {self.seconds:.1f} s: {', '.join(self.checked)}; the content could not be checked, as "
                "there is no manifest with digests to compare it with"
            )
        if self.not_read:
            checked += f"; not read: {', '.join(self.not_read)} tensors"
        return f"{self.path}: {verdict if self.problems else 'sound'} ({self._size()}; {checked})."

    def _against(self) -> str:
        cast = f"; {self.num_cast:,} of them in another dtype, compared after the cast" if self.num_cast else ""
        verdict = "differ" if self.problems else "have the same content"
        return f"{self.path} and {self.against} {verdict} ({self._size()}{cast}; {self.seconds:.1f} s)."
