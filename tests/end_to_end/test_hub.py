"""What commands download of a hub id, from a hub on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.commands import FSDP_SHARD, ROOT, run
from tests.support.hub import Hub, serve
from tests.support.tiny import save_model


@pytest.fixture(params=["safetensors", "bin"])
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hub]:
    repository = save_model(tmp_path / "repository")
    if request.param == "bin":
        from safetensors.torch import load_file

        torch.save(load_file(repository / "model.safetensors"), repository / "pytorch_model.bin")
        (repository / "model.safetensors").unlink()
    (repository / "README.md").write_text("# not needed\n")
    with serve(repository) as hub:
        yield hub


@pytest.mark.long
def test_a_plan_downloads_no_weights_and_who_reads_them_gets_them_later(hub: Hub, tmp_path: Path) -> None:
    where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    plan = run([*FSDP_SHARD, "plan", "model.path=org/name", f"run_dir={tmp_path / 'plan'}"], tmp_path, **where)
    assert plan.status == 0, plan.err
    assert "LlamaForCausalLM" in plan.out
    assert "config.json" in hub.served
    assert [name for name in hub.served if name.endswith((".safetensors", ".bin", ".md"))] == []
    convert = run([*FSDP_SHARD, "convert", "source=org/name", f"target={tmp_path / 'model'}"], tmp_path, **where)
    assert convert.status == 0, convert.err
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert len([name for name in hub.served if name.endswith((".safetensors", ".bin"))]) == 1


@pytest.mark.long
@pytest.mark.parametrize("hub", ["safetensors"], indirect=True)
def test_one_rank_per_machine_asks_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Of the ranks of torchrun, too, each of which is a process with a config of its own."""
    where = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1"}
    (tmp_path / "text.txt").write_text("some text to train on. " * 200)
    asked = {}
    launchers: dict[str, list[str]] = {"one": [], "joined": ["-m", "torch.distributed.run", "--nproc-per-node", "2"]}
    for name, launcher in launchers.items():
        settings = ["model.path=org/name", "data.path=text.txt", "train.steps=1"]
        hub.asked.clear()
        finetune = [f"{ROOT}/recipes/finetune.py", *settings, f"run_dir={name}", "checkpoint.every=0"]
        done = run([sys.executable, *launcher, *finetune], tmp_path, **where, HF_HOME=str(tmp_path / f"home-{name}"))
        assert done.status == 0, done.err
        asked[name] = sorted(hub.asked)
        recorded = (tmp_path / name / "config.yaml").read_text()
        assert "sequence_length: 128" in recorded, "settled by one rank, from the context of the model"
    assert asked["one"]
    assert asked["joined"] == asked["one"]
