"""A model that is not trained, dispatched on every rank over its GPU, CPU memory and disk, within budgets.

It may be larger than the memory. The ranks divide the data, not the model.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from fsdp_shard.checkpoint import Location
from fsdp_shard.distributed import DistributedContext, run_on_all
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.loss.device_batch import DeviceBatch
from fsdp_shard.training.loss.forward_loss import forward_rows
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from fsdp_shard.training.loss.row_values import RowFunction
from fsdp_shard.utils import say


def open_dispatched(
    config: FinetuneSettings,
    source: Location,
    max_memory: Any,
    context: DistributedContext,
    what: str,
    dtype: str = "keep",
) -> PreTrainedModel:
    """Load and dispatch a model on every rank; a collective.

    Args:
        config: The settings of `finetune`.
        source: The model.
        max_memory: Budgets of each rank, as in `dispatch.max_memory`; None for all free memory.
        context: The ranks.
        what: Description of the model for messages.
        dtype: The dtype of the computation; `keep` for that of its weights.

    Raises:
        PlanError, CheckpointError, ModelError: On all ranks: the model does not fit, or cannot be read.
    """

    def log(text: str) -> None:
        if context.is_main:
            say(f"{what}: {text}", sys.stderr)

    model = run_on_all(context, lambda: config.load_dispatched(source, max_memory, context, log, dtype))
    use_loss_head(model, "auto", any_vocabulary=True)  # avoids full logits here, too
    return model


def dispatched_rows(model: PreTrainedModel, batch: DeviceBatch, function: RowFunction) -> torch.Tensor:
    """Return values of each predicted token like `forward_rows`, without gradients.

    Args:
        model: The model; its first device may differ from that of the batch.
        batch: The batch.
        function: Computes the values.

    Returns:
        float32 [num_rows * length, num_values] on the device of the model's output.
    """
    inputs = {name: value.to(model.device) for name, value in batch.inputs.items()}
    with torch.no_grad():
        return forward_rows(model, replace(batch, inputs=inputs, own=None), function)
