"""Families of models: a small random one of each, what it is given, and device maps for it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from fsdp_shard.models import Block

SMALL = {"vocab_size": 131, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 64}
GQA = SMALL | {"num_key_value_heads": 2, "head_dim": 6}
GPT = {"vocab_size": 131, "n_embd": 24, "n_layer": 4, "n_head": 4, "n_positions": 64}
T5 = {"vocab_size": 131, "d_model": 24, "d_kv": 6, "d_ff": 45, "num_layers": 3, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
WHISPER: dict[str, Any] = {
    "vocab_size": 131,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_source_positions": 20,
}
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


def random_model(family: str) -> PreTrainedModel:
    """A model of this family with random weights, the same each time."""
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
