"""Builds the planned model on meta, with its adapter and quantized base."""

from copy import deepcopy

from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import models
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training import Adapter, AdapterConfig, LoraConfig, NewHead, inject_lora, quantize_base


def build_planned(
    config: PretrainedConfig,
    model: models.ModelConfig,
    adapter: AdapterConfig,
    dtype: str,
    quantized_for: ShardConfig | None = None,
) -> tuple[PreTrainedModel, Adapter | None]:
    """Build a model on meta as `finetune` would.

    Args:
        config: The model's config, which is not modified, although models of divided sequences change theirs.
        model: The settings `model.*`.
        adapter: The settings `adapter.*`.
        dtype: Dtype of the parameters.
        quantized_for: How a quantized base is sharded; None leaves the base unquantized.

    Returns:
        The model, and its adapter, if any.

    Raises:
        ModelError: The model cannot be built.
        ConfigError: The model has no modules for the adapter.
    """
    # Planning does not need flash-attn's kernels; they keep the same tensors as sdpa's flash kernel.
    attention = "sdpa" if model.attention == "flash_attention_2" else model.attention
    trust = model.trust_remote_code
    built = models.build_on_meta(deepcopy(config), dtype, trust_remote_code=trust, attention=attention)
    if not isinstance(adapter, LoraConfig):
        return built, None
    head = NewHead.of(built).modules if model.labels else ()
    injected, _ = inject_lora(built, adapter, model.path, {}, model.task, head)
    if quantized_for is not None:
        quantize_base(built, adapter.quantize, quantized_for, {})
    return built, injected
