"""What an examination finds, and the report that they all go into. Knows nothing that is examined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fsdp_shard.errors import FsdpShardError, RunError

OK, SKIPPED, WARNING, PROBLEM = "ok", "-", "warn", "FAIL"


class Finding(NamedTuple):
    """One sentence for people, and what it means: WARNING lets a run go on, slower or worse; PROBLEM would end it."""

    mark: str
    text: str


def ok(text: str) -> Finding:
    return Finding(OK, text)


def skipped(missing: str) -> Finding:
    """What could not be looked at for want of settings."""
    return Finding(SKIPPED, f"not looked at; add {missing}")


def warning(text: str) -> Finding:
    return Finding(WARNING, text)


def problem(text: str) -> Finding:
    return Finding(PROBLEM, text)


class Report:
    """Hands each finding to `tell`, a line each, as soon as it is made. A problem is told once, whoever finds it."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._findings: list[Finding] = []

    def add(self, subject: str, look: Callable[[], Iterable[Finding]]) -> None:
        """Tell what `look` finds of `subject`. An error of ours, or of the system, that it raises is a problem."""
        for finding in _findings(look):
            if finding.mark == PROBLEM and finding in self._findings:
                continue
            self._findings.append(finding)
            self._tell(f"{subject:<9} {finding.mark:<4}  {finding.text}")

    def conclude(self) -> None:
        """Tell that there is no problem, or raise RunError."""
        counts = Counter(finding.mark for finding in self._findings)
        if counts[PROBLEM]:
            raise RunError(f"finetune would not get through: {_number(counts[PROBLEM], 'problem')}, marked FAIL above.")
        warned = f", {_number(counts[WARNING], 'warning')}" if counts[WARNING] else ""
        self._tell(f"\nNo problem found{warned}.")


def _findings(look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except FsdpShardError as error:
        yield problem(str(error))
    except OSError as error:
        yield problem(f"{error.filename or 'a file'}: {error.strerror or error}.")


def _number(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"
