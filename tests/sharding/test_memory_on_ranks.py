"""No rank ever holds a whole model: measured on one of real size, as a user would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.tiny import byte_tokenizer

LIMIT_BYTES = 480e6  # of the program, its libraries (100 MB are pyarrow and datasets) and all buffers together


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """135 M random parameters with the shape of SmolLM2-135M: 30 layers, a tied embedding of 113 MB."""
    directory = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
        initializer_range=0.0,
        dtype=torch.float32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_loading_holds_a_shard_and_little_more(wrapper: str, large_model: Path, texts: Path, tmp_path: Path) -> None:
    arguments = [
        f"run_dir={tmp_path / 'run'}",
        f"model.path={large_model}",
        f"data.path={texts}/held_out.txt",
        f"data.cache_dir={tmp_path}",
        "data.sequence_length=16",
        "launch.ranks=2",
        "train.steps=1",
        "train.global_batch_size=2",
        f"shard={wrapper}",
        "shard.param_dtype=float32",
        "checkpoint.optimizer=false",
    ]
    subprocess.run([sys.executable, "-m", "fsdp_shard", "finetune", *arguments], check=True, capture_output=True)
    load = json.loads((tmp_path / "run/result.json").read_text())["load"]
    assert load["shard_bytes"] == pytest.approx(134_515_008 * 4 / 2, rel=0.01)
    assert load["excess_bytes"] < LIMIT_BYTES, load
