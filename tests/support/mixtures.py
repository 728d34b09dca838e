"""Small mixtures of experts, which two ranks share unevenly."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8}
SMALL |= {"vocab_size": 257, "max_position_embeddings": 128, "num_experts_per_tok": 2, "dtype": "float32"}
# Name -> type and values of its config: 3 experts a rank, which two ranks share unevenly; one layer without experts.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", SMALL | {"num_local_experts": 6, "intermediate_size": 44}),
    "qwen3_moe": (
        "qwen3_moe",
        SMALL | {"num_experts": 8, "moe_intermediate_size": 20, "mlp_only_layers": [0], "intermediate_size": 45},
    ),
    "qwen2_moe": (  # with an expert for all tokens
        "qwen2_moe",
        SMALL | {"num_experts": 8, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24},
    ),
}


def config(family: str, **settings: Any) -> Any:
    """The config of a model of this family; `settings` replace its values."""
    kind, values = FAMILIES[family]
    return AutoConfig.for_model(kind, **(values | settings))
