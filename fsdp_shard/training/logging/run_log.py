"""The log of a run: progress on the terminal, metrics for files and trackers, and result.json at the end.

Every rank has a log, but only rank 0's shows and writes anything, so recipes need not check the rank.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsdp_shard.errors import LossError
from fsdp_shard.training.held_out.evaluator import EvalReport
from fsdp_shard.training.logging.loss_plot import plot_losses
from fsdp_shard.training.logging.metrics_log import (
    EVALUATIONS,
    METRICS,
    SAMPLES,
    MetricsLog,
    of_last_held_out,
    read_rows,
)
from fsdp_shard.training.logging.progress import Progress
from fsdp_shard.training.logging.trackers import Trackers
from fsdp_shard.training.loop import StepReport, TrainingRun
from fsdp_shard.training.trainer_state import TrainerState
from fsdp_shard.utils import RESULT, format_count, write_result

PLOT = "loss.png"
_HELD_OUT = "held_out"  # in a row of evaluations.jsonl, the identity of the data, which is not sent to trackers


class RunLog:
    """The log of a run, a context manager.

    Args:
        run_dir: Directory of the run.
        run: The run, at the step from which it starts.
        checkpoint: The checkpoint of that step, if any.
        public_settings: The settings of the run, for the trackers.
        utilization: Computes the model FLOPs utilization from the tokens per second, if known.
        opening: Lines to show first.
    """

    def __init__(
        self,
        run_dir: str,
        run: TrainingRun,
        checkpoint: Path | None = None,
        public_settings: Mapping[str, Any] | None = None,
        utilization: Callable[[float], float] | None = None,
        opening: Iterable[str] = (),
    ) -> None:
        self._run_dir, self._run, self._config, self._is_main = Path(run_dir), run, run.config, run.context.is_main
        self._checkpoint, self._settings, self._utilization = checkpoint, public_settings or {}, utilization
        self._resumed_step = None if checkpoint is None else run.state.step
        self._opening = opening
        self._exit = ExitStack()
        self._seconds, self._tokens = 0.0, 0
        self._memory: int | None = None
        self._unwritten: set[str] = set()

    def __enter__(self) -> Self:
        config, state = self._config, self._run.state
        headline = self._run.objective.headline
        self._progress = Progress(
            config.num_steps, state.step, config.log_every, enabled=self._is_main, headline=headline
        )
        self._exit.callback(self._progress.close)
        self.note(self._opening)
        names = config.trackers if self._is_main else []
        resumed = state.step if self._continues_own_files() else None
        trackers = Trackers(names, config.tracker_project, self._run_dir, self._settings, self.note, resumed)
        self._trackers = self._exit.enter_context(trackers)
        if self._is_main:
            (self._run_dir / RESULT).unlink(missing_ok=True)  # of a finished run that now continues
            evaluated = resumed or None
            if evaluated and state.evaluation_pending:
                evaluated -= 1  # this step will be evaluated again
            self._files = {
                METRICS: MetricsLog(self._run_dir / METRICS, resumed),
                EVALUATIONS: MetricsLog(self._run_dir / EVALUATIONS, evaluated),
            }
            if self._run.functions.samples is not None:
                self._files[SAMPLES] = MetricsLog(self._run_dir / SAMPLES, evaluated)
            for file in self._files.values():
                self._exit.callback(file.close)
        return self

    def _continues_own_files(self) -> bool:
        """Whether the rows in the run directory belong to the resumed run, not to another one that ended there."""
        return self._checkpoint is not None and self._checkpoint.resolve().is_relative_to(self._run_dir.resolve())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, trace)
        if isinstance(error, LossError):
            hint = "There is no checkpoint yet: checkpoint.every=N saves one every N steps."
            if self._checkpoint is not None:
                hint = f"The last good checkpoint is {self._checkpoint}; resume from it with resume=auto or its path."
            raise LossError(f"{error} {hint}") from error

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        error = self._files[name].write(row)
        if error is None:
            self._unwritten.discard(name)
        elif name not in self._unwritten:
            self._unwritten.add(name)
            self.note(f"{self._run_dir / name} cannot be written: {error.strerror or error}. Rows wait in memory.")

    def _record(self, name: str, group: str, row: Mapping[str, Any]) -> None:
        if self._is_main:
            self._append(name, row)
            self._trackers.log(group, {key: value for key, value in row.items() if key != _HELD_OUT})

    def note(self, lines: str | Iterable[str]) -> None:
        """Show lines on the terminal."""
        for line in [lines] if isinstance(lines, str) else lines:
            self._progress.note(line)

    def warn(self, lines: str) -> None:
        """Show a failure that does not end the run."""
        self.note(lines)

    def step(self, report: StepReport) -> None:
        """Log a finished step."""
        self._seconds += report.step_seconds
        self._tokens += report.tokens
        self._memory = report.memory_bytes
        mfu = self._utilization(report.tokens_per_second) if self._utilization else None
        self._progress.show(report, mfu)
        if report.fault:
            self.note(f"step {report.step} changed no weights: {report.fault} ({report.skipped} skipped so far)")
        self._record(METRICS, "train", report.row if mfu is None else {**report.row, "mfu": mfu})

    def evaluation(self, step: int, report: EvalReport, state: TrainerState) -> None:
        """Log an evaluation that `state` has recorded."""
        perplexity = "" if report.perplexity is None else f", perplexity {report.perplexity:.3f}"
        trend = _trend(state, self._config.patience)
        headline = [name for name in self._run.objective.headline if name in report.metrics]
        metrics = "".join(f", {name} {report.metrics[name]:.4f}" for name in headline)
        self.note(f"held out after step {step}: loss {report.loss:.4f}{perplexity}{metrics}{trend}")
        if report.sets:
            self.note("  " + ", ".join(f"{name} {each.loss:.4f}" for name, each in report.sets.items()))
        self._record(EVALUATIONS, "held_out", {"step": step, **report.row, _HELD_OUT: state.held_out})

    def samples(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Log prompts and the model's completions after `step`."""
        if not self._is_main:
            return
        for prompt, completion in samples:
            shown = (json.dumps(text, ensure_ascii=False) for text in (prompt, completion))  # on one line
            self.note(f"sample after step {step}: {' -> '.join(shown)}")
            self._append(SAMPLES, {"step": step, "prompt": prompt, "completion": completion})
        texts = {str(number): f"{prompt}{completion}" for number, (prompt, completion) in enumerate(samples)}
        self._trackers.log("samples", {"step": step, **texts})

    def saved(self, directory: Path) -> None:
        """Log a saved checkpoint."""
        self._checkpoint = directory
        self.note(f"saved {directory}")

    def finish(self, title: str, figures: Mapping[str, Any]) -> None:
        """Plot the loss if `train.plot` is set, then write result.json last, as it marks the run as completed.

        Args:
            title: Title of the plot.
            figures: More figures for result.json.
        """
        if not self._is_main:
            return
        steps = read_rows(self._run_dir / METRICS)
        held_out = of_last_held_out(read_rows(self._run_dir / EVALUATIONS))
        if self._config.plot:
            plot_losses(steps, held_out, self._run_dir / PLOT, title)
        result = self._figures(steps, held_out) | {"checkpoint": str(self._checkpoint)}
        write_result(self._run_dir, result | dict(figures))
        for name, seen in figures.get("sources", {}).items():
            counts = [format_count(seen[f"{noun}s"], noun) for noun in ("sample", "token", "epoch")]
            self.note(f"{name}: {', '.join(counts)}")
        self.note(self._summary(result))

    def _summary(self, figures: dict[str, Any]) -> str:
        parts = [f"done: {format_count(figures['steps'], 'step')}"]
        if (epoch := figures["epoch"]) is not None:
            parts.append(format_count(float(epoch), "epoch"))
        parts.append(format_count(figures["tokens"], "token"))
        if rate := figures["tokens_per_second"]:
            parts.append(f"{rate:,.0f} tokens/s")
        if skipped := figures["skipped_steps"]:
            parts.append(f"{format_count(skipped, 'step')} skipped")
        if "best_step" in figures:
            best = f"best held-out loss {figures['best_loss']:.4f} after step {figures['best_step']}"
            parts.append(best + _than_before(self._run.state))
        if self._config.plot:
            parts.append(f"curves in {PLOT}")
        where = f"; results in {self._run_dir}"
        if self._checkpoint is not None and not self._checkpoint.is_relative_to(self._run_dir):
            where = f"; nothing was left to train, and the checkpoint is {self._checkpoint}"
        return ", ".join(parts) + where

    def _figures(self, steps: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> dict[str, Any]:
        """Figures of the whole run, except throughput and memory, which cover the part since the last resume."""
        state = self._run.state
        figures: dict[str, Any] = {
            "steps": state.step,
            "max_steps": self._config.num_steps,
            "resumed_step": self._resumed_step,
            "epoch": state.epoch,
            "final_loss": next((row["loss"] for row in reversed(steps) if row["loss"] is not None), None),
            "skipped_steps": state.num_skipped,
            "stopped_early": state.step < self._config.num_steps,
            "tokens": state.num_tokens,
            "tokens_per_second": self._tokens / self._seconds if self._seconds else None,
            "peak_memory_bytes": self._memory,
        }
        if held_out:
            if held_out[0]["step"] == 0:
                figures["perplexity_before"] = held_out[0]["perplexity"]
            figures["perplexity"] = held_out[-1]["perplexity"]  # null for a loss that is not a cross-entropy of tokens
            if "metrics" in held_out[-1]:
                figures["metrics_before"] = held_out[0].get("metrics") if held_out[0]["step"] == 0 else None
                figures["metrics"] = held_out[-1]["metrics"]
        if state.loss_before is not None:
            figures["loss_before"] = state.loss_before
        if state.best_step is not None:
            figures["best_loss"], figures["best_step"] = state.best_loss, state.best_step
        return figures


def _trend(state: TrainerState, patience: int | None) -> str:
    """How the latest evaluation compares with earlier ones."""
    if state.best_step is None:
        return ""
    if state.is_best:
        return _than_before(state) or ", the lowest so far"
    best = f", best {state.best_loss:.4f} after step {state.best_step}{_than_before(state)}"
    if state.stops_early(patience):
        return f"{best}: stopping early, as {state.num_stale} evaluations in a row were not lower"
    return best + (f", {state.num_stale} of {patience} in a row not lower" if patience and state.num_stale else "")


def _than_before(state: TrainerState) -> str:
    """A note that no step has improved the model, if that is known."""
    return f", not lower than before training ({state.loss_before:.4f})" if state.never_improved else ""
