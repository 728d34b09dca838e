"""Progress away from a terminal: lines that come often at first and seldom later, and none for short work."""

from __future__ import annotations

import io

import pytest

from fsdp_shard.utils.work_progress import report_progress


def _lines(seconds_each: float, total: int, unit: str = "") -> list[str]:
    now, stream = [0.0], io.StringIO()
    with report_progress(total, "evaluate", unit, stream, lambda: now[0]) as count:
        for _ in range(total):
            now[0] += seconds_each
            count(1)
    return stream.getvalue().splitlines()


def test_a_line_every_so_often() -> None:
    lines = _lines(1.0, 100, "windows")
    assert lines[0] == "evaluate: 2 of 100 windows, 2%, 0:01:38 left"
    assert [line.split()[1] for line in lines] == ["2", "6", "14", "30", "60", "90"]
    assert _lines(1.0, 10)[0] == "evaluate: 20%, 0:00:08 left"


def test_short_work_says_nothing() -> None:
    assert _lines(0.01, 100) == []
    assert _lines(10.0, 1) == []


def test_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    with report_progress(2, "evaluate", clock=iter([0.0, 10.0, 20.0]).__next__, enabled=False) as count:
        count(1)
        count(1)
    assert capsys.readouterr() == ("", "")
