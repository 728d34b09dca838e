"""What a person watching the run sees: a bar on a terminal, plain lines elsewhere. Only rank 0 makes one."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, TextIO

from fsdp_shard.sizes import format_size
from fsdp_shard.training.loop import StepReport


class Progress:
    """Shows reports of steps `first_step` + 1 to `num_steps`; of every `log_every`-th and the last one in plain lines.

    With `enabled` false (ranks other than 0) nothing is shown.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int = 0,
        log_every: int = 1,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._log_every = log_every
        self._enabled = enabled
        self._stream = stream or sys.stderr
        self._seconds = 0.0
        self._bar = self._open_bar() if enabled and self._stream.isatty() else None

    def show(self, report: StepReport, mfu: float | None = None) -> None:
        """Tell of one step, and what part of the GPUs' arithmetic it used, if that is known."""
        self._seconds += report.step_seconds
        if self._bar is not None:
            self._bar.set_postfix_str(_figures(report, mfu), refresh=False)
            self._bar.update(report.step - self._bar.n)
        elif report.step % self._log_every == 0 or report.step == self._num_steps:
            self.note(f"step {report.step}/{self._num_steps}  {_figures(report, mfu)}  {self._remaining(report.step)}")

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
        left = round((self._num_steps - step) * self._seconds / max(1, step - self._first_step))
        return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def _figures(report: StepReport, mfu: float | None) -> str:
    return (
        f"loss {report.loss:.4f}  lr {report.learning_rate:.2e}  grad norm {report.grad_norm:.3g}  "
        f"{report.tokens_per_second:,.0f} tokens/s  {format_size(report.memory_bytes)}"
        + ("" if mfu is None else f"  MFU {mfu:.1%}")
    )
