"""What `from_pretrained` drops or computes is no stranger, and the weights are those that it loads, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BartConfig, BertConfig, GPT2Config, MarianConfig, PreTrainedModel, RobertaConfig

from fsdp_shard.checkpoint import match_names, open_checkpoint
from fsdp_shard.checkpoint.location import locate
from fsdp_shard.errors import CheckpointError
from fsdp_shard.inference import load_dispatched
from fsdp_shard.models import build_on_meta, load_config
from tests.checkpoint.keys.matched_values import check_matched_values

Tensors = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 31,
}
BERT = BertConfig(**SIZES, max_position_embeddings=20)
ROBERTA = RobertaConfig(**SIZES, max_position_embeddings=20)
GPT2 = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=20)
SIZES_OF_BOTH: dict[str, Any] = {"d_model": 16, "vocab_size": 31, "max_position_embeddings": 20, "pad_token_id": 30} | {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in {"layers": 2, "attention_heads": 2, "ffn_dim": 24}.items()
}
MARIAN = MarianConfig(**SIZES_OF_BOTH, decoder_start_token_id=30)
BART = BartConfig(**SIZES_OF_BOTH)
POSITIONS = torch.arange(20)[None]
MASK = torch.ones(1, 1, 20, 20, dtype=torch.uint8)


def old_names(tensors: Tensors) -> Tensors:
    """As in the files of bert-base-uncased."""
    parts = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in [name for name in tensors if name.endswith(tuple(parts))]:
        stem, _, last = name.rpartition("LayerNorm.")
        tensors[stem + parts[f"LayerNorm.{last}"]] = tensors.pop(name)
    return tensors


CASES: dict[str, tuple[str, transformers.PretrainedConfig, str, Callable[[Tensors], Tensors], str]] = {
    # What was saved by which class, the class that config.json names, what else the file has, what is left out
    "minilm": ("BertModel", BERT, "BertModel", lambda t: t | {"embeddings.position_ids": POSITIONS}, ""),
    "bert": ("BertForPreTraining", BERT, "BertForMaskedLM", old_names, "bert.pooler.dense.bias, bert.pooler.dense"),
    "roberta": (
        "RobertaForMaskedLM",
        ROBERTA,
        "RobertaForMaskedLM",
        lambda t: t | {"roberta.embeddings.position_ids": POSITIONS, "roberta.pooler.dense.bias": torch.ones(16)},
        "left out roberta.pooler.dense.bias, which RobertaForMaskedLM does not have",
    ),
    "gpt2": (
        "GPT2Model",
        GPT2,
        "GPT2LMHeadModel",
        lambda t: t | {"h.0.attn.bias": MASK, "h.1.attn.bias": MASK.clone()},
        "",
    ),
    "marian": ("MarianMTModel", MARIAN, "MarianMTModel", lambda t: t, ""),
    "bart": (
        "BartForConditionalGeneration",
        BART,
        "BartForConditionalGeneration",
        lambda t: {name: tensor for name, tensor in t.items() if name != "final_logits_bias"},
        "",
    ),
}


def write(case: str, directory: Path) -> PreTrainedModel:
    """The files of a case; returns the model that `from_pretrained` makes of them."""
    saved, config, named, change, _ = CASES[case]
    torch.manual_seed(1)
    getattr(transformers, saved)(config).save_pretrained(directory)
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(directory / "model.safetensors")).items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    document = json.loads((directory / "config.json").read_text()) | {"architectures": [named]}
    (directory / "config.json").write_text(json.dumps(document))
    loaded: PreTrainedModel = getattr(transformers, named).from_pretrained(directory)
    return loaded


@pytest.mark.parametrize("case", CASES)
def test_what_from_pretrained_drops_or_computes(case: str, tmp_path: Path) -> None:
    note = check_matched_values(tmp_path, write(case, tmp_path))
    assert CASES[case][-1] in note
    assert bool(note) == bool(CASES[case][-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_computed_positions_wherever_their_block_is(tmp_path: Path, device_map: str, dtype: str) -> None:
    write("marian", tmp_path)
    expected = transformers.MarianMTModel.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    model = load_dispatched(tmp_path, device_map=device_map, dtype=dtype)
    tokens = {"input_ids": torch.tensor([[3, 5, 7]]), "decoder_input_ids": torch.tensor([[30, 2]])}
    with torch.inference_mode():
        assert torch.equal(model(**tokens).logits, expected.eval()(**tokens).logits)


def test_from_python_what_is_left_out_is_a_warning(tmp_path: Path) -> None:
    write("roberta", tmp_path)
    with pytest.warns(UserWarning, match="left out roberta.pooler.dense.bias") as warned:
        load_dispatched(locate(tmp_path).weights)
    # From 3.12 on, Python also warns of forks of a process with threads.
    assert [one.filename for one in warned if one.category is UserWarning] == [__file__]


def test_what_would_be_random_is_missing(tmp_path: Path) -> None:
    """transformers does not miss some weights that it then draws at random."""
    write("bart", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.encoder.layers.0.fc1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = build_on_meta(load_config(tmp_path))
    model._keys_to_ignore_on_load_missing = {"fc1", "final_logits_bias"}
    with (
        open_checkpoint(tmp_path) as index,
        pytest.raises(CheckpointError, match=r"lacks model\.encoder\.layers\.0\.fc1\.weight, which"),
    ):
        match_names(model, index)


def test_a_config_cannot_ask_for_any_number_of_positions(tmp_path: Path) -> None:
    write("marian", tmp_path)
    document = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 10**12}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"lacks model\.encoder\.embed_positions\.weight"):
        load_dispatched(tmp_path)
