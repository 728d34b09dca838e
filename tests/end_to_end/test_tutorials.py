"""docs/tutorials, docs/generation.md: their commands run, end as they did, and print what is shown but for numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.tutorial_inputs import write_dictionary, write_model
from tests.support.commands import ROOT
from tests.support.transcript import commands_in, prepared, run_again, shape

TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = [*sorted(TUTORIALS.glob("*.md")), ROOT / "docs" / "generation.md"]
SCRIPT = ROOT / "examples" / "fsdp2_loop.py"


@pytest.fixture(scope="module")
def begun_with(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """What the directory of each tutorial begins with."""
    place = tmp_path_factory.mktemp("begin")
    text = write_dictionary(place / "dictionary.txt")
    return {write_model(place / "model", text): "llama", text: "jargon.txt", SCRIPT: SCRIPT.name}


def test_the_script_is_the_example() -> None:
    page = (TUTORIALS / "fsdp2-script-to-text.md").read_text(encoding="utf-8")
    assert f"```python\n{SCRIPT.read_text(encoding='utf-8')}```\n" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_goes_as_it_is_written(
    document: Path, begun_with: dict[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    page = document.read_text(encoding="utf-8")
    again = commands_in(run_again(page, prepared(tmp_path, begun_with)))
    assert again
    for written, now in zip(commands_in(page), again, strict=True):
        assert now.failed == written.failed, now
        assert shape(now) == shape(written), now
