"""Models on the meta device: building one from its config, and computing the buffers that no checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ModelError
from fsdp_shard.models.transformers_private import build_from_config, initialize_buffers
from fsdp_shard.utils import first_line, non_persistent_buffers

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


def build_on_meta(
    config: PretrainedConfig,
    dtype: str | torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
    attention: str | None = None,
) -> PreTrainedModel:
    """Build a model on the meta device, with tied weights tied and in eval mode.

    Args:
        config: The config of the model. The class is the first of its `architectures`, or the causal LM of its type.
        dtype: Dtype of the parameters; None uses that of the config.
        trust_remote_code: Whether code that comes with the model may run.
        attention: Attention implementation, as named by transformers.

    Returns:
        The model; its parameters and buffers take no memory.

    Raises:
        ModelError: transformers cannot build the model.
    """
    import torch
    import transformers

    kwargs: dict[str, Any] = {"dtype": getattr(torch, dtype) if isinstance(dtype, str) else dtype or config.dtype}
    if attention is not None:
        kwargs["attn_implementation"] = attention
    named = config.architectures[0] if config.architectures else None
    cls = getattr(transformers, named, None) if named else None
    try:
        with torch.device("meta"):
            if cls is not None:
                model = build_from_config(cls, config, **kwargs)
            else:
                auto = transformers.AutoModelForCausalLM
                model = auto.from_config(config, trust_remote_code=trust_remote_code, **kwargs)
    except (ValueError, KeyError, ImportError, AttributeError) as error:
        raise ModelError(f"{named or config.model_type} cannot be built: {first_line(error)}") from error
    model.tie_weights()
    return model.eval()  # type: ignore[no-any-return]  # torch leaves eval() untyped here


def rebuild_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Compute the non-persistent buffers of a model (rotary frequencies, masks), which no checkpoint holds.

    transformers computes them in `_init_weights`, which `from_pretrained` calls too, so the values are bit-equal to
    its own. Parameters do not change: modules with such buffers have none, or they stay on the meta device.

    Args:
        model: A model whose buffers may be on the meta device.
        device: The device for the buffers.

    Raises:
        ModelError: A module outside of any transformers model has such buffers.
    """
    import torch

    with torch.no_grad():
        for module, owner in _with_owner(model, None):
            buffers = dict(non_persistent_buffers(module))
            if not buffers:
                continue
            if owner is None:
                raise ModelError(
                    f"The non-persistent buffers {', '.join(buffers)} of {type(module).__name__} cannot be computed on "
                    f"{device}: it is not part of a transformers model."
                )
            for name, buffer in buffers.items():
                setattr(module, name, torch.empty_like(buffer, device=device))
            initialize_buffers(owner, module)


def _with_owner(module: nn.Module, owner: PreTrainedModel | None) -> Iterator[tuple[nn.Module, PreTrainedModel | None]]:
    """Yield every module and the innermost transformers model around it."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        owner = module
    yield module, owner
    for child in module.children():
        yield from _with_owner(child, owner)
