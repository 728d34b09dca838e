"""The findings of `doctor` checks, and their report."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fsdp_shard.distributed import LaunchConfig, is_joined_rank, joined_rank, num_local_ranks
from fsdp_shard.errors import FsdpShardError, RunError
from fsdp_shard.utils import format_count, say

OK, SKIPPED, WARNING, PROBLEM = "ok", "-", "warn", "FAIL"


class Finding(NamedTuple):
    """A sentence and its severity: a WARNING makes a run slower or worse, a PROBLEM would make it fail."""

    mark: str
    text: str


def ok(text: str) -> Finding:
    """Return a finding that requires no action."""
    return Finding(OK, text)


def skipped(missing: str) -> Finding:
    """Return the finding that a check was skipped because settings are missing."""
    return Finding(SKIPPED, f"not checked; add {missing}")


def warning(text: str) -> Finding:
    """Return a finding about something that makes a run slower or worse."""
    return Finding(WARNING, text)


def noted(line: str) -> Finding:
    """Return the finding for a line that a run prints, which may begin with `warning: `."""
    return warning(line.removeprefix("warning: ")) if line.startswith("warning: ") else ok(line)


def problem(text: str) -> Finding:
    """Return a finding about something that would make a run fail."""
    return Finding(PROBLEM, text)


def local_ranks(launch: LaunchConfig) -> tuple[int, str]:
    """Return the number of ranks on this machine, and its source: the setting, or a launcher's variable."""
    count = num_local_ranks(launch)
    return count, f"{'LOCAL_WORLD_SIZE' if is_joined_rank(launch) else 'launch.ranks'}={count}"


class Report:
    """Prints each finding on a line immediately, and a problem found by several checks only once.

    Args:
        print_line: Prints a line; by default to standard output, on the first of several ranks.
    """

    def __init__(self, print_line: Callable[[str], None] | None = None) -> None:
        self._print = print_line or (say if joined_rank() == 0 else lambda line: None)
        self._findings: list[Finding] = []

    def add(self, subject: str, findings: Iterable[Finding]) -> None:
        """Print the findings of a check.

        Args:
            subject: What was checked, in one word.
            findings: The findings, as they are made; an error of this package or the system raised by the iterator is
                reported as a problem.
        """
        for finding in _with_errors(findings):
            if finding.mark == PROBLEM and finding in self._findings:
                continue
            self._findings.append(finding)
            self._print(f"{subject:<9} {finding.mark:<4}  {finding.text}")

    def conclude(self) -> None:
        """Print that there are no problems, or raise RunError."""
        counts = Counter(finding.mark for finding in self._findings)
        if counts[PROBLEM]:
            raise RunError(f"finetune would fail: {format_count(counts[PROBLEM], 'problem')}, marked FAIL above.")
        warnings = f", {format_count(counts[WARNING], 'warning')}" if counts[WARNING] else ""
        self._print(f"\nNo problem found{warnings}.")


def _with_errors(findings: Iterable[Finding]) -> Iterator[Finding]:
    try:
        yield from findings
    except FsdpShardError as error:
        yield problem(str(error))
    except OSError as error:
        yield problem(f"{error.filename or 'a file'}: {error.strerror or error}.")
