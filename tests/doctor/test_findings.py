"""What a report makes of what examinations find, and of what they raise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp_shard.doctor.findings import Finding, Report, ok, problem, skipped, warning
from fsdp_shard.errors import ConfigError, RunError


def test_findings_are_told_one_a_line_and_warnings_let_the_run_go_on() -> None:
    lines: list[str] = []
    report = Report(lines.append)
    report.add("machine", [ok("2 cores"), warning("slow")])
    report.add("data", [skipped("data.path=...")])
    report.conclude()
    assert [line.split(maxsplit=2) for line in lines[:3]] == [
        ["machine", "ok", "2 cores"],
        ["machine", "warn", "slow"],
        ["data", "-", "not checked; add data.path=..."],
    ]
    assert lines[3].strip() == "No problem found, 1 warning."


def test_what_is_raised_is_a_problem_and_what_comes_after_is_still_looked_at() -> None:
    lines: list[str] = []
    report = Report(lines.append)

    def raises() -> Iterator[Finding]:
        yield ok("first")
        raise ConfigError("shard.x is wrong.")

    def cannot_read() -> Iterator[Finding]:
        open("/nowhere/at/all").close()
        yield ok("never")

    report.add("settings", raises())
    report.add("disk", cannot_read())
    report.add("ranks", [problem("two ranks, one GPU")])
    report.add("memory", raises())
    assert [line.split(maxsplit=2)[1:] for line in lines] == [
        ["ok", "first"],
        ["FAIL", "shard.x is wrong."],
        ["FAIL", "/nowhere/at/all: No such file or directory."],
        ["FAIL", "two ranks, one GPU"],
        ["ok", "first"],  # what was told of it already is not told again
    ]
    with pytest.raises(RunError, match="3 problems, marked FAIL above"):
        report.conclude()
