"""`loss=module:function` of a file in the working directory, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import fsdp_shard
from tests.support.tiny import save_model

FOCAL = """
import torch.nn.functional as F

def focal(output, batch):
    labels = batch["labels"].flatten()
    each = F.cross_entropy(output.logits.flatten(0, 1).float(), labels, reduction="none", ignore_index=-100)
    return (each * (1 - (-each).exp()) ** 2).sum(), (labels != -100).sum()
"""


@pytest.mark.long
def test_a_loss_by_its_name(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a loss of one's own, on text that is short. " * 40)
    (tmp_path / "my_losses.py").write_text(FOCAL)
    settings = ["model.path=model", "data.path=text.txt", "data.eval_fraction=0.2", "data.sequence_length=16"]
    settings += ["train.steps=3", "launch.device=cpu", "run_dir=run", "loss=my_losses:focal"]
    done = fsdp_shard("finetune", *settings, "launch.ranks=2", cwd=tmp_path)
    assert done.status == 0, done
    assert "loss=my_losses:focal, not the cross-entropy: model.chunked_loss is off" in done.out + done.err
    assert "perplexity" not in done.out + done.err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["perplexity"] is None
    assert 0 < result["best_loss"] < 6

    refused = fsdp_shard("finetune", *settings[:-1], "train.steps=4", cwd=tmp_path)
    assert refused.status == 2
    assert "was trained with loss=my_losses:focal, so a run with loss=null cannot resume from it" in refused.err
    refused = fsdp_shard("doctor", *settings[:-1], "loss=my_losses:fokal", cwd=tmp_path)
    assert refused.status == 1
    assert "my_losses has no function fokal (did you mean focal?)" in refused.out + refused.err
