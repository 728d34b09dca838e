"""Tiny random models in GGUF files: by the gguf package's own writer, read by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY, LAYERS = 64, 4, 2, 96, 32, 2
_TOKENS = ["<unk>", "<s>", "</s>", *(chr(ord("a") + i) for i in range(VOCABULARY - 3))]


def write_gguf(
    path: Path,
    architecture: str,
    kind: Any,
    *,
    tied: bool = False,
    extra: dict[str, Any] | None = None,
    values: dict[str, Any] | None = None,
) -> Path:
    """A tiny model with random weights, by the gguf package's own writer; matrices quantized to `kind`."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if "llama.rope.freq_base" not in (values or {}):
        writer.add_rope_freq_base(10000.0)
    for name, value in (values or {}).items():
        writer.add_key_value(name, *value)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(_TOKENS)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([1] * VOCABULARY)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, shape in _shapes(architecture, tied).items():
        data = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(architecture: str, tied: bool) -> dict[str, tuple[int, ...]]:
    # transformers does not read the head size of a GGUF file and takes its default for qwen3.
    head = 128 if architecture == "qwen3" else HIDDEN // HEADS
    q, kv = head * HEADS, head * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        inside: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if architecture == "qwen2":
            inside |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if architecture == "qwen3":
            inside |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in inside.items()}
    return shapes


def load_with_transformers(path: Path) -> PreTrainedModel:
    """The model that transformers makes of a GGUF file."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    return model
