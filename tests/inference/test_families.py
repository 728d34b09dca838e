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

SMALL = {"vocab_size": 131, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 64}
GQA = SMALL | {"num_key_value_heads": 2, "head_dim": 6}
GPT = {"vocab_size": 131, "n_embd": 24, "n_layer": 4, "n_head": 4, "n_positions": 64}
T5 = {"vocab_size": 131, "d_model": 24, "d_kv": 6, "d_ff": 45, "num_layers": 3, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
WHISPER = {"vocab_size": 131, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 20}
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 44, "decoder_ffn_dim": 44}
WHISPER |= {"num_mel_bins": 8, "max_target_positions": 30, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
WHISPER |= {"decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None}
# Name -> class of the model, type and values of its config, dtype.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", "llama", GQA, "bfloat16"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", GQA | {"tie_word_embeddings": True}, "bfloat16"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", GQA | {"sliding_window": 5}, "float32"),
    "gpt2": ("GPT2LMHeadModel", "gpt2", GPT, "float16"),
    "gpt_neox": ("GPTNeoXForCausalLM", "gpt_neox", SMALL, "bfloat16"),
    "mixtral": ("MixtralForCausalLM", "mixtral", GQA | {"num_local_experts": 4, "intermediate_size": 48}, "bfloat16"),
    "t5": ("T5ForConditionalGeneration", "t5", T5, "float32"),
    "t5 with a head": ("T5ForConditionalGeneration", "t5", T5 | {"tie_word_embeddings": False}, "float32"),
    "whisper": ("WhisperForConditionalGeneration", "whisper", WHISPER, "float32"),
    "bert": ("BertForMaskedLM", "bert", SMALL, "float32"),
}
MAPS = ("cpu", "disk", "auto", "auto in less", "balanced", "balanced_low_0", "sequential", "named")
SOURCES = {
    "2 ranks": {"format": "sharded", "ranks": 2},
    "8 ranks": {"format": "sharded", "ranks": 8},
    "dcp": {"format": "dcp", "ranks": 2},
}
REAL = [Path(path) for path in os.environ.get("MODELS", "").split(os.pathsep) if path]


def random_model(family: str) -> PreTrainedModel:
    cls, kind, values, dtype = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **values)
    model: PreTrainedModel = getattr(transformers, cls)._from_config(config, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        if values.get("tie_word_embeddings") is False:  # the class ties what was trained apart
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
            model.all_tied_weights_keys.pop("lm_head.weight")
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # so that norms and biases are not all alike
    return model


def inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What the model is given, of the kind that it takes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, model.config.get_text_config().vocab_size, (2, 9), generator=generator)
    if model.main_input_name == "input_features":
        config = model.config
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator), "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :4]} if model.config.is_encoder_decoder else {})


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


def settings(wanted: str, blocks: list[Block]) -> dict[str, Any]:
    """A device map, and for those that divide a model a budget which is less than it needs."""
    sizes = [block.num_bytes for block in blocks]
    layers = [block for block in blocks if block.repeated]
    if wanted == "named":
        return {"device_map": {"": "disk", layers[-1].fqn: "cpu", layers[-2].fqn: "cpu"}}
    if wanted in ("cpu", "disk", "auto"):
        return {"device_map": wanted}
    least = max(sizes) + sum(size for size, block in zip(sizes, blocks, strict=True) if block.direct)
    budget = least + layers[0].num_bytes if wanted == "sequential" else max(sum(sizes) - layers[0].num_bytes, least)
    return {"device_map": wanted.split()[0], "max_memory": {"cpu": budget}}


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
