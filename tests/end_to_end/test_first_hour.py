"""docs/first-hour.md: its commands still run, end as they did, and print what it shows but for numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.tutorial_inputs import write_dictionary, write_model
from tests.support.commands import ROOT
from tests.support.transcript import commands_in, prepared, run_again, shape

pytestmark = pytest.mark.slow

DOCUMENT = ROOT / "docs" / "first-hour.md"


@pytest.mark.timeout(1500)
def test_the_first_hour_goes_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = write_dictionary(tmp_path / "dictionary.txt")
    model, work = write_model(tmp_path / "model", text), tmp_path / "work"
    work.mkdir()
    document = DOCUMENT.read_text(encoding="utf-8")
    again = commands_in(run_again(document, prepared(work, {model: "llama", text: "jargon.txt"})))
    for written, now in zip(commands_in(document), again, strict=True):
        assert now.failed == written.failed, now
        assert shape(now) == shape(written), now
