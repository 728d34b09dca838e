"""A loaded model behind lm-evaluation-harness's interface: alone, or on ranks that divide the questions."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_shard.distributed import Communicator


def wrap_for_harness(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, ranks: Communicator
) -> Any:
    """Wrap a model as the harness's `LM`; needs the package lm_eval.

    Args:
        model: The model, with any dispatch.
        tokenizer: Its tokenizer.
        batch_size: Questions per batch.
        ranks: The ranks, which each hold the whole model and divide the questions.

    Returns:
        The harness's own transformers model, except for communication between ranks.
    """
    from lm_eval.models.huggingface import HFLM

    class RankedModel(HFLM):  # type: ignore[misc]  # the harness has no types
        """Use the run's ranks; the harness expects accelerate to have set them up."""

        @property
        def rank(self) -> int:
            return ranks.rank

        @property
        def world_size(self) -> int:
            return ranks.world_size

        def _model_call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            """The logits on the device of the tokens: with several GPUs, the output head may be on another one."""
            logits: torch.Tensor = super()._model_call(*args, **kwargs)
            return logits.to(self.device)

        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.tensor(ranks.all_gather_object(tensor.tolist()))

        def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
            return ranks.gather_object(obj)

        def barrier(self) -> None:
            ranks.barrier()

    return RankedModel(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
