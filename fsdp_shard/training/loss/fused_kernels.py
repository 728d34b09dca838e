"""Fused kernels of another package in the place of a model's own norms, rotary positions and gated layers.

They are put in by transformers' own support for them. The loss is left alone: it divides by the predictions of all
ranks and micro-batches, and `loss_head.py` never has the logits whole either. Knows no wrapper.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fsdp_shard.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from fsdp_shard.sharding import ShardConfig

NONE = "none"

# Of liger's switches: the activation that a fused layer computes, whatever the model's config says.
_COMPUTES = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
_OUR_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def check_kernels(kernels: str, shard: ShardConfig, *, on_gpu: bool) -> None:
    """Raise ConfigError when `model.kernels` cannot be had on this machine, or not under `shard`."""
    if kernels == NONE:
        return
    if not on_gpu:
        raise ConfigError(
            f"model.kernels={kernels} is for GPUs, for which its kernels are compiled, but the ranks of this run are "
            f"on the CPU; set model.kernels=none."
        )
    if find_spec("liger_kernel") is None:
        raise ConfigError(
            f"model.kernels={kernels} needs liger-kernel, which is not installed. Install it with "
            f"pip install 'fsdp-shard[liger]', or set model.kernels=none."
        )
    for name in ("tensor_parallel", "expert_parallel"):
        if (num_ranks := getattr(shard, name)) > 1:
            raise ConfigError(
                f"model.kernels={kernels} does not go together with shard.{name}={num_ranks}: its kernels take whole "
                f"layers, not parts of them that are divided over ranks. Leave one of them out."
            )


def check_known(config: PretrainedConfig, kernels: str) -> None:
    """Raise ConfigError when liger has nothing for the model, or would compute another activation than it has.

    Nothing is put in: that changes transformers' classes too, for every model that is built after it.
    """
    if kernels == NONE:
        return
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN
    except ImportError as error:
        raise _cannot(kernels, config.model_type, error) from error
    if config.model_type not in KNOWN:
        raise ConfigError(
            f"model.kernels={kernels} would do nothing: liger-kernel has no kernels for models of type "
            f"{config.model_type}, only for {', '.join(sorted(KNOWN))}. Set model.kernels=none."
        )
    text = config.get_text_config()
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    for switch in inspect.signature(KNOWN[config.model_type]).parameters:
        if isinstance(activation, str) and activation not in _COMPUTES.get(switch, (activation,)):
            raise ConfigError(
                f"model.kernels={kernels} would change what the model computes: its activation is {activation}, and "
                f"liger-kernel's {switch} for {config.model_type} has {_COMPUTES[switch][0]}. Set model.kernels=none."
            )


def use_kernels(model: PreTrainedModel, kernels: str) -> int:
    """Put the fused kernels into `model` (not sharded yet, of any device); the number of modules that then have them.

    For one model in a process. Raises ConfigError as `check_known` does, and where nothing was changed.
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
            f"model.kernels={kernels} would do nothing: liger-kernel changed no module of {type(model).__name__}. Set "
            f"model.kernels=none."
        )
    return fused


def _cannot(kernels: str, what: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ConfigError(f"model.kernels={kernels} cannot be put into {what}: {reason}. Set model.kernels=none.")
