"""Progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TextIO

from fsdp_shard.training.loop import StepReport
from fsdp_shard.utils import format_number, format_size, printable, say, until_unread

_MAX_SOURCES = 6  # shown in a line


class Progress:
    """Shows the reports of steps; close it at the end.

    Loss and tokens per second of a plain line cover all steps since the previous line. For a mixture, the line also
    shows each source's fraction of all tokens so far. The remaining time includes evaluations and saves. Once the
    terminal is closed, or the reader of a pipe has ended, nothing more is shown, and the run goes on.

    Args:
        num_steps: Last step of the run.
        first_step: Step from which the run starts.
        log_every: Steps per plain line.
        enabled: Whether to show anything; only rank 0 does.
        headline: The objective's metrics that a line shows; custom metrics are always shown.
        stream: Where to write; standard error by default.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int = 0,
        log_every: int = 1,
        enabled: bool = True,
        headline: Sequence[str] = (),
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_steps, self._first_step, self._log_every = num_steps, first_step, log_every
        self._enabled, self._stream, self._headline = enabled, stream or sys.stderr, headline
        self._clock, self._began = clock, 0.0
        self._since: list[StepReport] = []
        self._bar: Any = None
        if enabled and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=num_steps, initial=first_step, unit="step", file=self._stream, dynamic_ncols=True)

    def show(self, report: StepReport, mfu: float | None = None) -> None:
        """Show a step, with the model FLOPs utilization if known."""
        self._began = self._began or self._clock() - report.step_seconds
        if self._bar is not None:
            with until_unread(self._stream):
                self._bar.set_postfix_str(_figures(report, mfu), refresh=False)
                self._bar.update(report.step - self._bar.n)
            return
        self._since.append(report)
        if report.step % self._log_every == 0 or report.step == self._num_steps:
            figures, elapsed = _figures(_mean(self._since), mfu), self._clock() - self._began
            seconds = (self._num_steps - report.step) * elapsed / max(1, report.step - self._first_step)
            left = timedelta(seconds=round(seconds))
            others = _metrics_and_sources(report, self._headline)
            self.note(f"step {report.step}/{self._num_steps}  {figures}{others}  {left} left")
            self._since.clear()

    def note(self, text: str) -> None:
        """Show a line that is not about a step, above the bar if there is one."""
        with until_unread(self._stream):
            if self._bar is not None:
                self._bar.write(printable(text), file=self._stream)
            elif self._enabled:
                say(text, self._stream)

    def close(self) -> None:
        """Close the bar, if there is one."""
        if self._bar is not None:
            with until_unread(self._stream):
                self._bar.close()


def _mean(reports: Sequence[StepReport]) -> StepReport:
    """The last of `reports`, with the mean loss of those that have one, and the tokens per second over all."""
    losses = [report.loss for report in reports if math.isfinite(report.loss)]
    rate = sum(report.tokens for report in reports) / sum(report.step_seconds for report in reports)
    loss = math.fsum(losses) / len(losses) if losses else math.nan
    return replace(reports[-1], loss=loss, tokens_per_second=rate)


def _metrics_and_sources(report: StepReport, headline: Sequence[str]) -> str:
    """The custom metrics, such as `  accuracy 0.5312`, and the shares of the sources of a mixture."""
    shown = dict(report.metrics)
    if headline:  # means over nothing, as in a batch without bad answers, are omitted
        shown = {name: shown[name] for name in headline if math.isfinite(shown.get(name, math.nan))}
    return "".join(f"  {name} {value:.4f}" for name, value in shown.items()) + _sources(report)


def _sources(report: StepReport) -> str:
    """Each source's fraction of the tokens so far; weights refer to samples, which differ in length."""
    total = sum(source["tokens"] for source in report.sources.values())
    if not total or len(report.sources) > _MAX_SOURCES:
        return ""
    return "  " + " ".join(f"{name} {source['tokens'] / total:.1%}" for name, source in report.sources.items())


def _figures(report: StepReport, mfu: float | None) -> str:
    epoch = "" if report.epoch is None else f"epoch {report.epoch:.2f}  "
    return (
        f"{epoch}loss {report.loss:.4f}  lr {report.learning_rate:.2e}  grad norm {report.grad_norm:.3g}  "
        f"{report.tokens_per_second:,.0f} tokens/s  {format_number(report.total_tokens)} tokens  "
        f"{format_size(report.memory_bytes)}" + ("" if mfu is None else f"  MFU {mfu:.1%}")
    )
