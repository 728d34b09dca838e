"""Evaluation during training: the loss on held-out samples, and completions to look at."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from fsdp_shard.data import Batch, Concatenation, MapDataset
from fsdp_shard.distributed import DistributedContext, run_on_main
from fsdp_shard.errors import LossError
from fsdp_shard.sharding import ShardedModel, free_gathered, without_context_parallel
from fsdp_shard.training.batch_loader import context_ranks, evaluation_batches, own_part, read_batch, to_device
from fsdp_shard.training.dataset_figures import finite
from fsdp_shard.training.loop import TrainingRun
from fsdp_shard.training.loss.custom_functions import CustomFunctions, StepSums, check_returned_samples, metric_means
from fsdp_shard.training.objectives.objective import ForwardPass, ObjectiveConfig, Reference, Teacher
from fsdp_shard.training.trainer_state import TrainerState, is_due
from fsdp_shard.utils import json_digest


@dataclass(frozen=True)
class EvalReport:
    """The held-out loss.

    Attributes:
        loss: The mean over all predictions, in nats per token; over all pairs for an objective of pairs; per text for
            classes.
        perplexity: Its exponential; None unless the loss is the cross-entropy of tokens.
        num_tokens: Number of predictions.
        seconds: Duration.
        metrics: The means of the metrics of the objective, by name.
        sets: The report of each set, if there are several by name.
    """

    loss: float
    perplexity: float | None
    num_tokens: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    sets: Mapping[str, "EvalReport"] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """The figures for evaluations.jsonl. JSON has no infinity, so an infinite perplexity is null."""
        figures = finite({name: value for name, value in vars(self).items() if name not in ("sets", "metrics")})
        figures |= {"metrics": finite(self.metrics)} if self.metrics else {}
        return figures | ({"sets": {name: report.row for name, report in self.sets.items()}} if self.sets else {})


class EvaluationLog(Protocol):
    """Receives evaluations, on all ranks."""

    def evaluation(self, step: int, report: EvalReport, state: TrainerState) -> None:
        """Record the evaluation after `step`."""

    def samples(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Record prompts and their completions after `step`."""

    def note(self, lines: str) -> None:
        """Show a line to whoever watches the run."""


class HeldOutEvaluator:
    """Evaluates a run whenever `train.eval_every` requires it, for the log and for early stopping.

    It computes the loss on held-out samples, and calls `run.functions.samples`.

    Args:
        run: The run.
        held_out: The samples, of which the first `train.eval_windows` are used; without them, no loss is computed.
        log: Receives the evaluations.

    Example:
        >>> evaluator = fs.HeldOutEvaluator(run, data.held_out, log)  # doctest: +SKIP
        >>> for report in fs.train(run):  # doctest: +SKIP
        ...     evaluator.after_step()
    """

    def __init__(self, run: TrainingRun, held_out: MapDataset | None, log: EvaluationLog) -> None:
        self._run, self._log = run, log
        self._held_out = None if held_out is None else held_out.head(run.config.eval_windows)

    def before_training(self) -> None:
        """Evaluate before the first step, or the step to resume from if it was not evaluated; a collective.

        A step lacks its evaluation if the run was interrupted before it, or if fewer steps, less patience or other
        held-out data leave nothing to train.
        """
        state = self._run.state
        if self._held_out is not None and state.record_held_out(
            json_digest([one.identity for one in self._held_out.sources])
        ):
            up_to = f"of the evaluations up to step {state.step}"
            self._log.note(f"held-out data differ from those {up_to}: best step and patience start over")
        if self._run.is_over and 0 < state.step != state.evaluated_step:
            state.evaluation_pending = True
        if state.step == 0 or state.evaluation_pending:
            self._evaluate()

    def after_step(self) -> None:
        """Evaluate if it is due; a collective. An interrupted run leaves it to the run that resumes it."""
        run, step = self._run, self._run.state.step
        has_work = self._held_out is not None or run.functions.samples is not None
        due = has_work and is_due(step, run.config.eval_every, run.config.num_steps)
        run.state.evaluation_pending = due
        if due and not run.interrupted_by:
            self._evaluate()

    def _evaluate(self) -> None:
        run, state = self._run, self._run.state
        run.functions.check()
        if self._held_out is not None:
            size, objective, reference = run.config.micro_batch_size, run.objective, run.reference
            report = evaluate_loss(
                run.model, self._held_out, size, run.context, run.functions, objective=objective, reference=reference
            )
            if state.step:
                state.record_evaluation(report.loss, run.config.min_delta)
            else:
                state.loss_before = report.loss
            self._log.evaluation(state.step, report, state)
        else:
            state.evaluated_step = state.step  # else a run that is over would sample again
        if run.functions.samples is not None:
            with eval_mode(run.model), without_context_parallel(run.model.module):
                completions = run.functions.samples(run.model)
            run_on_main(run.context, partial(check_returned_samples, run.functions.samples, completions))
            self._log.samples(state.step, completions)
        state.evaluation_pending = False


@contextmanager
def eval_mode(model: ShardedModel) -> Iterator[None]:
    """Put `model` in eval mode, without gradients; afterwards, restore its mode and free gathered parameters."""
    was_training = model.module.training
    model.module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.module.train(was_training)
    free_gathered(model.module)


def evaluate_loss(
    model: ShardedModel,
    dataset: MapDataset,
    micro_batch_size: int,
    context: DistributedContext,
    functions: CustomFunctions | None = None,
    *,
    objective: ObjectiveConfig | None = None,
    reference: Reference | Teacher | None = None,
) -> EvalReport:
    """Compute the mean loss over every prediction of a data set, each counted once, and of its parts; a collective.

    Args:
        model: The model, whose mode is restored afterwards.
        dataset: The samples.
        micro_batch_size: Samples per rank and forward pass.
        context: The ranks that evaluate.
        functions: A custom loss; its metrics are not computed here.
        objective: What the model is trained for; the cross-entropy if None.
        reference: The model to compare with, for objectives that need one.

    Raises:
        LossError: The loss is not finite.
    """
    # Metrics of `run.functions` are of training steps only.
    custom = CustomFunctions(loss=None if functions is None else functions.loss)
    evaluation = _Evaluation(model, micro_batch_size, context, custom, objective or ObjectiveConfig(), reference)
    parts = dataset.parts if isinstance(dataset, Concatenation) else {"": dataset}
    with eval_mode(model):
        sums = {name: evaluation.run(part) for name, part in parts.items()}
    is_of_tokens = dataset.sample(0).labels.ndim > 0  # not one label for the whole text
    reports = {name: evaluation.report(each, is_of_tokens, name) for name, each in sums.items()}
    whole = evaluation.report(_total(list(sums.values())), is_of_tokens)
    return replace(whole, sets=reports if isinstance(dataset, Concatenation) else {})


@dataclass(frozen=True)
class _HeldOutSum:
    """Sums over some samples of all ranks.

    Attributes:
        terms: Sums of each term of the loss.
        counts: The divisor of each of these sums.
        num_tokens: Number of predictions.
        seconds: Duration.
        metrics: Sums and counts of the metrics, in turn.
    """

    terms: list[float]
    counts: list[float]
    num_tokens: float
    seconds: float
    metrics: list[float]


def _total(sums: Sequence[_HeldOutSum]) -> _HeldOutSum:
    """Return the sums over the samples of all `sums`."""
    return _HeldOutSum(
        terms=[sum(values) for values in zip(*(one.terms for one in sums), strict=True)],
        counts=[sum(values) for values in zip(*(one.counts for one in sums), strict=True)],
        num_tokens=sum(one.num_tokens for one in sums),
        seconds=sum(one.seconds for one in sums),
        metrics=[sum(values) for values in zip(*(one.metrics for one in sums), strict=True)],
    )


@dataclass(frozen=True)
class _Evaluation:
    """How samples are evaluated; the attributes are the arguments of `evaluate_loss`."""

    model: ShardedModel
    micro_batch_size: int
    context: DistributedContext
    functions: CustomFunctions
    objective: ObjectiveConfig
    reference: Reference | Teacher | None

    def run(self, dataset: MapDataset) -> _HeldOutSum:
        """Return the sums over all ranks; a collective. The model is in eval mode."""
        began, context, objective = time.perf_counter(), self.context, self.objective
        sums = StepSums(self.functions, context)
        ones = torch.ones(objective.num_terms, device=context.device)
        terms, counts = torch.zeros_like(ones, dtype=torch.float64), torch.zeros(objective.num_terms + 1).double()
        on_device = (to_device(batch, context.device) for batch in self._batches(dataset))
        shared = objective.prepare(self.model, on_device, self.reference, context)
        for batch in self._batches(dataset):
            forward = ForwardPass(self.model, to_device(batch, context.device), ones, sums, self.reference, shared)
            terms += objective.terms(forward).double()
            counts += torch.tensor(objective.all_counts(batch)).double()
        # Tensor-parallel ranks evaluate the same samples.
        totals = context.all_reduce([*terms.tolist(), *counts.tolist()])
        totals = [total / context.num_tensor_ranks for total in totals]
        if objective.compares_whole_sequences:  # so do ranks that divide sequences
            totals = [total / context.num_context_ranks for total in totals]
        counts_per_term = totals[objective.num_terms : -1]
        if sums.needs_output:
            counts_per_term = [float(sums.total_count()) / context.num_tensor_ranks]
        metrics = sums.metrics().tolist()
        return _HeldOutSum(
            terms=totals[: objective.num_terms],
            counts=counts_per_term,
            num_tokens=totals[-1],
            seconds=time.perf_counter() - began,
            metrics=metrics,
        )

    def _batches(self, dataset: MapDataset) -> Iterator[Batch]:
        """Yield the batches of this rank, with its parts of sequences if these are divided."""
        context, module = self.context, self.model.module
        divided, keeps_whole = context_ranks(module, context), self.objective.compares_whole_sequences
        for indices in evaluation_batches(
            len(dataset), self.micro_batch_size, context.data_rank, context.num_data_ranks
        ):
            yield own_part(read_batch(dataset, indices, module), divided, keeps_whole=keeps_whole)

    def report(self, sums: _HeldOutSum, is_of_tokens: bool, name: str = "") -> EvalReport:
        """Return the means; raise LossError if the loss is not finite."""
        pairs = list(zip(sums.terms, sums.counts, strict=True))
        of_set = f" of {name}" if name else ""
        if self.functions.loss is not None and (counted := sums.counts[0]) <= 0:
            raise LossError(
                f"The loss function counted {counted or 'nothing'} in the held-out data{of_set}, so there is no mean: "
                f"give held-out data with what it counts, or none."
            )
        loss = math.fsum(total / count if count else math.nan for total, count in pairs)
        if not math.isfinite(loss):
            raise LossError(
                f"The held-out loss{of_set} is {loss} over {int(sums.num_tokens)} tokens: the weights are not usable."
            )
        perplexity = None
        if is_of_tokens and self.objective.is_cross_entropy and self.functions.loss is None:
            perplexity = math.exp(loss) if loss < 700 else math.inf
        metrics = metric_means(self.functions.names or [], sums.metrics)
        return EvalReport(loss, perplexity, int(sums.num_tokens), sums.seconds, metrics)
