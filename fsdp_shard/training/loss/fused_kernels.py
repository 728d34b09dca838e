"""Liger Kernel's fused kernels for a model's norms, rotary embeddings and gated MLPs.

transformers' own integration applies them. Liger's loss is not used: ours is divided by the predictions of all ranks
and micro-batches, and `linear_cross_entropy.py` avoids the full logits, too.
"""

import inspect

from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.utils import require_package

NONE = "none"

# Liger Kernel switch -> the activations that its fused layer computes, regardless of the model's config.
_COMPUTES = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
_OUR_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def check_kernels(kernels: str, shard: ShardConfig, *, on_gpu: bool) -> None:
    """Raise ConfigError if `model.kernels` cannot be combined with these ranks."""
    if kernels == NONE:
        return
    if not on_gpu:
        raise ConfigError(
            f"model.kernels={kernels} is for GPUs, but the ranks of this run are on the CPU; set model.kernels=none."
        )
    for name in ("tensor_parallel", "expert_parallel"):
        if (num_ranks := getattr(shard, name)) > 1:
            raise ConfigError(
                f"model.kernels={kernels} cannot be combined with shard.{name}={num_ranks}, which divides layers "
                f"over ranks. Remove one of them."
            )


def check_installed(kernels: str) -> None:
    """Raise ConfigError if the package of `model.kernels` is not installed."""
    if kernels != NONE:
        require_package("liger_kernel", "liger", f"model.kernels={kernels}", "set model.kernels=none")


def check_known(config: PretrainedConfig, kernels: str) -> None:
    """Check that Liger Kernel supports a model, without applying the kernels.

    Applying them would also change transformers' classes, for every model that is built later.

    Raises:
        ConfigError: Liger Kernel has no kernels for the model, or they compute another activation.
    """
    if kernels == NONE:
        return
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as SUPPORTED
    except ImportError as error:
        raise _cannot(kernels, config.model_type, error) from error
    if config.model_type not in SUPPORTED:
        raise ConfigError(
            f"model.kernels={kernels} has no effect: liger-kernel has no kernels for models of type "
            f"{config.model_type}, only for {', '.join(sorted(SUPPORTED))}. Set model.kernels=none."
        )
    text = config.get_text_config()
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    for switch in inspect.signature(SUPPORTED[config.model_type]).parameters:
        if isinstance(activation, str) and activation not in _COMPUTES.get(switch, (activation,)):
            raise ConfigError(
                f"model.kernels={kernels} would change the model: its activation is {activation}, and "
                f"liger-kernel's {switch} for {config.model_type} has {_COMPUTES[switch][0]}. Set model.kernels=none."
            )


def use_kernels(model: PreTrainedModel, kernels: str) -> int:
    """Apply fused kernels to a model, once per process.

    Args:
        model: The model, not sharded yet, on any device.
        kernels: The setting `model.kernels`.

    Returns:
        The number of modules with fused kernels.

    Raises:
        ConfigError: The kernels do not support the model, or change none of its modules.
    """
    if kernels == NONE:
        return 0
    check_known(model.config, kernels)
    from transformers.integrations.liger import apply_liger_kernel

    own = {module: module.__dict__.get("forward") for module in model.modules()}
    try:
        apply_liger_kernel(model, dict(_OUR_LOSS))
    except (ImportError, TypeError, ValueError, AttributeError) as error:
        raise _cannot(kernels, type(model).__name__, error) from error
    fused = sum(module.__dict__.get("forward") is not forward for module, forward in own.items())
    if not fused:
        raise ConfigError(
            f"model.kernels={kernels} has no effect: liger-kernel changed no module of {type(model).__name__}. Set "
            f"model.kernels=none."
        )
    return fused


def _cannot(kernels: str, what: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ConfigError(f"model.kernels={kernels} cannot be applied to {what}: {reason}. Set model.kernels=none.")
