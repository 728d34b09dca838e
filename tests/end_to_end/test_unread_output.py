"""A run whose output nobody reads any more: Ctrl-C has also ended `tee`, or the terminal is closed. It saves."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import FSDP_SHARD, environment, hear_signals

Start = Callable[[dict[str, Any]], "subprocess.Popen[bytes]"]


def _end_reader_of_pipe(start: Start, has_steps: Callable[[], None]) -> tuple[int, signal.Signals]:
    reading, writing = os.pipe()
    reader = subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.DEVNULL)
    os.close(reading)
    run = start({"stdout": writing, "stderr": writing, "preexec_fn": hear_signals, "start_new_session": True})
    os.close(writing)
    has_steps()
    reader.kill()
    reader.wait()
    os.killpg(run.pid, signal.SIGINT)
    return run.wait(60), signal.SIGINT


def _close_terminal(start: Start, has_steps: Callable[[], None]) -> tuple[int, signal.Signals]:
    master, slave = pty.openpty()

    def take_terminal() -> None:
        hear_signals()
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    run = start({"stdin": slave, "stdout": slave, "stderr": slave, "preexec_fn": take_terminal})
    os.close(slave)
    enough = threading.Event()

    def read() -> None:
        os.set_blocking(master, False)
        while not enough.wait(0.02):
            try:
                os.read(master, 65536)
            except BlockingIOError:
                continue

    reader = threading.Thread(target=read)
    reader.start()
    has_steps()
    enough.set()
    reader.join()
    os.close(master)  # the kernel sends SIGHUP
    return run.wait(60), signal.SIGHUP


def _settings(model: Path, directory: Path, ranks: int, steps: int) -> list[str]:
    (directory / "text.txt").write_text("Some text to train on. " * 200)
    settings = [f"model.path={model}", f"data.path={directory}/text.txt", "data.sequence_length=32"]
    settings += [f"train.steps={steps}", "train.global_batch_size=2", "checkpoint.every=100000"]
    return [*settings, f"run_dir={directory}/run", f"launch.ranks={ranks}", "launch.device=cpu"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lose_reader", [_end_reader_of_pipe, _close_terminal])
def test_a_stopped_run_saves(
    lose_reader: Callable[[Start, Callable[[], None]], tuple[int, signal.Signals]],
    ranks: int,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    settings = _settings(tiny_model, tmp_path, ranks, steps=100_000)
    metrics = tmp_path / "run" / "metrics.jsonl"

    def start(options: dict[str, Any]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*FSDP_SHARD, "finetune", *settings], env=environment(), cwd=tmp_path, **options)

    def has_steps() -> None:
        end = time.monotonic() + 120
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert time.monotonic() < end
            time.sleep(0.05)

    status, number = lose_reader(start, has_steps)
    assert status == 128 + number
    steps = metrics.read_text().count("\n")
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{steps:08d}\n"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_ends_well(ranks: int, tiny_model: Path, tmp_path: Path) -> None:
    settings = _settings(tiny_model, tmp_path, ranks, steps=20)
    reading, writing = os.pipe()
    os.close(reading)
    command = [*FSDP_SHARD, "finetune", *settings]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, stdout=writing, stderr=writing, timeout=120)
    os.close(writing)
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
    assert not (tmp_path / "run" / "error.txt").exists()
