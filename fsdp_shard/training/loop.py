"""The training loop and the evaluation: a generator of one report a step, and one report.

Saving, logging, stopping early and telling the user are the caller's, between one report and the next. Nothing here
reads a file or the environment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fsdp_shard.data import Dataset, evaluation_batches, go_to, place_in, sources_seen
from fsdp_shard.errors import LossError
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.optim.lr_schedule import learning_rate
from fsdp_shard.training.seeding import seed_all, step_seed
from fsdp_shard.training.step import forward_loss, train_step
from fsdp_shard.training.stop_signal import StopSignal
from fsdp_shard.training.trainer_state import TrainerState
from fsdp_shard.utils import keep_freed_memory

if TYPE_CHECKING:
    from fsdp_shard.distributed import DistributedContext
    from fsdp_shard.sharding import ShardedModel


@dataclass(frozen=True)
class StepReport:
    """What a step did, the same on all ranks but for the times; all but `stop_signal` and `fault` are a metrics row.

    `step` counts from 1. `loss` is nats a token, before the update. `tokens` are the predictions of this step over all
    ranks, `memory_bytes` the highest peak of any rank so far, `skipped` the steps so far that were not to change the
    weights. `stop_signal` is a signal that reached any rank, or 0. `fault` says why this step was skipped, or nothing.
    `sources` has the samples, tokens and epochs of each source of a mixture so far, and is left out for other data.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    memory_bytes: int
    skipped: int = 0
    stop_signal: int = 0
    fault: str = ""
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The step's line of metrics.jsonl; JSON has no NaN and no infinity, so they are null."""
        figures = {name: value for name, value in vars(self).items() if name not in ("stop_signal", "fault", "sources")}
        row = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        return row | ({"sources": dict(self.sources)} if self.sources else {})


@dataclass(frozen=True)
class EvalReport:
    """Held-out `loss` in nats a token and its exponential, over `num_tokens` predictions."""

    loss: float
    perplexity: float
    num_tokens: int
    seconds: float


def train(
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset,
    config: TrainConfig,
    context: DistributedContext,
    *,
    state: TrainerState,
    peak_lr: float,
    stop: StopSignal,
    sync_every_micro_batch: bool = True,
    around: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
) -> Iterator[StepReport]:
    """Train from where `state` stands to `config.steps`, one report a step; on all ranks alike.

    `state` is brought up to date before each report, so that it can be saved when it is received. After a report with a
    `stop_signal`, or an evaluation after which `state.stops_early`, there is no further one. With nothing left to do
    there is none at all. Raises LossError on all ranks, with the weights as they were, when the loss or gradients are
    not finite and `config.non_finite` does not let that step be skipped. Each step is made inside `around(its number)`.
    """
    model.module.train()
    if context.device.type == "cpu":
        keep_freed_memory()
    go_to(dataset, state.place)
    while state.step < config.steps and not state.stops_early(config.patience):
        began = time.perf_counter()
        rate = learning_rate(config, peak_lr, state.step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        seed_all(step_seed(state.seed, state.step, context.data_rank))
        samples = dataset.order(state.seed, state.num_samples, config.global_batch_size)
        with around(state.step + 1):
            result = train_step(
                model,
                optimizer,
                dataset,
                samples,
                config,
                context,
                stop=stop,
                sync_every_micro_batch=sync_every_micro_batch,
            )
            seconds = time.perf_counter() - began
        if result.fault and (config.non_finite == "stop" or state.num_skipped_in_row >= config.max_skips):
            raise LossError(_refusal(result.fault, state, config))
        state.advance(len(samples), result.num_tokens, result.source_tokens, skipped=bool(result.fault))
        state.place = place_in(dataset, state.num_samples)
        yield StepReport(
            step=state.step,
            loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            tokens=result.num_tokens,
            tokens_per_second=result.num_tokens / seconds,
            step_seconds=seconds,
            memory_bytes=result.memory_bytes,
            skipped=state.num_skipped,
            stop_signal=result.stop_signal,
            fault=result.fault,
            sources=sources_seen(dataset, state.num_samples, state.source_tokens),
        )
        if result.stop_signal:
            return


def _refusal(fault: str, state: TrainerState, config: TrainConfig) -> str:
    """The message of the LossError that ends a run in the step after `state`."""
    before, remedy = "", "leave such steps out with train.non_finite=skip"
    if config.non_finite == "skip":
        before = f", after {state.num_skipped_in_row} steps in a row that were skipped"
        remedy = f"allow more than train.max_skips={config.max_skips}"
    return (
        f"Step {state.step + 1} has {fault}{before}. The weights were not changed by it. Lower optim.lr, lengthen "
        f"train.warmup_steps, look at these samples (windows of data.path, counted from 0), or {remedy}."
    )


def evaluate_loss(
    model: ShardedModel, dataset: Dataset, micro_batch_size: int, context: DistributedContext
) -> EvalReport:
    """Mean loss over every prediction of `dataset`, each counted once on any number of ranks; a collective.

    Leaves the mode of the model as it was. Raises LossError when the loss is not finite.
    """
    began, was_training = time.perf_counter(), model.module.training
    model.module.eval()
    total, num_tokens = 0.0, 0
    with torch.no_grad():
        for indices in evaluation_batches(len(dataset), micro_batch_size, context.data_rank, context.num_data_ranks):
            batch = dataset.batch(indices)
            total += float(forward_loss(model, batch, 1.0, context.device))
            num_tokens += batch.num_predictions
    model.module.train(was_training)
    share = context.num_tensor_ranks  # so many ranks have counted the same
    all_loss, all_tokens = (value / share for value in context.all_reduce([total, num_tokens]))
    loss = all_loss / all_tokens if all_tokens else math.nan
    if not math.isfinite(loss):
        raise LossError(f"The held-out loss is {loss} over {int(all_tokens)} tokens: the weights are not usable.")
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return EvalReport(loss, perplexity, int(all_tokens), time.perf_counter() - began)
