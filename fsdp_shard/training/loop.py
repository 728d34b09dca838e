"""The training loop: a generator of one report per step.

Saving, logging, evaluating and early stopping are the caller's, between one report and the next. Nothing here reads a
file or the environment.
"""

from collections.abc import Iterator

from fsdp_shard.training.step import StepReport, TrainingRun, train_step


def train(run: TrainingRun) -> Iterator[StepReport]:
    """Train until the run is over; a collective.

    `run.state` is updated before each report, so that it can be saved when the report is received. No step follows
    once `run.is_over`.

    Args:
        run: The run, at any step.

    Yields:
        A report of each step, as soon as it is done.

    Raises:
        LossError: On all ranks, with the weights of the step before: the loss or the gradients are not finite, and
            `config.non_finite` does not allow to skip the step.
    """
    run.model.module.train()
    run.dataset.load_state_dict(run.state.place)
    while not run.is_over:
        with run.profile(run.state.step + 1):
            report = train_step(run)
        if report.step < run.config.steps:
            run.interrupted_by = report.stop_signal
        yield report
