"""The log goes on after a restart as if nothing had been; people see a line or a bar; curves are drawn."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.training.logging.loss_plot import check_plots, held_out_label, plot_losses, running_mean
from fsdp_shard.training.logging.metrics_log import MetricsLog, of_last_held_out, read_rows
from fsdp_shard.training.logging.progress import Progress
from fsdp_shard.training.loop import StepReport


def write_steps(path: Path, steps: range, resumed_step: int | None = None) -> None:
    with closing(MetricsLog(path, resumed_step)) as log:
        for step in steps:
            log.write({"step": step, "loss": step / 3})


def test_a_resumed_log_is_that_of_a_run_without_a_stop(tmp_path: Path) -> None:
    write_steps(tmp_path / "whole", range(1, 9))
    write_steps(tmp_path / "parts", range(1, 7))
    with (tmp_path / "parts").open("ab") as stream:
        stream.write(b'\xff\xfe\n{"step": 7, "lo')  # a damaged line; killed in the middle of the next
    write_steps(tmp_path / "parts", range(5, 9), resumed_step=4)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["parts", "whole"]


def test_a_log_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="fifo is not a regular file"):
        read_rows(tmp_path / "fifo")
    (tmp_path / "long").write_bytes(b'{"step": 1, "loss": %s}\n{"step": 2}\n' % (b"9" * (1 << 20)))
    assert read_rows(tmp_path / "long") == [{"step": 2}]


def test_a_new_run_begins_a_new_log(tmp_path: Path) -> None:
    write_steps(tmp_path / "run" / "log", range(1, 9))
    write_steps(tmp_path / "run" / "log", range(1, 3))
    assert [row["step"] for row in read_rows(tmp_path / "run" / "log")] == [1, 2]


def test_rows_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "log")
    log.write({"step": 1, "loss": 0.1})
    assert json.loads((tmp_path / "log").read_text()) == {"step": 1, "loss": 0.1}
    log.close()


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"step": 1}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is a link to .*elsewhere"):
        MetricsLog(tmp_path / "metrics.jsonl", 1)


def test_a_row_has_the_number_of_a_step(tmp_path: Path) -> None:
    steps = ("1", "true", "-1", str(1 << 53), "2.0", "null", "2")
    (tmp_path / "log").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    assert read_rows(tmp_path / "log") == [{"step": 1}, {"step": 2}]


def test_no_log_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none") == []


def test_evaluations_of_other_held_out_data_are_cut() -> None:
    older = [{"step": step, "loss": 1.0} for step in (0, 2)]
    first = [{"step": step, "held_out": "first"} for step in (4, 6)]
    second = [{"step": step, "held_out": "second"} for step in (8, 10)]
    assert of_last_held_out([]) == []
    assert of_last_held_out(older) == older, "which do not say"
    assert of_last_held_out([*older, *first]) == first
    assert of_last_held_out([*first, *second]) == second
    assert of_last_held_out([*second, *first, *second]) == second, "and no earlier ones"


def report(step: int) -> StepReport:
    return StepReport(step, 2.34567, 1.5e-4, 0.789, 4096, 12_345.6, 2.0, 0.01, 1_234_000_000)


def test_plain_lines() -> None:
    """A line sums up the steps since the one before; what is left counts the time between steps, here 1 s of 3."""
    stream, seconds = io.StringIO(), itertools.count(3, 3)
    with closing(Progress(7, first_step=2, log_every=3, stream=stream, clock=lambda: now)) as progress:
        for step in range(3, 8):
            now = next(seconds)
            loss = math.nan if step == 4 else float(step)
            seen: dict[str, Any] = {"tokens": 1000 * step, "total_tokens": 500 * step**2, "epoch": step / 4}
            progress.show(replace(report(step), loss=loss, **seen))
        progress.note("saved")
    assert stream.getvalue().splitlines() == [
        f"step {first}  lr 1.50e-04  grad norm 0.789  {tokens} tokens  1.15 GiB  {left} left"
        for first, tokens, left in (
            ("3/7  epoch 0.75  loss 3.0000", "1,500 tokens/s  4.5 K", "0:00:08"),
            ("6/7  epoch 1.50  loss 5.5000", "2,500 tokens/s  18 K", "0:00:03"),
            ("7/7  epoch 1.75  loss 7.0000", "3,500 tokens/s  24.5 K", "0:00:00"),
        )
    ] + ["saved"]


def test_sources_of_a_mixture() -> None:
    counts = {
        "books": {"samples": 6, "tokens": 750, "epochs": 1.5},
        "web": {"samples": 6, "tokens": 250, "epochs": 0.1},
    }
    mixed = replace(report(4), sources=counts)
    assert mixed.row == report(4).row | {"sources": counts}
    stream = io.StringIO()
    Progress(4, stream=stream).show(mixed)
    assert "epoch" not in stream.getvalue(), "each source has its own"
    assert "1.15 GiB  books 75.0% web 25.0%  0:00:00 left" in stream.getvalue()
    stream = io.StringIO()
    Progress(4, stream=stream).show(replace(mixed, sources={str(i): counts["web"] for i in range(7)}))
    assert "%" not in stream.getvalue(), "too many for a line"


def test_the_part_of_a_gpu_that_is_used() -> None:
    stream = io.StringIO()
    Progress(4, stream=stream).show(report(4), 0.4321)
    assert "1.15 GiB  MFU 43.2%" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    with closing(Progress(4, first_step=2, stream=stream)) as progress:
        progress.show(report(3))
        progress.note("saved")
        progress.show(report(4))
    assert "loss 2.3457" in stream.getvalue()
    assert "4/4" in stream.getvalue()
    assert "saved\n" in stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_ranks_are_silent(stream: io.StringIO) -> None:
    with closing(Progress(4, enabled=False, stream=stream)) as progress:
        progress.show(report(4))
        progress.note("saved")
    assert stream.getvalue() == ""


def rows(count: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 3 / math.sqrt(step)} for step in range(1, count + 1)]


@pytest.mark.parametrize(
    ("train", "held_out"),
    [(rows(100), [{"step": 0, "loss": 3.0}, {"step": 100, "loss": 1.0}]), (rows(3), []), ([], rows(2)), ([], [])],
)
def test_curves_are_drawn(tmp_path: Path, train: list[Any], held_out: list[Any]) -> None:
    import struct

    plot_losses(train, held_out, tmp_path / "loss.png", "a run of $MODEL_{and$")
    content = (tmp_path / "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1280, 720)


def test_the_legend_has_the_first_perplexity_and_the_last() -> None:
    evaluations = [{"step": step, "loss": loss, "perplexity": math.exp(loss)} for step, loss in ((0, 3.0), (9, 1.0))]
    assert held_out_label(evaluations) == "held out (perplexity 20.1 \N{RIGHTWARDS ARROW} 2.72)"
    assert held_out_label(evaluations[1:]) == "held out (perplexity 2.72)"
    assert held_out_label([{"step": 0, "loss": 3.0}]) == "held out"


def test_running_mean() -> None:
    assert running_mean([1.0, 2.0, 3.0, 7.0], 2) == [1.0, 1.5, 2.5, 5.0]


def test_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plots()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*\[plots\].*train\.plot=false"):
        check_plots()


def test_rows_wait_for_a_disk_that_is_full(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path / "log")) as log:
        assert log.write({"step": 1}) is None
        with Path("/dev/full").open("ab", buffering=0) as full:
            real, log._stream = log._stream, full
            for step in (2, 3):
                error = log.write({"step": step})
                assert error is not None
                assert error.errno == errno.ENOSPC
        log._stream = real
        assert read_rows(tmp_path / "log") == [{"step": 1}]
        assert log.write({"step": 4}) is None
    assert read_rows(tmp_path / "log") == [{"step": step} for step in (1, 2, 3, 4)]
