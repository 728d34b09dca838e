"""A plan says nothing about attention or kernels of the machine that it is made on, whatever the architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.runs import run_recipe
from tests.support.sampled import sampled

_SIZE = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2}
_SSM = _SIZE | {"state_size": 4, "time_step_rank": 2}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
_GPT = _TOKENS | {"vocab_size": 257, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}
_HEADS = {"num_attention_heads": 2, "intermediate_size": 48}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gptj": _GPT,
    "codegen": _GPT,
    "bloom": {"vocab_size": 257, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "gpt_neox": _SIZE | _HEADS,
    "mpt": {"vocab_size": 257, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64},
    "falcon": _SIZE | {"num_attention_heads": 2},
    "mamba": _SSM,
    "mamba2": _SIZE | {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1},
    "falcon_mamba": _SSM,
    "rwkv": _SIZE | {"attention_hidden_size": 32},
    "recurrent_gemma": _SIZE | {"num_hidden_layers": 3, "num_attention_heads": 2, "lru_width": 32},
    "jamba": _SIZE | _HEADS | {
        "num_key_value_heads": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
        "mamba_d_state": 4, "mamba_dt_rank": 2,
    },
    "zamba2": _SIZE | _HEADS | {
        "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_d_state": 4, "mamba_ngroups": 1, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"], "use_mem_rope": False,
    },
    "xlstm": {"vocab_size": 257, "hidden_size": 64, "num_blocks": 2, "num_heads": 2},
    "apertus": _SIZE | _HEADS | _TOKENS,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", sampled(ARCHITECTURES, 3))
def test_a_plan_is_all_that_is_said(kind: str, tmp_path: Path) -> None:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    CONFIG_MAPPING[kind](architectures=[name], dtype="float32", **ARCHITECTURES[kind]).save_pretrained(tmp_path / kind)
    ended = run_recipe("plan", tmp_path / "run", f"model.path={tmp_path / kind}", "data.sequence_length=16")
    assert ended.status == 0, ended.err
    assert ended.err == ""
    assert ended.result["peak_bytes"] is not None
    assert "[transformers]" not in ended.out
    assert "Not counted: " in ended.out
