"""The training loop: a generator of one report per step. A step updates the weights from one global batch.

The caller saves, logs, evaluates and stops early between reports. Nothing here reads a file or the environment. Every
rank makes the same calls in the same order: values known to one rank only (its tokens, its loss, a signal that it
received) are reduced over the ranks before any rank acts on them.

The loss is the mean over the predictions of the *global* batch: each rank divides its own sum by (predictions of all
ranks and micro-batches / number of ranks), as the wrappers average gradients over the ranks. With
`shard.context_parallel`, a rank holds a part of each sequence and sums over the predictions of its own tokens.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_shard.data import Dataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, LossError
from fsdp_shard.sharding import ShardedModel, free_gathered
from fsdp_shard.training.batch_loader import BatchLoader, StepBatches
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.dataset_figures import finite, source_figures
from fsdp_shard.training.loss.custom_functions import CustomFunctions, StepSums
from fsdp_shard.training.loss.forward_loss import quiet_pass
from fsdp_shard.training.neftune import noisy_embeddings
from fsdp_shard.training.objectives.objective import ForwardPass, ObjectiveConfig, Reference, Teacher
from fsdp_shard.training.optim.build import check_parameters, check_steps
from fsdp_shard.training.optim.ema import WeightAverage
from fsdp_shard.training.optim.lr_schedule import learning_rate
from fsdp_shard.training.seeding import derived_seed, seed_all
from fsdp_shard.training.stop_signal import StopSignal
from fsdp_shard.training.trainer_state import TrainerState
from fsdp_shard.utils import copy_to, device_peak_bytes, format_count


@dataclass
class TrainingRun:
    """A model in training, with its progress.

    Attributes:
        model: The sharded model.
        optimizer: Its optimizer; the learning rate of each group is the peak of the schedule.
        dataset: The samples, in training order.
        config: Loop settings; `epochs` is converted to a number of steps when the run is created.
        context: The training ranks.
        state: Progress of the run; the loop updates it after each step.
        stop: Signals that ask the run to stop.
        sync_every_micro_batch: Whether gradients are reduced after every micro-batch, or once per step.
        profile: Returns the context manager in which the step with this number runs.
        functions: A custom loss and metrics.
        objective: The training objective.
        reference: The reference model or the teacher, for objectives that need one.
        average: Average of the weights, updated after every step that is not skipped.
        interrupted_by: The signal that stopped the run before its last step, or 0.

    Raises:
        ConfigError: The optimizer is of parameters that the model does not have, has no learning rate, or cannot step
            without a closure.

    Example:
        >>> run = TrainingRun(model, optimizer, dataset, TrainConfig(steps=100), context, state)  # doctest: +SKIP
        >>> run.functions.loss = focal_loss  # doctest: +SKIP
    """

    model: ShardedModel
    optimizer: torch.optim.Optimizer
    dataset: Dataset
    config: TrainConfig
    context: DistributedContext
    state: TrainerState
    stop: StopSignal = field(default_factory=StopSignal)
    sync_every_micro_batch: bool = True
    profile: Callable[[int], AbstractContextManager[None]] = field(default=lambda step: nullcontext())
    functions: CustomFunctions = field(default_factory=CustomFunctions)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    reference: Reference | Teacher | None = None
    average: WeightAverage | None = None
    interrupted_by: int = field(default=0, init=False)
    _rates: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_steps(self.optimizer)
        check_parameters(self.optimizer, self.model)
        # Each source of a mixture has its own epochs.
        self.state.samples_per_epoch = None if self.dataset.source_names else self.dataset.num_samples
        self.config = self.config.for_data(self.state.samples_per_epoch, self.state.step, self.state.num_samples)

    @property
    def is_over(self) -> bool:
        """Whether no step follows: the last step is done, evaluations no longer improve, or a signal was received."""
        is_done = self.state.step >= self.config.num_steps or self.state.stops_early(self.config.patience)
        return is_done or bool(self.interrupted_by)


@dataclass(frozen=True)
class StepReport:
    """A finished step. Everything but `stop_signal` and `fault` is a row of metrics.jsonl.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean loss before the update, in nats per token, or per pair for objectives of pairs.
        learning_rate: Learning rate of the update.
        grad_norm: Norm of the gradients before clipping.
        tokens: Predictions of this step on all ranks.
        tokens_per_second: Throughput of all ranks together.
        step_seconds: Duration on this rank.
        data_seconds: Time that the step waited for its samples, averaged over the ranks.
        memory_bytes: Highest memory peak of any rank so far.
        skipped: Number of skipped updates so far.
        stop_signal: A signal that any rank received, or 0.
        fault: Reason why this step was skipped, or empty.
        sources: Samples, tokens and epochs so far, for each source of a mixture.
        epoch: Epochs so far; None for streams and mixtures.
        total_tokens: Predictions of all steps so far, including those before a resume.
        metrics: Means of the objective's metrics and of custom metrics, by name.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    data_seconds: float
    memory_bytes: int
    skipped: int = 0
    stop_signal: int = 0
    fault: str = ""
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    epoch: float | None = None
    total_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """The row of metrics.jsonl, with null in place of NaN and infinity, which JSON cannot represent."""
        excluded = ("stop_signal", "fault", "sources", "metrics")
        row = finite({name: value for name, value in vars(self).items() if name not in excluded})
        row |= {"sources": dict(self.sources)} if self.sources else {}
        return row | ({"metrics": finite(self.metrics)} if self.metrics else {})


def train(run: TrainingRun) -> Iterator[StepReport]:
    """Train until the run is over; a collective.

    `run.state` is updated before each report, so the caller can save it on receiving the report. Once `run.is_over`, no
    step follows. At its end, the generator frees parameters that are still gathered.

    Args:
        run: The run, at any step.

    Yields:
        A report of each step, as soon as the step is done.

    Raises:
        ConfigError: The run has a custom loss or metrics, and an objective with its own; or one of `run.functions`
            cannot be called, or returns a wrong value.
        LossError: On all ranks, with the weights of the previous step: the loss or the gradients are not finite, and
            `config.non_finite` does not allow skipping the step.

    Example:
        >>> for report in train(run):  # doctest: +SKIP
        ...     print(report.step, report.loss)
    """
    run.functions.check()
    if not run.objective.is_cross_entropy and (run.functions.loss or run.functions.metrics):
        raise ConfigError(
            f"objective={run.objective.name} computes its own loss and metrics, so those of run.functions, which are "
            f"for objective=sft, would be ignored; remove them, or change the objective's file."
        )
    run.model.module.train()
    run.dataset.load_state_dict(run.state.dataset_state)
    with (
        BatchLoader(run.dataset, run.config, run.context, run.model.module, run.objective) as loader,
        noisy_embeddings(run.model.module, run.config.neftune_alpha) as noise,
    ):
        while not run.is_over:
            with run.profile(run.state.step + 1):
                report = _train_step(run, loader)
            if noise is not None:
                noise.check_used()
            if report.step < run.config.num_steps:  # after the last step there is nothing to interrupt
                run.interrupted_by = report.stop_signal
            yield report
        free_gathered(run.model.module)


def _train_step(run: TrainingRun, loader: BatchLoader) -> StepReport:
    """Update the weights from the next global batch, and record it in `run.state`; a collective.

    If the loss or the gradient norm is not finite on any rank, no rank changes its weights or its optimizer.

    Args:
        run: The run.
        loader: The samples of the run.

    Raises:
        LossError: On all ranks: the loss or the gradients are not finite, and the settings do not allow skipping the
            step.
    """
    began = time.perf_counter()
    config, context, state = run.config, run.context, run.state
    rate = _set_learning_rate(run)
    seed_all(derived_seed(state.seed, state.step, context.seed_rank))
    batches = loader.next(state.num_samples, is_last=state.step + 1 >= config.num_steps)
    context.all_reduce_(batches.counts)
    run.optimizer.zero_grad()  # of backward passes that the caller made
    term_counts, token_counts = batches.counts.tensor_split([run.objective.num_terms])
    # Tensor-parallel ranks count the same samples, so (counts / tensor ranks) / data ranks is counts / all ranks.
    # Context-parallel ranks count their own parts, or parts of all.
    # Without any prediction the loss is 0, not NaN.
    divisors = (term_counts.clamp(min=context.num_tensor_ranks) / context.world_size).float()
    sums = StepSums(run.functions, context)
    losses = _accumulate(run, batches, divisors, sums)
    own_loss = sums.rescale_gradients(run.model.module, sum(losses[1:], losses[0]), divisors[0])
    norm = run.model.clip_grad_norm_(math.inf if config.max_grad_norm is None else config.max_grad_norm)
    totals = _read_totals(run, own_loss, norm, torch.cat([token_counts, sums.metrics()]), loader.seconds_waited)
    fault = _update(run, batches, losses, totals)
    by_name = dict(zip(run.dataset.source_names, totals.source_tokens, strict=True))
    state.advance(len(batches.samples), totals.num_tokens, by_name, skipped=bool(fault))
    state.dataset_state = run.dataset.state_dict(state.num_samples)
    seconds = time.perf_counter() - began
    return StepReport(
        step=state.step,
        loss=totals.loss,
        learning_rate=rate,
        grad_norm=totals.grad_norm,
        tokens=totals.num_tokens,
        tokens_per_second=totals.num_tokens / seconds,
        step_seconds=seconds,
        data_seconds=totals.data_seconds,
        memory_bytes=totals.memory_bytes,
        skipped=state.num_skipped,
        stop_signal=totals.stop_signal,
        fault=fault,
        sources=source_figures(run.dataset, state.num_samples, state.source_tokens),
        epoch=state.epoch,
        total_tokens=state.num_tokens,
        metrics=sums.means(totals.metric_sums),
    )


def _update(run: TrainingRun, batches: StepBatches, losses: Sequence[torch.Tensor], totals: "_Totals") -> str:
    """Update the weights if loss and gradients are finite, otherwise return the reason; a collective.

    Raises:
        LossError: On all ranks: they are not finite, and the settings do not allow skipping the step.
    """
    config, state, fault = run.config, run.state, ""
    if math.isfinite(totals.loss) and math.isfinite(totals.grad_norm):
        run.optimizer.step()
        if run.average is not None:
            run.average.update()
    else:
        named = _describe_non_finite(run, batches, losses)
        fault = f"loss {totals.loss} and gradient norm {totals.grad_norm}, not finite in the {named}"
    run.optimizer.zero_grad()  # evaluations and saves need the memory
    if fault and (config.non_finite == "stop" or state.num_skipped_in_row >= config.max_skips):
        raise LossError(_loss_error_message(fault, state, config))
    return fault


def _describe_non_finite(run: TrainingRun, batches: StepBatches, losses: Sequence[torch.Tensor]) -> str:
    """Find where a step is not finite: in the loss of some samples, or only in the gradients; a collective."""
    own = zip(batches.own_samples, losses, strict=True)
    bad = [int(i) for positions, loss in own if not math.isfinite(loss) for i in positions]
    in_loss = [position for rank in run.context.all_gather_object(bad) for position in rank]
    named = run.dataset.describe(in_loss or batches.samples)
    return f"loss of samples {named}" if in_loss else f"gradients only, samples {named}"


def _set_learning_rate(run: TrainingRun) -> float:
    """Set the learning rate of each group, and return that of the first.

    The peak is the rate with which the group was created, as in torch's schedulers.

    Raises:
        ConfigError: Something else has set a rate since the last step, which would have no effect.
    """
    groups = run.optimizer.param_groups
    for group, rate in zip(groups, run._rates, strict=False):  # no rates before the first step
        if group["lr"] != rate:
            raise ConfigError(
                f"The learning rate of {type(run.optimizer).__name__} was set to {float(group['lr']):g} after step "
                f"{run.state.step}, and train.schedule sets it again before each step. Remove your own scheduler; for "
                f"a schedule of your own, set train.schedule=constant and train.warmup_steps=0, and before each step, "
                f'also the first of a resumed run, group["initial_lr"].'
            )
    for group in groups:
        peak = group.setdefault("initial_lr", group["lr"])
        group["lr"] = learning_rate(run.config, peak, run.state.step)
    run._rates = [float(group["lr"]) for group in groups]
    return run._rates[0]


def _accumulate(run: TrainingRun, batches: StepBatches, divisors: torch.Tensor, sums: StepSums) -> list[torch.Tensor]:
    """Accumulate the gradients of the micro-batches; returns their parts of the loss, scalars on the device."""
    losses, model, objective, reference = [], run.model, run.objective, run.reference
    shared = objective.prepare(model, batches.micro_batches, reference, run.context)
    # Each context-parallel rank has the whole loss, but only the gradient of its own tokens.
    num_copies = run.context.num_context_ranks if objective.compares_whole_sequences else 1
    for number, batch in enumerate(batches.micro_batches, start=1):
        is_synced = run.sync_every_micro_batch or number == len(batches.micro_batches)
        with nullcontext() if is_synced else model.no_sync():
            loss = objective.terms(ForwardPass(model, batch, divisors, sums, reference, shared)).sum()
            with quiet_pass():
                loss.backward()
        losses.append(loss.detach() / num_copies)
        del loss  # and all that its graph refers to, such as a teacher's tokens, before the next forward pass
    return losses


@dataclass(frozen=True)
class _Totals:
    """The values that a step reads from the device: figures of all ranks, as in `StepReport`, and sums of metrics."""

    loss: float
    grad_norm: float
    data_seconds: float
    num_tokens: int
    source_tokens: list[int]
    metric_sums: list[float]
    memory_bytes: int
    stop_signal: int


def _read_totals(
    run: TrainingRun, loss: torch.Tensor, grad_norm: torch.Tensor, reduced: torch.Tensor, waited: float
) -> _Totals:
    """Reduce each rank's figures on the device and read them: the only point at which this loop waits for a GPU.

    The norm is equal on all ranks unless one of them failed, in which case none may continue.

    Args:
        run: The run.
        loss: This rank's part of the loss, a scalar.
        grad_norm: Norm of the gradients, a scalar.
        reduced: Sums over all ranks: predictions, those of each source of a mixture, and metrics, float64.
        waited: Seconds that this rank waited for its samples.
    """
    context = run.context
    on_host = [waited, float(device_peak_bytes(context.device.type)), float(run.stop.number)]
    on_device = copy_to(context.device, torch.tensor(on_host, dtype=torch.float64))
    sums = torch.stack([loss.double(), grad_norm.to(context.device, torch.float64, non_blocking=True), on_device[0]])
    highest = on_device[1:]
    own_norm = sums[1:2].clone()  # the sum, which replaces it, only shows whether a rank's norm is not finite
    context.all_reduce_(sums)
    context.all_reduce_(highest, "max")
    # Loss, norm and wait (sums), memory and signal (maxima), this rank's norm, and what was reduced before.
    read = torch.cat([sums, highest, own_norm, reduced]).tolist()
    total_loss, total_norm, all_waited, memory_bytes, stop_signal, norm, *others = read
    num_tokens, *others = (value / context.num_tensor_ranks for value in others)
    num_sources = len(run.dataset.source_names)
    return _Totals(
        loss=total_loss / context.world_size,
        grad_norm=norm if math.isfinite(total_norm) else total_norm,
        data_seconds=all_waited / context.world_size,
        num_tokens=round(num_tokens),
        source_tokens=[round(count) for count in others[:num_sources]],
        metric_sums=others[num_sources:],
        memory_bytes=int(memory_bytes),
        stop_signal=int(stop_signal),
    )


def _loss_error_message(fault: str, state: TrainerState, config: TrainConfig) -> str:
    """Format the message of the LossError that ends a run in the step after `state`."""
    before, remedy = "", "skip such steps with train.non_finite=skip"
    if config.non_finite == "skip":
        before = f", after {format_count(state.num_skipped_in_row, 'skipped step')} in a row"
        remedy = f"allow more than train.max_skips={config.max_skips}"
    return (
        f"Step {state.step + 1} has {fault}{before}. It did not change the weights. Lower optim.lr, lengthen "
        f"train.warmup_steps, look at these samples (by their numbers in data.path, from 0), or {remedy}."
    )
