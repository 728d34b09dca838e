"""Each `type: ignore` names the error that it is for, and its line says why."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent.parent
_FOLDERS = ("fsdp_shard", "recipes", "tests", "benchmarks", "demo", "examples")
_WITH_REASON = re.compile(r"# type: ignore\[[a-z, -]+\]  # \S.*")


def _comments(file: Path) -> Iterator[tuple[int, str]]:
    with file.open("rb") as content:
        for token in tokenize.tokenize(content.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def test_each_says_why() -> None:
    files = [file for folder in _FOLDERS for file in sorted((_ROOT / folder).rglob("*.py"))]
    found = {
        f"{file.relative_to(_ROOT)}:{line}": text
        for file in files
        for line, text in _comments(file)
        if "type: ignore" in text
    }
    assert len(found) > 50, "the search finds them"
    assert [place for place, text in found.items() if not _WITH_REASON.match(text)] == []
