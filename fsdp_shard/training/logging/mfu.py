"""Model FLOPs utilization (MFU): the operations that the model needs, divided by the peak throughput of the GPUs.

Unknown values are None, never a guess.
"""

from collections.abc import Callable
from typing import Any

import torch

from fsdp_shard.data import sources_of
from fsdp_shard.distributed import DistributedContext, peak_flops
from fsdp_shard.models import CAUSAL, NUM_EXPERTS
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.load_model import LoadedModel


def flops_per_token(config: Any, num_matmul_params: int, sequence_length: int) -> float | None:
    """Return the operations of the forward and backward pass per token: 6 N + 12 L H Q T.

    The formula is from Chowdhery et al., PaLM (2022), appendix B. Recomputed activations do not count; causal attention
    counts in full.

    Args:
        config: The transformers config, with L layers and H heads of size Q.
        num_matmul_params: N, the parameters except those that are only looked up.
        sequence_length: T, in tokens.

    Returns:
        None for configs whose layers, heads or experts do not fit the formula.
    """
    text = config.get_text_config()
    layers, heads, hidden = (
        getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return None
    parts = (text, getattr(text, "ffn_config", None))  # the second is DBRX's
    if any(getattr(part, name, None) for part in parts for name in NUM_EXPERTS):
        return None  # N would have to be the active parameters
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    return 6.0 * num_matmul_params + 12.0 * layers * heads * head_dim * sequence_length


def num_matmul_params(config: Any, num_params: int) -> int:
    """Return the number of parameters, excluding an input embedding that is not tied to the output head."""
    text = config.get_text_config()
    is_tied = getattr(config, "tie_word_embeddings", True)
    return num_params if is_tied else num_params - int(text.vocab_size) * int(text.hidden_size)


def trains_every_token(config: FinetuneSettings) -> bool:
    """Whether every token that the model reads is trained, and so counted by the run, rather than only answers."""
    text = all(source.kind == "text" for source in sources_of(config.data).values())
    return text and config.model.task == CAUSAL and config.objective.name == "sft"


def utilization(
    loaded: LoadedModel, param_dtype: str, sequence_length: int, context: DistributedContext
) -> Callable[[float], float] | None:
    """Return a function from all ranks' tokens per second to the utilization of their GPUs, from 0 to 1.

    The tokens are those that the model reads (`trains_every_token`).

    Returns:
        None on the CPU, for unknown GPUs and models, for dtypes other than bfloat16, and with frozen parameters, for
        which the formula would count gradients.
    """
    trains_all = all(param.requires_grad for param in loaded.model.module.parameters())
    if context.device.type != "cuda" or param_dtype != "bfloat16" or not trains_all:
        return None
    peak = peak_flops(torch.cuda.get_device_name(context.device))
    config = loaded.config
    per_token = flops_per_token(config, num_matmul_params(config, loaded.num_params), sequence_length)
    if peak is None or per_token is None:
        return None
    return lambda tokens_per_second: tokens_per_second * per_token / (peak * context.world_size)
