"""What a run writes about itself while it trains: progress for people, metrics for programs, the figures at the end.

Every rank makes one; only rank 0's shows and writes anything, so that recipes need not ask. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import Interrupted, LossError
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.logging.loss_plot import plot_losses
from fsdp_shard.training.logging.metrics_log import MetricsLog, read_rows
from fsdp_shard.training.logging.progress import Progress
from fsdp_shard.training.logging.trackers import Trackers
from fsdp_shard.training.loop import EvalReport, StepReport
from fsdp_shard.training.trainer_state import TrainerState
from fsdp_shard.utils import RESULT, write_result

if TYPE_CHECKING:
    from fsdp_shard.distributed import DistributedContext

METRICS, EVALUATIONS, PLOT = "metrics.jsonl", "evaluations.jsonl", "loss.png"


def stopped(report: StepReport, run_dir: str, resume: str) -> Interrupted:
    """The error that ends a run after a signal, when the step is saved; `resume` is what it was started with."""
    again = f"run_dir={run_dir}" if resume == "auto" else f"run_dir={run_dir} resume=auto"
    return Interrupted(
        f"Stopped by {Signals(report.stop_signal).name} after step {report.step}, which is saved in {run_dir}. "
        f"To go on from there, give the same command with {again}.",
        signal_number=report.stop_signal,
    )


class RunLog:
    """The log of a run in `run_dir` that goes on from `state`, which is that of `checkpoint` if there is one.

    `public_settings` go to the trackers; `utilization` tells the MFU from tokens a second, where it is known.
    """

    def __init__(
        self,
        run_dir: str,
        config: TrainConfig,
        context: DistributedContext,
        state: TrainerState,
        checkpoint: Path | None = None,
        public_settings: Mapping[str, Any] | None = None,
        utilization: Callable[[float], float] | None = None,
    ) -> None:
        self._run_dir, self._config, self._is_main = Path(run_dir), config, context.is_main
        self._first_step, self._utilization = state.step, utilization
        self._owes_evaluation = state.owes_evaluation
        names = config.trackers if context.is_main else []
        self._trackers = Trackers(names, config.tracker_project, self._run_dir, public_settings or {}, self.note)
        self._exit = ExitStack()
        self._seconds, self._tokens = 0.0, 0
        self._memory: int | None = None
        self._checkpoint = checkpoint
        self._unwritten: set[str] = set()

    def __enter__(self) -> RunLog:
        self._progress = self._exit.enter_context(
            Progress(self._config.steps, self._first_step, self._config.log_every, enabled=self._is_main)
        )
        self._exit.enter_context(self._trackers)
        if self._is_main:
            (self._run_dir / RESULT).unlink(missing_ok=True)  # of a run that was finished, and now is longer
            resumed = self._first_step or None
            evaluated = resumed - self._owes_evaluation if resumed else None
            self._metrics = self._exit.enter_context(MetricsLog(self._run_dir / METRICS, resumed))
            self._evaluations = self._exit.enter_context(MetricsLog(self._run_dir / EVALUATIONS, evaluated))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()
        if isinstance(error, LossError):
            raise LossError(f"{error} {self._last_good()}") from error

    def _last_good(self) -> str:
        if self._checkpoint is None:
            return "There is no checkpoint yet: checkpoint.every=N saves one every N steps."
        return f"The last good checkpoint is {self._checkpoint}; a run goes on from it with resume=auto or its path."

    def _append(self, log: MetricsLog, name: str, row: Mapping[str, Any]) -> None:
        error = log.write(row)
        if error is not None and name not in self._unwritten:
            self.note(f"{self._run_dir / name} cannot be written now: {error.strerror or error}. Rows wait in memory.")
        (self._unwritten.discard if error is None else self._unwritten.add)(name)

    def note(self, lines: str | Iterable[str]) -> None:
        """Lines for whoever watches."""
        for line in [lines] if isinstance(lines, str) else lines:
            self._progress.note(line)

    def step(self, report: StepReport) -> None:
        self._seconds += report.step_seconds
        self._tokens += report.tokens
        self._memory = report.memory_bytes
        mfu = self._utilization(report.tokens_per_second) if self._utilization else None
        self._progress.show(report, mfu)
        if report.fault:
            self.note(f"step {report.step} changed no weights: {report.fault} ({report.skipped} skipped so far)")
        if self._is_main:
            row = report.row() if mfu is None else {**report.row(), "mfu": mfu}
            self._append(self._metrics, METRICS, row)
            self._trackers.log("train", row)

    def evaluation(self, step: int, report: EvalReport, state: TrainerState) -> None:
        """Tell of an evaluation, which `state` has taken note of unless it was before the first step."""
        self.note(
            f"held out after step {step}: loss {report.loss:.4f}, perplexity {report.perplexity:.3f}"
            + _standing(state, self._config.patience)
        )
        if self._is_main:
            row = {"step": step, **vars(report)}
            self._append(self._evaluations, EVALUATIONS, row)
            self._trackers.log("held_out", row)

    def saved(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.note(f"saved {checkpoint}")

    def finish(self, title: str, state: TrainerState, figures: dict[str, Any]) -> None:
        """Draw the curves if asked for, and write result.json: last, so that its being there means completed."""
        if not self._is_main:
            return
        steps, held_out = read_rows(self._run_dir / METRICS), read_rows(self._run_dir / EVALUATIONS)
        if self._config.plot:
            plot_losses(steps, held_out, self._run_dir / PLOT, title)
        whole = self._figures(steps, held_out, state) | {"checkpoint": str(self._checkpoint)}
        write_result(self._run_dir, whole | figures)
        for name, seen in figures.get("sources", {}).items():
            self.note(f"{name}: {seen['samples']:,} samples, {seen['tokens']:,} tokens, {seen['epochs']:g} epochs")
        self.note(self._summary(whole))

    def _summary(self, figures: dict[str, Any]) -> str:
        """The last line, for whoever comes back when all is done."""
        said = [f"done: {figures['steps']:,} steps, {figures['tokens']:,} tokens"]
        if rate := figures["tokens_per_second"]:
            said.append(f"{rate:,.0f} tokens/s")
        if skipped := figures["skipped_steps"]:
            said.append(f"{skipped} steps skipped")
        if "best_step" in figures:
            said.append(f"best held-out loss {figures['best_loss']:.4f} after step {figures['best_step']}")
        if self._config.plot:
            said.append(f"curves in {PLOT}")
        return ", ".join(said) + f"; all of it is in {self._run_dir}"

    def _figures(
        self, steps: list[dict[str, Any]], held_out: list[dict[str, Any]], state: TrainerState
    ) -> dict[str, Any]:
        """Over the whole run, but for the rate and the memory, which are of this part of it."""
        figures: dict[str, Any] = {
            "steps": state.step,
            "final_loss": next((row["loss"] for row in reversed(steps) if row["loss"] is not None), None),
            "skipped_steps": state.num_skipped,
            "stopped_early": state.step < self._config.steps,
            "tokens": state.num_tokens,
            "tokens_per_second": self._tokens / self._seconds if self._seconds else None,
            "peak_memory_bytes": self._memory,
        }
        if held_out:
            if held_out[0]["step"] == 0:
                figures["perplexity_before"] = held_out[0]["perplexity"]
            figures["perplexity"] = held_out[-1]["perplexity"]
        if state.best_step is not None:
            figures["best_loss"], figures["best_step"] = state.best_loss, state.best_step
        return figures


def _standing(state: TrainerState, patience: int | None) -> str:
    """How a run does by its latest evaluation, after the first of them."""
    if state.best_step is None:
        return ""
    if state.is_best:
        return ", the lowest so far"
    best = f", best {state.best_loss:.4f} after step {state.best_step}"
    if state.stops_early(patience):
        return f"{best}: stopping early, as {state.num_stale} evaluations in a row were not lower"
    return best + (f", {state.num_stale} of {patience} in a row not lower" if patience and state.num_stale else "")
