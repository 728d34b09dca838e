"""One update of the weights from one global batch, over all ranks.

Every rank makes the same calls in the same order: what only one rank knows (its tokens, its loss, a signal that reached
it) is summed over the ranks before anyone acts on it. Knows the model by the `ShardedModel` protocol only.

The loss is the mean over the predictions of the *global* batch: each rank divides the sum of its own by (number of
predictions of all ranks and micro-batches / number of ranks), as the wrappers average gradients over the ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fsdp_shard.data import Batch, Dataset, micro_batches, source_names, source_predictions
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.loss.cross_entropy import cross_entropy
from fsdp_shard.training.loss.linear_cross_entropy import giving_loss
from fsdp_shard.training.stop_signal import STOP_SIGNALS, StopSignal
from fsdp_shard.utils import device_peak_bytes

if TYPE_CHECKING:
    from fsdp_shard.distributed import DistributedContext
    from fsdp_shard.sharding import ShardedModel


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step: the same on each of them. `memory_bytes` is the highest peak of any rank.

    `fault` says what was not finite, and on which samples; the weights are then as they were. Else it is empty.
    `source_tokens` are those of each source of a mixture, by its name; nothing of other data.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    memory_bytes: int
    stop_signal: int
    fault: str = ""
    source_tokens: Mapping[str, int] = field(default_factory=dict)


def train_step(
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset,
    samples: npt.NDArray[np.int64],
    config: TrainConfig,
    context: DistributedContext,
    *,
    stop: StopSignal,
    sync_every_micro_batch: bool,
) -> StepResult:
    """Update the weights from the windows `samples` of the whole global batch.

    `stop` is looked at when the gradients are there. When the loss or the norm of the gradients is not finite on any
    rank, neither weights nor optimizer are touched on any, and the result has a `fault`.
    """
    parts = micro_batches(samples, config.micro_batch_size, context.data_rank, context.num_data_ranks)
    batches = [dataset.batch(part) for part in parts]
    mine: list[float] = [sum(batch.num_predictions for batch in batches), *source_predictions(dataset, parts, batches)]
    # So many ranks see the same.
    num_tokens, *of_sources = (count / context.num_tensor_ranks for count in context.all_reduce(mine))
    optimizer.zero_grad()
    losses = _accumulate(
        model, batches, max(num_tokens, 1.0) / context.num_data_ranks, context.device, sync_every_micro_batch
    )
    limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
    grad_norm = float(model.clip_grad_norm_(limit))
    result = _agree(float(sum(losses)), grad_norm, int(num_tokens), stop.number, context)
    result = replace(result, source_tokens=dict(zip(source_names(dataset), map(int, of_sources), strict=True)))
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        optimizer.step()
    else:
        result = replace(result, fault=_fault(result, samples, parts, losses, context))
    optimizer.zero_grad()  # so that an evaluation or a save does not keep them
    return result


def _accumulate(
    model: ShardedModel, batches: list[Batch], divisor: float, device: torch.device, sync_every: bool
) -> list[torch.Tensor]:
    """Add up the gradients of the micro-batches; each one's part of the loss, as scalars on the device."""
    losses = []
    for number, batch in enumerate(batches, start=1):
        with nullcontext() if sync_every or number == len(batches) else model.no_sync():
            loss = forward_loss(model, batch, divisor, device)
            loss.backward()
        losses.append(loss.detach())
    return losses


def forward_loss(model: ShardedModel, batch: Batch, divisor: float, device: torch.device) -> torch.Tensor:
    """Summed cross-entropy of a batch over `divisor`, a float32 scalar on `device`.

    A causal model gets no attention mask: padding comes last, where no prediction that counts sees it, and documents
    that share a window are kept apart by their positions (`data/packing.py`).
    """
    inputs = {name: torch.from_numpy(value).to(device, non_blocking=True) for name, value in batch.inputs.items()}
    labels = torch.from_numpy(batch.labels).to(device, non_blocking=True)
    with giving_loss(model.module, labels, divisor) as is_loss, warnings.catch_warnings():
        # FSDP2 warns of models whose output is a view (GPT-2's), which must not be changed in place; it is not, here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        logits = model.module(**inputs, use_cache=False).logits
    return logits.reshape(()) if is_loss else cross_entropy(logits, labels, divisor)


def _agree(loss: float, grad_norm: float, num_tokens: int, stop_signal: int, context: DistributedContext) -> StepResult:
    """Bring together what each rank knows, in one sum: losses, norms, received signals, a place for each one's memory.

    The norm is the same on all ranks but for a fault of one of them, and then none may go on.
    """
    signals = [float(stop_signal == number) for number in STOP_SIGNALS]
    memory = [0.0] * context.world_size
    memory[context.rank] = float(device_peak_bytes(context.device.type))
    all_loss, all_norms, *summed = context.all_reduce([loss, grad_norm, *signals, *memory])
    received = (number for number, count in zip(STOP_SIGNALS, summed, strict=False) if count)
    return StepResult(
        loss=all_loss / context.world_size,
        grad_norm=grad_norm if math.isfinite(all_norms) else all_norms,
        num_tokens=num_tokens,
        memory_bytes=int(max(summed[len(signals) :])),
        stop_signal=int(next(received, 0)),
    )


def _fault(
    result: StepResult,
    samples: npt.NDArray[np.int64],
    parts: npt.NDArray[np.int64],
    losses: Iterable[torch.Tensor],
    context: DistributedContext,
) -> str:
    """What was not finite where, equal on all ranks; a collective, which all ranks reach or none."""
    mine = [int(i) for part, loss in zip(parts, losses, strict=True) if not math.isfinite(loss) for i in part]
    bad = sorted({index for rank in context.all_gather_object(mine) for index in rank})
    where = (
        f"in the loss of samples {bad}"
        if bad
        else f"in the gradients only; its samples are {sorted(set(map(int, samples)))}"
    )
    return f"loss {result.loss} and norm of the gradients {result.grad_norm}, not finite {where}"
