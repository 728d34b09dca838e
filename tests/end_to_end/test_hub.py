"""What commands download of a hub id, from a hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.commands import FSDP_SHARD, run
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
