"""Every family of models, from every kind of checkpoint, under every map: bit for bit what transformers itself gives.

`MODELS=DIR:DIR...` does the same with real models; without it those tests are skipped.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from fsdp_shard.checkpoint import convert, open_checkpoint
from fsdp_shard.inference.dispatch import load_dispatched
from fsdp_shard.models import Block, no_split_blocks
from tests.inference.families import FAMILIES, inputs, random_model, settings

MAPS = ("cpu", "disk", "auto", "auto in less", "balanced", "balanced_low_0", "sequential", "named")
SOURCES: dict[str, dict[str, Any]] = {
    "2 ranks": {"format": "sharded", "ranks": 2},
    "8 ranks": {"format": "sharded", "ranks": 8},
    "dcp": {"format": "dcp", "ranks": 2},
}
REAL = [Path(path) for path in os.environ.get("MODELS", "").split(os.pathsep) if path]


def outputs(model: PreTrainedModel) -> list[torch.Tensor]:
    """Logits, and the tokens that the model goes on with, where it does."""
    given = inputs(model)
    with torch.no_grad():
        found = [model(**given).logits.clone()]
        if model.can_generate():
            first = {model.main_input_name: given[model.main_input_name]}
            generate: Any = model.generate
            found.append(generate(**first, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0))
    return found


def check_equal(path: Path, wanted: str, expected: list[torch.Tensor], blocks: list[Block]) -> None:
    model = load_dispatched(path, **settings(wanted, blocks))
    assert set(model.hf_device_map.values()) <= {"cpu", "disk"}
    if wanted not in ("cpu", "auto"):
        assert "disk" in model.hf_device_map.values()
    found = outputs(model)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs), wanted


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        random_model(family).save_pretrained(directory / family / "gathered")
        for source, how in SOURCES.items():
            convert(directory / family / "gathered", directory / family / source, sync=False, verify=False, **how)
    return directory


@cache
def known(family: str) -> tuple[list[torch.Tensor], list[Block]]:
    """What the plain model gives, which was never on a disk, and its blocks."""
    model = random_model(family)
    return outputs(model), no_split_blocks(model)


@pytest.mark.parametrize("wanted", MAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_map_gives_what_the_plain_model_gives(root: Path, family: str, wanted: str) -> None:
    check_equal(root / family / "gathered", wanted, *known(family))


@pytest.mark.parametrize("wanted", ["cpu", "disk", "auto in less"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_source_gives_what_the_plain_model_gives(root: Path, family: str, source: str, wanted: str) -> None:
    check_equal(root / family / source, wanted, *known(family))


def test_experts_are_merged_from_where_they_lie(root: Path) -> None:
    with open_checkpoint(root / "mixtral" / "gathered") as index:
        assert any("experts.2.w1" in name for name in index.names), "stored one by one"


@pytest.mark.skipif(not REAL, reason="MODELS=DIR:DIR... names no real models")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_real_models(path: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(path)
    plain: PreTrainedModel = getattr(transformers, config.architectures[0]).from_pretrained(path, dtype="auto")
    expected, blocks = outputs(plain.eval()), no_split_blocks(plain)
    del plain
    for wanted in MAPS:
        check_equal(path, wanted, expected, blocks)
    for source, how in SOURCES.items():
        target = convert(path, tmp_path / source, sync=False, verify=False, **how)
        assert target
        for wanted in ("cpu", "disk", "auto in less"):
            check_equal(tmp_path / source, wanted, expected, blocks)
