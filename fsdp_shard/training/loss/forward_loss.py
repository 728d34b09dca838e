"""The forward pass of a batch, up to its loss or to values of each predicted token."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_shard.data import NUM_PARTS, PROMPT_PART
from fsdp_shard.models import head_returns_answer_scores, model_run_errors, shared_prompt_masks
from fsdp_shard.sharding import attention_over, transformers_model
from fsdp_shard.training.loss.cross_entropy import cross_entropy
from fsdp_shard.training.loss.custom_functions import StepSums
from fsdp_shard.training.loss.device_batch import DeviceBatch, OwnPart
from fsdp_shard.training.loss.linear_cross_entropy import head_returns_loss, head_returns_rows
from fsdp_shard.training.loss.log_probs import LabelLogProbs
from fsdp_shard.training.loss.row_values import RowFunction, rows_of_logits


class WrappedModel(Protocol):
    """What a forward pass uses of a `ShardedModel`; that of a plan is not sharded."""

    @property
    def module(self) -> nn.Module:
        """The model in its wrapper, if it has one."""


def forward_loss(
    model: WrappedModel, batch: DeviceBatch, divisor: float | torch.Tensor, sums: StepSums | None = None
) -> torch.Tensor:
    """Run the forward pass and return the summed loss of a batch divided by `divisor`, a float32 scalar in nats.

    A causal model receives no attention mask: padding comes last, where no trained prediction sees it, and positions
    separate the documents of a window (`data/samples/packing.py`).

    Args:
        model: The model.
        batch: The batch.
        divisor: The divisor of the sum.
        sums: Accumulates the results of custom functions; a custom loss replaces the cross-entropy.
    """
    chunked: AbstractContextManager[bool] = nullcontext(False)  # custom functions need logits
    if sums is None or not sums.needs_output:
        chunked = head_returns_loss(model.module, batch.labels, divisor, batch.label_positions)
    with chunked as is_loss, attention_over(batch.sequence), forward_pass(model.module):
        output = model.module(**batch.inputs, use_cache=False)
    custom = None if sums is None else sums.add_micro_batch(output, {**batch.inputs, "labels": batch.labels})
    if custom is not None:
        return custom.float() / divisor
    return output.logits.reshape(()) if is_loss else cross_entropy(output.logits, batch.labels, divisor)


def forward_log_probs(model: WrappedModel, batch: DeviceBatch) -> torch.Tensor:
    """Run the forward pass of a causal model and return the log-probability of each label.

    Returns:
        float32 [num_rows, length] in nats, 0 for ignored labels. With a loss head, no logits are kept.
    """
    function = LabelLogProbs(batch.labels.flatten()[batch.label_positions])
    return forward_rows(model.module, batch, function).view(batch.labels.shape)


def forward_rows(module: nn.Module, batch: DeviceBatch, function: RowFunction) -> torch.Tensor:
    """Run the forward pass of a causal model and return values of each predicted token.

    Args:
        module: The model.
        batch: The batch.
        function: Computes the values; its rows are the trained labels.

    Returns:
        float32 [num_rows * length, num_values], 0 for ignored labels. With a loss head, no logits are kept.
    """
    if batch.own is not None:
        return _forward_own_rows(module, batch, batch.own, function)
    rows = batch.label_positions
    head_output = head_returns_rows(module, batch.labels.numel(), rows, function)
    with head_output as are_values, attention_over(batch.sequence), forward_pass(module):
        output = module(**_inputs(module, batch), use_cache=False)
    flat: torch.Tensor = output.logits.flatten(0, -2)
    return flat if are_values else rows_of_logits(flat, rows, function)


def _forward_own_rows(module: nn.Module, batch: DeviceBatch, own: OwnPart, function: RowFunction) -> torch.Tensor:
    """`forward_rows` for sequences divided over ranks: each receives the values of whole sequences; a collective."""
    num_rows, length = batch.labels.shape
    of_own, part = function.select(own.label_indices), own.inputs["input_ids"]
    with (
        head_returns_rows(module, part.numel(), own.label_positions, of_own) as are_values,
        attention_over(own.sequence),
        forward_pass(module),
    ):
        output = module(**own.inputs, use_cache=False)
    flat: torch.Tensor = output.logits.flatten(0, -2)
    values = flat if are_values else rows_of_logits(flat, own.label_positions, of_own)
    whole = own.sequence.ranks.gather(values.view(*part.shape, -1))
    return whole[:, :length].reshape(num_rows * length, -1)


def forward_answers(model: WrappedModel, batch: DeviceBatch) -> torch.Tensor:
    """Run the forward pass of a causal model and return the log-probability of each answer, float32 [num_answers]."""
    return batch.answer_sums(forward_log_probs(model, batch))


def forward_scores(model: WrappedModel, batch: DeviceBatch) -> torch.Tensor:
    """Run the forward pass of a model with one output and return that output for each answer, float32 [num_answers]."""
    module = model.module
    inside = None if batch.packed is None else transformers_model(module)
    reading = nullcontext() if inside is None else head_returns_answer_scores(inside, batch.label_positions)
    with reading, forward_pass(module):
        scores: torch.Tensor = module(**_inputs(module, batch), use_cache=False).logits
    return scores.float().squeeze(-1) if inside is None else scores.float()[0]


def _inputs(module: nn.Module, batch: DeviceBatch) -> dict[str, Any]:
    """The arguments of the model, with masks for answers that share prompts."""
    segments = None if batch.packed is None else batch.packed.segments
    if segments is None:
        return dict(batch.inputs)
    inside = transformers_model(module)
    assert inside is not None, "only a model of transformers was checked"
    positions = batch.inputs["position_ids"]
    segments = segments.to(positions.device)  # for a dispatched model, the device of its embeddings
    prompts = torch.div(segments - PROMPT_PART, NUM_PARTS, rounding_mode="floor") * NUM_PARTS + PROMPT_PART
    masks = shared_prompt_masks(inside, segments, prompts, positions)
    return {**batch.inputs, "attention_mask": masks}


@contextmanager
def forward_pass(module: nn.Module) -> Iterator[None]:
    """Run a wrapped model within the block, without warnings about its wrapper; its exceptions become ModelErrors."""
    with quiet_pass(), model_run_errors(module):
        yield


@contextmanager
def quiet_pass() -> Iterator[None]:
    """Run a forward or backward pass within the block, without the warnings about wrappers in torch (2.13 at least)."""
    with warnings.catch_warnings():
        # FSDP2 warns that outputs that are views (GPT-2's, and logits of sharded heads) must not be changed in place.
        # They are not.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        # torch.compile, and models that convert a module at run time, look at the gradients of parameters. Under FSDP1,
        # these are views of a flat parameter and have no gradients.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield
