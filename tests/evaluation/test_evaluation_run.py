"""The stages of `recipes/evaluate.py` from Python: the examples of their docstrings."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import fsdp_shard as fs
from fsdp_shard.data import DataConfig


@pytest.mark.parametrize("name", ["check_evaluation", "run_evaluation"])
def test_the_examples_run(
    name: str, tiny_model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"model": str(tiny_model), "data": DataConfig(path=f"{texts}/held_out.txt")}
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(fs, name), name, globs=given)
    result = doctest.DocTestRunner().run(found)
    assert result.attempted
    assert result.failed == 0
