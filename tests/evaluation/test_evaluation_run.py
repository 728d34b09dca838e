"""`recipes/evaluate.py`: the examples of its stages, and its run directory."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import fsdp_shard as fs
from fsdp_shard.data import DataConfig
from fsdp_shard.errors import ConfigError
from fsdp_shard.training import lock_directory


@pytest.mark.long
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


@pytest.mark.long
def test_the_directory_of_another_evaluation_stays_as_it_is(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    given = [f"checkpoint={tiny_model}", f"data.path={texts}/held_out.txt", f"run_dir={tmp_path}/run"]
    fs.evaluate([*given, "data.sequence_length=16"])
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with lock_directory(f"{tmp_path}/run"), pytest.raises(ConfigError, match="run is in use by another run"):
        fs.evaluate([*given, "data.sequence_length=32"])
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before
