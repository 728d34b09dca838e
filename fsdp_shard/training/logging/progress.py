"""What a person watching the run sees: a bar on a terminal, plain lines elsewhere. Only rank 0 makes one."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TextIO

from fsdp_shard.training.loop import StepReport
from fsdp_shard.utils import format_size

_MOST_SOURCES = 6  # that are told of in a line


class Progress:
    """Shows reports of steps `first_step` + 1 to `num_steps`; in plain lines one for every `log_every` of them.

    Loss and tokens a second of a plain line are those of all steps since the line before; of a mixture, it also has
    each source's part of all tokens so far. The time that is left counts what happens between steps too, evaluations
    and saves. With `enabled` false (ranks other than 0) nothing is shown.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int = 0,
        log_every: int = 1,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._log_every = log_every
        self._enabled = enabled
        self._stream = stream or sys.stderr
        self._clock, self._began = clock, 0.0
        self._since: list[StepReport] = []
        self._bar = self._open_bar() if enabled and self._stream.isatty() else None

    def show(self, report: StepReport, mfu: float | None = None) -> None:
        """Tell of one step, and what part of the GPUs' arithmetic it used, if that is known."""
        self._began = self._began or self._clock() - report.step_seconds
        if self._bar is not None:
            self._bar.set_postfix_str(_figures(report, mfu), refresh=False)
            self._bar.update(report.step - self._bar.n)
            return
        self._since.append(report)
        if report.step % self._log_every == 0 or report.step == self._num_steps:
            figures = _figures(_together(self._since), mfu)
            left = self._remaining(report.step)
            self.note(f"step {report.step}/{self._num_steps}  {figures}{_parts(report)}  {left}")
            self._since.clear()

    def note(self, text: str) -> None:
        """One line that is not about a step, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._enabled:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_bar(self) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=self._num_steps,
            initial=self._first_step,
            unit="step",
            file=self._stream,
            dynamic_ncols=True,
            leave=True,
        )

    def _remaining(self, step: int) -> str:
        each = (self._clock() - self._began) / max(1, step - self._first_step)
        return f"{format_seconds((self._num_steps - step) * each)} left"


def format_seconds(seconds: float) -> str:
    """As a clock says it, in hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _together(reports: Sequence[StepReport]) -> StepReport:
    """The last of `reports`, with the mean loss of those that have one and the tokens a second of all."""
    losses = [report.loss for report in reports if math.isfinite(report.loss)]
    rate = sum(report.tokens for report in reports) / sum(report.step_seconds for report in reports)
    loss = math.fsum(losses) / len(losses) if losses else math.nan
    return replace(reports[-1], loss=loss, tokens_per_second=rate)


def _parts(report: StepReport) -> str:
    """Each source's part of the tokens so far: samples are mixed by weights, but some are longer than others."""
    total = sum(source["tokens"] for source in report.sources.values())
    if not total or len(report.sources) > _MOST_SOURCES:
        return ""
    return "  " + " ".join(f"{name} {source['tokens'] / total:.1%}" for name, source in report.sources.items())


def _figures(report: StepReport, mfu: float | None) -> str:
    return (
        f"loss {report.loss:.4f}  lr {report.learning_rate:.2e}  grad norm {report.grad_norm:.3g}  "
        f"{report.tokens_per_second:,.0f} tokens/s  {format_size(report.memory_bytes)}"
        + ("" if mfu is None else f"  MFU {mfu:.1%}")
    )
