"""A run to push, and a hub to push it to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_stand_in import HubStandIn, serve_hub
from tests.support.runs import run_recipe


@pytest.fixture(scope="session")
def trained(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run, `run`, an evaluation of its best step, `evaluated`, and a model directory, `tiny`."""
    root = tmp_path_factory.mktemp("trained")
    lines = (texts / "held_out.txt").read_text().splitlines()
    documents = [" ".join(lines[start : start + 15]) for start in range(0, 60, 15)]
    (root / "held.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents if one))
    common = (f"model.path={tiny_model}", f"data.path={texts / 'train.txt'}", "data.sequence_length=32")
    held_out = (f"data.eval_path={texts / 'held_out.txt'}", "train.eval_every=2")
    steps = ("train.steps=4", "checkpoint.every=2", "optim.lr=0.0123")
    whole = run_recipe("finetune", root / "run", *common, *held_out, *steps)
    assert whole.status == 0, whole.err
    evaluated = run_recipe(
        "evaluate",
        root / "evaluated",
        f"checkpoint={root / 'run'}@best",
        f"data.path={root / 'held.jsonl'}",
        "perplexity.by=documents",
    )
    assert evaluated.status == 0, evaluated.err
    shutil.copytree(tiny_model, root / "tiny")
    return root


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with serve_hub() as hub:
        yield hub
