"""The set-up of a run that tests of `doctor` begin from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.doctor.setups import Setup


@pytest.fixture
def setup(tiny_model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    model, data = tmp_path / "model", tmp_path / "train.txt"
    shutil.copytree(tiny_model, model)
    shutil.copy(texts / "train.txt", data)
    with ExitStack() as undo:
        yield Setup(
            tmp_path, model, data, monkeypatch, undo,
            {
                "model.path": str(model), "data.path": str(data), "data.cache_dir": str(tmp_path / "cache"),
                "data.sequence_length": "64", "shard": "float32", "train.steps": "4", "launch.device": "cpu",
            },
        )  # fmt: skip
