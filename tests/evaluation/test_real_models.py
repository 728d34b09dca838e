"""Perplexity of real models: that of the loop of transformers' guide, from every format and under every device map.

`MODELS=DIR:DIR... NUM_TOKENS=4000 pytest -m slow tests/evaluation/test_real_models.py`; without MODELS it is skipped.
A GGUF file of the same weights that lies beside DIR as DIR.gguf is measured, too.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from fsdp_shard.checkpoint import convert
from fsdp_shard.data import DataConfig
from fsdp_shard.inference import load_dispatched
from tests.evaluation.measuring import guide_losses, measure

pytestmark = pytest.mark.slow

REAL = [Path(path) for path in os.environ.get("MODELS", "").split(os.pathsep) if path]
NUM_TOKENS = int(os.environ.get("NUM_TOKENS", "4000"))
FORMATS: dict[str, dict[str, Any]] = {
    "2 ranks": {"format": "sharded", "ranks": 2},
    "3 ranks": {"format": "sharded", "ranks": 3},
    "dcp": {"format": "dcp"},
}
MAPS: dict[str, dict[str, Any]] = {
    "cpu": {"device_map": "cpu"},
    "disk": {"device_map": "disk"},
    "budget": {"max_memory": {"cpu": "150MB"}},
}


def text_of(path: Path) -> str:
    """Prose of about NUM_TOKENS tokens."""
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    ids = AutoTokenizer.from_pretrained(path)(whole[: 8 * NUM_TOKENS], return_offsets_mapping=True)
    return whole[: ids["offset_mapping"][NUM_TOKENS - 1][1]]


@pytest.mark.skipif(not REAL, reason="MODELS=DIR:DIR... names no real models")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_every_format_and_device_map(path: Path, tmp_path: Path) -> None:
    length = min(512, AutoConfig.from_pretrained(path).max_position_embeddings)
    text = tmp_path / "text.txt"
    text.write_text(text_of(path), encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(path)(text.read_text(encoding="utf-8"))["input_ids"]
    expected = guide_losses(path, ids, length, length // 2)
    data = DataConfig(path=str(text), sequence_length=length, cache_dir=str(tmp_path / "cache"))
    sources = {"directory": path}
    for name, how in FORMATS.items():
        sources[name] = tmp_path / name
        convert(path, sources[name], verify=False, **how)
    gguf = path.with_name(f"{path.name}.gguf")
    if gguf.is_file():
        sources["gguf"] = gguf
    for source, directory in sources.items():
        for kind, where in MAPS.items():
            run_dir = tmp_path / f"run of {source}, {kind}"
            given = {"stride": length // 2, "batch_size": 2}
            row = measure(directory, data, run_dir, partial(load_dispatched, **where), **given)
            assert row["num_tokens"] == len(expected)
            assert row["loss"] == pytest.approx(float(expected.mean()), rel=1e-6), (source, kind)
