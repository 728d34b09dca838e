"""What `verify` found: problems with the files, tensors and bytes they concern, and the report. Reads nothing."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from fsdp_shard.utils import format_size

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [start, stop) of a file of the checkpoint; None where it is the file as a whole."""

    file: str
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `places` are where; of several, nothing tells which it is (or they all are)."""

    message: str
    places: tuple[Place, ...] = ()
    tensor: str | None = None

    @property
    def file(self) -> str | None:
        return self.places[0].file if self.places else None

    @property
    def start(self) -> int | None:
        """The first byte that may be damaged, in `file`."""
        return self.places[0].start if self.places else None

    @property
    def stop(self) -> int | None:
        return self.places[0].stop if self.places else None


@dataclass(frozen=True)
class VerifyReport:
    """`content_checked` is False where there was no manifest to compare with; `checked` lists what was looked at then.

    `against` is the other checkpoint, where one was given, and `num_cast` how many tensors have another dtype in it.
    `not_read` are the kinds of tensors beside the weights, which nothing was looked for in.
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

    @property
    def is_sound(self) -> bool:
        return not self.problems

    def to_json(self) -> str:
        """For programs: one JSON object with the fields above, and `is_sound`."""
        return json.dumps({"is_sound": self.is_sound, **dataclasses.asdict(self)}, indent=2)

    def __str__(self) -> str:
        """For a terminal: a line a problem (of many the first), then what was checked."""
        lines = [problem.message for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"... and {len(self.problems) - _SHOWN:,} more problems; --json lists all.")
        if self.format is not None:
            lines.append(self._against() if self.against is not None else self._alone())
        return "\n".join(lines)

    def _alone(self) -> str:
        verdict = "DAMAGED" if self.content_checked else "WRONG"
        size = f"{self.num_tensors:,} tensors, {format_size(self.num_bytes)}"
        if self.content_checked:
            checked = f"every byte was compared with its digest in {self.seconds:.1f} s"
        else:
            checked = (
                f"checked in {self.seconds:.1f} s: {', '.join(self.checked)}; the content could not be checked, as "
                "there is no manifest with digests to compare it with"
            )
        if self.not_read:
            checked += f"; not read: {', '.join(self.not_read)} tensors"
        return f"{self.path}: {verdict if self.problems else 'sound'} ({size}; {checked})."

    def _against(self) -> str:
        size = f"{self.num_tensors:,} tensors, {format_size(self.num_bytes)}"
        cast = f"; {self.num_cast:,} of them in another dtype, compared after the cast" if self.num_cast else ""
        verdict = "differ" if self.problems else "have the same content"
        return f"{self.path} and {self.against} {verdict} ({size}{cast}; {self.seconds:.1f} s)."
