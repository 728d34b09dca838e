"""NEFTune (Jain et al., 2023): uniform noise on token embeddings, in training only; `train.neftune_alpha`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook

from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import transformers_model


class EmbeddingNoise:
    """Adds noise to the output of an embedding module, like transformers' Trainer with `neftune_noise_alpha`.

    For sequences of length L, including padding, and d dimensions, the noise is uniform in +-alpha / sqrt(L * d).
    Without gradients, no noise is added, so a reference model is unaffected.
    """

    def __init__(self, embeddings: nn.Module) -> None:
        self._embeddings, self._was_used = embeddings, False

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """The forward hook."""
        self._was_used = True
        if not torch.is_grad_enabled():
            return output
        noisy: torch.Tensor = neftune_post_forward_hook(module, args, output)
        return noisy

    def check_used(self) -> None:
        """Raise ConfigError if a step did not call the embeddings."""
        if not self._was_used:
            raise ConfigError(
                f"train.neftune_alpha has no effect: the forward pass of this model does not call its input embeddings "
                f"({type(self._embeddings).__name__}). Remove it."
            )


@contextmanager
def noisy_embeddings(module: nn.Module, alpha: float | None) -> Iterator[EmbeddingNoise | None]:
    """Within the block, add noise to the input embeddings of a model in training mode.

    Args:
        module: The model, sharded or not.
        alpha: Scale of the noise; None adds none.

    Yields:
        The noise, for checking that it was used.

    Raises:
        ConfigError: The model is not a transformers model with input embeddings.
    """
    if alpha is None:
        yield None
        return
    embeddings: Any = _input_embeddings(transformers_model(module))
    noise = EmbeddingNoise(embeddings)
    embeddings.neftune_noise_alpha = alpha  # where the hook looks for it
    handle = embeddings.register_forward_hook(noise)
    try:
        yield noise
    finally:
        handle.remove()
        del embeddings.neftune_noise_alpha


def _input_embeddings(model: PreTrainedModel | None) -> nn.Module:
    """The embeddings that the forward pass calls: an encoder may have a separate module for its shared weights."""
    found: Any = None
    if model is not None:
        encoder = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
        found = encoder.get_input_embeddings()
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"train.neftune_alpha needs a model of transformers with input embeddings, and {type(model).__name__} has "
            f"none. Remove it."
        )
    return found
