"""Whole runs that lose a rank, or are told to stop, and go on: in the end as if nothing had happened, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import FAULTS, POINTS, verify
from tests.faults.counts import count
from tests.faults.saves import LONG
from tests.support.runs import Ended, Started, run_recipe

_STEPS, _EVERY, _TIMEOUT = 32, 4, 10.0
_TIMES = 10 if LONG else 1


@pytest.fixture(scope="module")
def settings(tiny_model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        f"model.path={tiny_model}",
        f"data.path={texts}/train.txt",
        f"data.cache_dir={tmp_path_factory.mktemp('tokens')}",
        "data.sequence_length=16",
        f"train.steps={_STEPS}",
        f"data.eval_path={texts}/held_out.txt",
        "train.eval_every=7",
        "train.eval_windows=3",  # uneven on two ranks
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "optim.lr=1e-3",
        "shard.param_dtype=float32",
        f"checkpoint.every={_EVERY}",
        "checkpoint.keep_last=2",
        "checkpoint.keep_every=8",
        "launch.device=cpu",
        "launch.ranks=2",
        f"launch.timeout_seconds={_TIMEOUT}",
    ]


@pytest.fixture(scope="module")
def undisturbed(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = run_recipe("finetune", tmp_path_factory.mktemp("runs") / "undisturbed", *settings)
    assert ended.status == 0, ended.err
    assert len(ended.losses) == _STEPS
    return ended


def _ranks(pid: int) -> list[int]:
    """The processes of the ranks of a run: each leads a group of its own."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if os.getpgid(int(child)) == int(child)]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _wait_for_step(run: Started, step: int) -> None:
    metrics, deadline = run.run_dir / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < step:
        assert time.monotonic() < deadline, f"step {step} is not reached"
        time.sleep(0.002)


def _disturb(number: signal.Signals, step: int, victims: list[int]) -> Callable[[Started], None]:
    def act(run: Started) -> None:
        _wait_for_step(run, step)
        ranks = _ranks(run.pid)
        assert len(ranks) == 2, ranks
        for victim in victims:
            os.kill(ranks[victim], number)

    return act


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_lost_rank_changes_nothing(fault: str, settings: list[str], undisturbed: Ended, tmp_path: Path) -> None:
    chance = random.Random(fault)
    for number in range(_TIMES):
        step, victim = chance.randint(1, _STEPS - 8), chance.randrange(2)
        run = Started("finetune", tmp_path / str(number), *settings, "launch.max_restarts=2")
        _disturb({"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[fault], step, [victim])(run)
        since = time.monotonic()
        ended = run.wait()
        seconds = time.monotonic() - since
        same = ended.status == 0 and ended.losses == undisturbed.losses
        count(f"{fault} a rank", failed=not same)
        assert same, (step, victim, ended.status, ended.err)
        assert not LONG or seconds < _TIMEOUT + 35, seconds


@pytest.mark.long
@pytest.mark.parametrize("resume", ["never", "PATH"])
def test_a_lost_rank_of_a_run_that_began_elsewhere(
    resume: str, settings: list[str], undisturbed: Ended, tmp_path: Path
) -> None:
    """What is said of the beginning holds for the beginning: after that the run goes on from its own steps."""
    path, first = undisturbed.run_dir / "checkpoints" / "step-00000008", 8 if resume == "PATH" else 0
    begin = f"resume={resume.replace('PATH', str(path))}"
    run = Started("finetune", tmp_path / "run", *settings, "launch.max_restarts=2", begin)
    _disturb(signal.SIGKILL, 10, [1])(run)
    ended = run.wait()
    assert ended.status == 0, ended.err
    assert ended.losses == undisturbed.losses[first:]


def _hooks() -> Iterator[Callable[[str], None]]:
    for number in range(_TIMES):

        def hook(name: str, number: int = number) -> None:
            is_here = name == POINTS[number % 5 + 2] and os.environ["RANK"] == str(number % 2)
            if is_here and os.environ["FSDP_SHARD_ATTEMPT"] == "1":
                raise ValueError("not foreseen")

        yield hook


@pytest.mark.long
def test_an_exception_on_a_rank_changes_nothing(
    settings: list[str], undisturbed: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, hook in enumerate(_hooks()):
        monkeypatch.setattr(FAULTS, "hook", hook)
        ended = run_recipe("finetune", tmp_path / str(number), *settings, "launch.max_restarts=1")
        same = ended.status == 0 and ended.losses == undisturbed.losses
        count("exception on a rank", failed=not same)
        assert same, (number, ended.status, ended.err)
    monkeypatch.setattr(FAULTS, "hook", next(_hooks()))
    if LONG:
        ended = run_recipe("finetune", tmp_path / "told", *settings)
        assert ended.status == 1
        assert ended.err.count("not foreseen") == 1, ended.err


@pytest.mark.long
def test_a_signal_to_one_rank_or_to_all_loses_at_most_the_step_in_flight(
    settings: list[str], undisturbed: Ended, tmp_path: Path
) -> None:
    chance = random.Random("signal")
    for number in range(_TIMES * 3 if LONG else 1):
        victims = ([chance.randrange(2)], [0, 1], None)[number % 3]
        step = chance.randint(1, _STEPS - 12)
        run = Started("finetune", tmp_path / str(number), *settings, "launch.max_restarts=2")
        if victims is None:  # all, as Slurm or a user does it: through the process that started them
            _wait_for_step(run, step)
            os.kill(run.pid, signal.SIGTERM)
        else:
            _disturb(signal.SIGTERM, step, victims)(run)
        ended = run.wait()
        assert ended.status == 128 + signal.SIGTERM, ended.err
        assert "To resume, give the same command" in ended.err
        assert ended.err.count("Stopped by SIGTERM") == 1, ended.err
        assert step <= len(ended.losses) < _STEPS
        saved = tmp_path / str(number) / "checkpoints" / f"step-{len(ended.losses):08d}"
        assert verify(saved).is_sound, "every step that was made is saved"
        ended = run_recipe("finetune", tmp_path / str(number), *settings)
        same = ended.status == 0 and ended.losses == undisturbed.losses
        count("SIGTERM to one rank or all", failed=not same)
        assert same, ended.err


@pytest.mark.long
def test_a_finished_run_is_left_as_it_is(settings: list[str], undisturbed: Ended) -> None:
    def snapshot() -> dict[str, tuple[int, int]]:
        files = [file for file in undisturbed.run_dir.rglob("*") if file.is_file()]
        return {str(file): (file.stat().st_mtime_ns, file.stat().st_ino) for file in files}

    before = snapshot()
    ended = run_recipe("finetune", undisturbed.run_dir, *settings)
    assert ended.status == 0, ended.err
    assert snapshot() == before
    count("restart of a finished run")
