"""How a command ended on a case, and which class of outcomes that is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.faults.corpus.case import Case
from tests.faults.harness.commands import READERS
from tests.support.cpu_speed import slowdown

# What a small file may cost, and what is a hang.
CPU_SECONDS, GROWTH_BYTES, WALL_SECONDS = 2.0, 200 << 20, 30.0
GOOD = ("clear error", "rightly accepted")
BAD = ("refused", "unclear", "exception", "hang", "memory", "silent", "harm")
_LONGEST = 2000  # characters of an error
# What a terminal obeys: all control characters but line ends and tabs, and what reverses the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@cache
def cpu_budget() -> float:
    """The processor time that a small file may cost on this machine.

    A few cases take nearly the two seconds that they may. So in `make check` the budget grows by what a slow processor
    takes longer; in `make faults` it does not.
    """
    return CPU_SECONDS if os.environ.get("FAULTS") == "long" else CPU_SECONDS * max(1.25, slowdown())


@dataclass
class Outcome:
    """What a command did.

    Attributes:
        status: Exit status of the command: 0, or that of its error; None if it raised what is no error of ours, or was
            ended.
        said: What it printed, standard error last.
        error: The error's one paragraph, or what it raised instead.
        cpu_seconds: Of the process and its children.
        growth_bytes: By which the process, or a child, was larger than before.
        hung: Whether it was ended for taking too long.
        root: Where the case was, which clear errors name.
        harm: Requests, imports, kernels asked for, and files outside the case that it opened or changed.
    """

    command: str
    status: int | None = None
    said: str = ""
    error: str = ""
    cpu_seconds: float = 0.0
    growth_bytes: int = 0
    hung: bool = False
    harm: list[str] = field(default_factory=list)
    root: str = ""

    def classify(self, case: Case) -> str:
        """One of GOOD or BAD."""
        for name, applies in (
            ("harm", bool(self.harm)),
            ("hang", self.hung),
            ("memory", self.cpu_seconds > cpu_budget() or self.growth_bytes > GROWTH_BYTES),
            ("exception", self.status is None or "Traceback (most" in self.said),
            ("unclear", bool(_CONTROL.search(self.said))),
        ):
            if applies:
                return name
        if self.status == 0:
            is_silent = case.expect == "error" and self.command in READERS[case.damages]
            return "silent" if is_silent else "rightly accepted"
        if case.expect == "accepted":
            return "refused"
        return "clear error" if self._is_clear() else "unclear"

    def _is_clear(self) -> bool:
        """Whether the error is one short paragraph, and it or what was printed before (verify's list) has the file."""
        lines = self.error.strip().splitlines()
        return len(lines) == 1 and len(lines[0]) <= _LONGEST and self.root in self.said

    def describe(self) -> str:
        """What went wrong, for the failure of a test."""
        cost = f"{self.cpu_seconds} s, {self.growth_bytes >> 20} MB"
        return f"{cost}; {self.harm or ''} {self.error or self.said}"[:600]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "said": self.said[-4000:]}
