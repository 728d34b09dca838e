"""How much of a GPU's arithmetic a run uses (MFU): operations that the model needs, over what the device could do.

Pure functions of a config and a device's name. What is not known is left out, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_shard.distributed import DistributedContext
    from fsdp_shard.training.model_setup import LoadedModel

# Dense bfloat16 operations a second, from NVIDIA's and AMD's data sheets (without sparsity); the first match counts.
_PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    (r"\bGB200\b", 2.5e15),
    (r"\bB200\b", 2.25e15),
    (r"\bH200\b|\bGH200\b", 989.4e12),
    (r"\bH100\b.*\bPCIe\b", 756e12),
    (r"\bH100\b.*\bNVL\b", 835e12),
    (r"\bH100\b", 989.4e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA10\b", 125e12),
    (r"\bMI300X\b", 1307.4e12),
    (r"\bMI250X\b", 191.5e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU by the name that torch gives it; None for others."""
    return next((peak for pattern, peak in _PEAK_FLOPS if re.search(pattern, device_name, re.IGNORECASE)), None)


def flops_per_token(config: Any, num_matmul_params: int, sequence_length: int) -> float | None:
    """Operations of one token's forward and backward pass: 6 N + 12 L H Q T.

    From Chowdhery et al., PaLM (2022), appendix B, with N the parameters that are multiplied with (all but those that
    are looked up), L layers, H heads of size Q and T tokens in a sequence. Recomputed activations do not count, and
    causal attention counts in full, as there. None for configs whose layers, heads or experts it does not fit.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads, hidden = (
        getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return None
    if any(getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        return None  # N would have to be the parameters that a token meets
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    return 6.0 * num_matmul_params + 12.0 * layers * heads * head_dim * sequence_length


def num_matmul_params(config: Any, num_params: int) -> int:
    """All parameters of a model but an embedding that is not its output head too."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    is_tied = getattr(config, "tie_word_embeddings", True)
    return num_params if is_tied else num_params - int(text.vocab_size) * int(text.hidden_size)


def utilization(
    loaded: LoadedModel, param_dtype: str, sequence_length: int, context: DistributedContext
) -> Callable[[float], float] | None:
    """From the tokens a second of all ranks to the part of their GPUs' arithmetic that the model needed, 0 to 1.

    None on the CPU, on GPUs and for models that are not known, in other types than bfloat16, and with frozen
    parameters, for which the formula would count gradients that nobody computes.
    """
    import torch

    module = loaded.model.module
    if (
        context.device.type != "cuda"
        or param_dtype != "bfloat16"
        or any(not p.requires_grad for p in module.parameters())
    ):
        return None
    peak = peak_flops(torch.cuda.get_device_name(context.device))
    config = loaded.config
    each = flops_per_token(config, num_matmul_params(config, loaded.num_params), sequence_length)
    if peak is None or each is None:
        return None
    return lambda tokens_per_second: tokens_per_second * each / (peak * context.world_size)
