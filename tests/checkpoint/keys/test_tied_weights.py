"""Tied names that a checkpoint leaves out are those that its model ties."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    T5Config,
)

from fsdp_shard.checkpoint.keys.tied_weights import absent_ties, stored_twice
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.models import tied_names

SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 11,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen2, tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11),
    "t5": T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1, vocab_size=11),
    "t5 with its own head": AutoConfig.for_model(
        "t5", d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1, vocab_size=11, tie_word_embeddings=False
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_absent_ties_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    factory = AutoModelForSeq2SeqLM if name.startswith("t5") else AutoModelForCausalLM
    model = factory.from_config(CONFIGS[name])
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as index:
        assert index.aliases | absent_ties(index, tmp_path) == tied_names(model)
        assert stored_twice(index) == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    [("hidden_size", "many"), ("num_attention_heads", 0), ("hidden_act", ["silu"]), ("model_type", "unheard of")],
)
def test_a_model_that_cannot_be_built_has_no_known_ties(setting: str, value: object, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["llama, tied"]).save_pretrained(tmp_path)
    config = json.loads((file := tmp_path / "config.json").read_text())
    file.write_text(json.dumps(config | {"architectures": None, setting: value}))
    with open_checkpoint(tmp_path) as index:
        assert absent_ties(index, tmp_path) == {}


def test_usual_decoders_need_no_transformers(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["llama, tied"]).save_pretrained(tmp_path / "model")
    code = (
        "import sys; from fsdp_shard.checkpoint import convert\n"
        f"convert({str(tmp_path / 'model')!r}, {str(tmp_path / 'dcp')!r}, format='dcp')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with open_checkpoint(tmp_path / "dcp") as index:
        assert index.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
