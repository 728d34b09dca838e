"""Evaluation during training: the loss on held-out samples, and completions to look at."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from fsdp_shard.data import NO_WINDOW, Concatenation, MapDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import LossError
from fsdp_shard.sharding import ShardedModel, attending_alone
from fsdp_shard.training.batch_loader import Ints, context_ranks, micro_batches, own_part, to_device
from fsdp_shard.training.loop import TrainingRun, forward_loss
from fsdp_shard.training.loss.own_functions import OwnFunctions, StepSums
from fsdp_shard.training.optim.lr_schedule import is_due
from fsdp_shard.training.trainer_state import TrainerState


@dataclass(frozen=True)
class EvalReport:
    """The held-out loss.

    Attributes:
        loss: Over all predictions, in nats per token.
        perplexity: Its exponential; a loss of one's own has none.
        num_tokens: Number of predictions.
        seconds: Duration.
        sets: The same of each set, if there are several by name.
    """

    loss: float
    perplexity: float | None
    num_tokens: int
    seconds: float
    sets: Mapping[str, "EvalReport"] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """The figures for evaluations.jsonl."""
        figures = {name: value for name, value in vars(self).items() if name != "sets"}
        return figures | ({"sets": {name: report.row for name, report in self.sets.items()}} if self.sets else {})


class EvaluationLog(Protocol):
    """Receives evaluations, on all ranks."""

    def evaluation(self, step: int, report: EvalReport, state: TrainerState) -> None:
        """Record the evaluation after `step`."""

    def samples(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Record prompts and their completions after `step`."""


class HeldOutEvaluator:
    """Evaluates a run when `train.eval_every` asks for it, for the log and for early stopping.

    It computes the loss on held-out samples, and calls `run.functions.samples`.

    Args:
        run: The run.
        held_out: The samples, of which the first `train.eval_windows` are used; None computes no loss.
        log: Receives the evaluations.

    Example:
        >>> evaluator = fs.HeldOutEvaluator(run, data.held_out, log)  # doctest: +SKIP
        >>> for report in fs.train(run):  # doctest: +SKIP
        ...     evaluator.after_step()
    """

    def __init__(self, run: TrainingRun, held_out: MapDataset | None, log: EvaluationLog) -> None:
        self._run, self._log = run, log
        self._samples = None if held_out is None else held_out.head(run.config.eval_windows)

    def before_training(self) -> None:
        """Evaluate before the first step, or when the run was interrupted before an evaluation; a collective."""
        if self._run.state.step == 0 or self._run.state.owes_evaluation:
            self._evaluate()

    def after_step(self) -> None:
        """Evaluate if it is due; a collective. An interrupted run leaves it to the run that resumes it."""
        run, step = self._run, self._run.state.step
        has_work = self._samples is not None or run.functions.samples is not None
        due = has_work and is_due(step, run.config.eval_every, run.config.num_steps)
        run.state.owes_evaluation = due
        if due and not run.interrupted_by:
            self._evaluate()

    def _evaluate(self) -> None:
        run, state = self._run, self._run.state
        if self._samples is not None:
            report = evaluate_loss(run.model, self._samples, run.config.micro_batch_size, run.context, run.functions)
            if state.owes_evaluation:
                state.evaluated(report.loss, run.config.min_delta)
            self._log.evaluation(state.step, report, state)
        if run.functions.samples is not None:
            with evaluating(run.model), attending_alone(run.model.module):
                samples = run.functions.samples(run.model)
            self._log.samples(state.step, samples)
        state.owes_evaluation = False


@contextmanager
def evaluating(model: ShardedModel) -> Iterator[None]:
    """Put `model` in eval mode, without gradients; afterwards it is in the mode of before, and nothing is gathered."""
    was_training = model.module.training
    model.module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.module.train(was_training)
    for part in model.module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the root keeps what it has gathered, which a change to its shards would not reach


def evaluate_loss(
    model: ShardedModel,
    dataset: MapDataset,
    micro_batch_size: int,
    context: DistributedContext,
    functions: OwnFunctions | None = None,
) -> EvalReport:
    """Compute the mean loss over every prediction of a data set, each counted once, and of its parts; a collective.

    Args:
        model: The model; it is in the mode that it was in afterwards.
        dataset: The samples.
        micro_batch_size: Samples per rank and forward pass.
        context: The ranks that evaluate.
        functions: A loss of one's own.

    Raises:
        LossError: The loss is not finite.
    """
    parts = dataset.parts if isinstance(dataset, Concatenation) else {"": dataset}
    sums = {}
    with evaluating(model):
        for name, part in parts.items():
            sums[name] = _held_out_sum(model, part, micro_batch_size, context, functions)
    has_own_loss = functions is not None and functions.loss is not None
    reports = {name: each.report(name, has_own_loss) for name, each in sums.items()}
    whole = _HeldOutSum(*(sum(values) for values in zip(*map(astuple, sums.values()), strict=True)))
    return replace(whole.report("", has_own_loss), sets=reports if isinstance(dataset, Concatenation) else {})


@dataclass(frozen=True)
class _HeldOutSum:
    """Over some predictions: the sum of their losses, what to divide it by, their number, and the seconds it took."""

    loss: float
    count: float
    num_tokens: float
    seconds: float

    def report(self, name: str, has_own_loss: bool) -> EvalReport:
        """The mean; LossError if it is not finite."""
        loss = self.loss / self.count if self.count else math.nan
        if not math.isfinite(loss):
            where = f" of {name}" if name else ""
            raise LossError(
                f"The held-out loss{where} is {loss} over {int(self.num_tokens)} tokens: the weights are not usable."
            )
        perplexity = None if has_own_loss else math.exp(loss) if loss < 700 else math.inf
        return EvalReport(loss, perplexity, int(self.num_tokens), self.seconds)


def _held_out_sum(
    model: ShardedModel,
    dataset: MapDataset,
    micro_batch_size: int,
    context: DistributedContext,
    functions: OwnFunctions | None,
) -> _HeldOutSum:
    """The sums over all ranks; a collective. The model is in eval mode."""
    began, total, num_tokens = time.perf_counter(), 0.0, 0
    divided = context_ranks(model.module, context)
    sums = StepSums(OwnFunctions(loss=None if functions is None else functions.loss), context)
    for indices in evaluation_batches(len(dataset), micro_batch_size, context.data_rank, context.num_data_ranks):
        batch = own_part(dataset.batch(indices), divided)
        total += float(forward_loss(model, to_device(batch, context.device), 1.0, sums))
        num_tokens += batch.num_predictions
    # Tensor-parallel ranks evaluate the same samples.
    all_loss, all_tokens = (value / context.num_tensor_ranks for value in context.all_reduce([total, num_tokens]))
    count = float(sums.all_counts()) / context.num_tensor_ranks if sums.needs_output else all_tokens
    return _HeldOutSum(all_loss, count, all_tokens, time.perf_counter() - began)


def evaluation_batches(num_samples: int, micro_batch_size: int, rank: int, num_ranks: int) -> Iterator[Ints]:
    """Yield the indices [micro_batch_size] of each batch of this rank, for one pass over all samples in order.

    Every rank gets the same number of batches, as each forward pass is a collective; the last are filled up with
    `NO_WINDOW`. The arguments are those of `micro_batches`.
    """
    unit = micro_batch_size * num_ranks
    padded = np.full(-(-num_samples // unit) * unit, NO_WINDOW, np.int64)
    padded[:num_samples] = np.arange(num_samples)
    yield from micro_batches(padded, micro_batch_size, rank, num_ranks)
