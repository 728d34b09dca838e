"""Scripts in examples/ with torch's own checkpoints: what they save is read, and what is written for them loads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.location import open_checkpoint
from tests.support.tiny import save_model
from tests.support.torchrun import start_script

_ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object, cwd: Path) -> None:
    process = start_script(_ROOT / script, *arguments, cwd=cwd)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output


def keys_of(path: Path) -> set[str]:
    metadata: Metadata = FileSystemReader(path).read_metadata()
    return set(metadata.state_dict_metadata)


def assert_equal_weights(one: Path, two: Path) -> None:
    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (one, two))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.long
def test_a_plain_loop_and_back(tmp_path: Path) -> None:
    """Weights go into it as DCP with its nesting, unchanged where it trains no step; what it trains comes out."""
    save_model(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "given", format="dcp", ranks=2, nest="app.model")
    run("examples/dcp_loop.py", tmp_path / "given", tmp_path / "kept", tmp_path / "model", 0, cwd=tmp_path)
    convert(tmp_path / "kept", tmp_path / "same", config=tmp_path / "model")
    assert_equal_weights(tmp_path / "same", tmp_path / "model")
    run("examples/dcp_loop.py", tmp_path / "given", tmp_path / "trained", tmp_path / "model", 2, cwd=tmp_path)
    with open_checkpoint(tmp_path / "trained") as index:
        assert index.extras["optimizer"].num_tensors > 0
    convert(tmp_path / "trained", tmp_path / "other", config=tmp_path / "model")
    convert(tmp_path / "other", tmp_path / "again", format="dcp", nest="app.model")
    assert {key for key in keys_of(tmp_path / "trained") if key.startswith("app.model.")} == keys_of(tmp_path / "again")


@pytest.mark.long
def test_the_layout_of_torchtitan_and_back(tmp_path: Path) -> None:
    """Flat names. Its checkpoints are found in the directory of the run, the newest step first."""
    save_model(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "given", format="dcp")
    saved = tmp_path / "outputs" / "checkpoint"
    run("examples/dcp_torchtitan.py", tmp_path / "given", tmp_path / "model", saved / "step-10", cwd=tmp_path)
    assert keys_of(saved / "step-10") == keys_of(tmp_path / "given")
    convert(tmp_path / "outputs", tmp_path / "same", config=tmp_path / "model")
    assert_equal_weights(tmp_path / "same", tmp_path / "model")


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitan_and_back(tmp_path: Path) -> None:
    """Its own manager of checkpoints, and so its own keys."""
    save_model(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "given", format="dcp", ranks=3)
    outputs = tmp_path / "outputs"
    run("tests/support/torchtitan_loop.py", tmp_path / "given", tmp_path / "model", outputs, cwd=tmp_path)
    assert keys_of(outputs / "checkpoint" / "step-10") == keys_of(tmp_path / "given")
    convert(outputs, tmp_path / "same", config=tmp_path / "model")
    assert_equal_weights(tmp_path / "same", tmp_path / "model")
