"""How a `Checkpointer` ends: closed, forgotten, by an error or with the process; and who may use its directory then."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_shard as fs
from fsdp_shard.checkpoint import FAULTS
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.training.checkpoints import background_saver
from tests.support.commands import run as run_command
from tests.support.ranks import on_ranks


def test_two_at_once(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path), pytest.raises(ConfigError, match="in use by another run"):
        fs.Checkpointer(tmp_path)
    with fs.Checkpointer(tmp_path) as checkpointer:
        pass
    with pytest.raises(ConfigError, match="is closed"):
        checkpointer.wait()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_threads_save_one_after_the_other(asynchronous: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    failed: list[BaseException] = []

    def save(step: int) -> None:
        try:
            checkpointer.save(step, model, optimizer)
        except BaseException as error:
            failed.append(error)

    with fs.Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
        threads = [threading.Thread(target=save, args=(step,)) for step in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps == [*range(8)]


def test_after_an_error_nothing_waits_for_another_thread(tmp_path: Path) -> None:
    """It may wait for a save that hangs."""
    is_saving, may_end = threading.Event(), threading.Event()
    model = nn.Linear(2, 2)

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            is_saving.set()
            may_end.wait(60)
            raise RuntimeError("ended")

        def load_state_dict(self, state: Any) -> None:
            pass

    def save() -> None:
        with contextlib.suppress(Exception):
            checkpointer.save(1, model, slow=Slow())

    checkpointer = fs.Checkpointer(tmp_path)
    thread = threading.Thread(target=save)
    thread.start()
    is_saving.wait()
    with pytest.raises(KeyboardInterrupt), checkpointer:
        raise KeyboardInterrupt
    assert thread.is_alive()
    may_end.set()
    thread.join()


_FORGETFUL = """
import time, torch, fsdp_shard as fs
from fsdp_shard.checkpoint import FAULTS

FAULTS.hook = lambda point: time.sleep(point == "staged")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())


def train():
    checkpointer = fs.Checkpointer("run")
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    restored = checkpointer.restore(model, optimizer)
    checkpointer.save(restored.step + 1 if restored else 1, model, optimizer)
    return checkpointer


train()
train()
print(fs.Checkpointer("run").steps)
kept = train()
"""


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_a_save_of_what_nobody_closes_ends(fails: bool, tmp_path: Path) -> None:
    """Where the Checkpointer is collected, before another one uses the directory, and at the end of the process."""
    script = _FORGETFUL + ("raise ValueError('x')" if fails else "")
    done = run_command([sys.executable, "-c", script], tmp_path)
    assert done.out.splitlines()[0] == "[1, 2]"
    assert done.status == int(fails)
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.steps == [1, 2, 3]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_that_collects_its_checkpointer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs in the thread of the save, which cannot wait for itself."""
    model = nn.Linear(2, 2)
    kept = [fs.Checkpointer(tmp_path)]
    forgotten, is_dropped = weakref.ref(kept[0]), threading.Event()

    def drop(point: str) -> None:
        if point == "staged":
            is_dropped.wait(10)
            kept.clear()

    monkeypatch.setattr(FAULTS, "hook", drop)
    kept[0].save(1, model, torch.optim.AdamW(model.parameters()))
    is_dropped.set()
    for name in ("save-step-1", "end-checkpointer"):  # the first starts the second
        for thread in [one for one in threading.enumerate() if one.name == name]:
            thread.join(10)
    assert forgotten() is None
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps == [1]


def test_an_earlier_error_at_a_prompt_ends_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_saver, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(sys, "last_value", ValueError("x"), raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(FAULTS, "hook", lambda point: time.sleep(0.5 * (point == "staged")))
    model = nn.Linear(2, 2)
    fs.Checkpointer(tmp_path).save(1, model, torch.optim.AdamW(model.parameters()))
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps == [1]


def _save_and(path: Path, error: BaseException | None) -> None:
    model = nn.Linear(2, 2)
    with fs.Checkpointer(path) as checkpointer:
        checkpointer.save(1, model, torch.optim.AdamW(model.parameters()))
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0), KeyboardInterrupt(), ValueError("x")])
def test_what_ends_the_block_loses_no_save(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(error, SystemExit):  # however long it takes
        monkeypatch.setattr(background_saver, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(FAULTS, "hook", lambda point: time.sleep(0.5 * (point == "staged")))
    with pytest.raises(type(error)):
        _save_and(tmp_path, error)
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps == [1]


def test_a_save_that_fails_while_the_block_ends_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(point: str) -> None:
        if point == "weights-written":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FAULTS, "hook", full)
    with pytest.raises(ValueError, match="x"):
        _save_and(tmp_path, ValueError("x"))
    assert "Step 1 could not be saved. " in caplog.text
    assert os.strerror(errno.ENOSPC) in caplog.text


def test_a_signal_saves_a_step_after_one_that_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(point: str) -> None:
        if point == "weights-written":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = nn.Linear(2, 2)
    with fs.Checkpointer(tmp_path, asynchronous=False, max_failures=2) as checkpointer:
        assert not checkpointer.save_on_signal(0, model)
        monkeypatch.setattr(FAULTS, "hook", full)
        checkpointer.save(1, model)
        monkeypatch.setattr(FAULTS, "hook", None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpointer.save_on_signal(2, model)
        assert checkpointer.steps == [2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_a_save_that_outlives_its_block_keeps_others_out(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a new one would write to the files of the same step."""
    may_go_on = threading.Event()
    monkeypatch.setattr(background_saver, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(FAULTS, "hook", lambda point: point == "staged" and may_go_on.wait(60))
    with pytest.raises(type(error)):
        _save_and(tmp_path, error)
    assert "Step 1 was not on the disk yet when the process stopped waiting for it." in caplog.text
    (thread,) = [one for one in threading.enumerate() if one.name == "save-step-1"]
    with pytest.raises(ConfigError, match=f"in use by another run .process {os.getpid()} on"):
        fs.Checkpointer(tmp_path)
    may_go_on.set()
    thread.join(60)
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps == [1]
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("where", ["wait", "close", "end of the block"])
def test_an_interrupted_wait_ends_soon_and_keeps_others_out(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(background_saver, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(FAULTS, "hook", lambda point: point == "staged" and may_go_on.wait(60))
    model = nn.Linear(2, 2)

    def save_and_wait() -> None:
        with fs.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, model, torch.optim.AdamW(model.parameters()))
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            if where == "wait":
                checkpointer.wait()
            elif where == "close":
                checkpointer.close()

    with pytest.raises(KeyboardInterrupt):
        save_and_wait()
    (thread,) = [one for one in threading.enumerate() if one.name == "save-step-1"]
    with pytest.raises(ConfigError, match="in use by another run"):
        fs.Checkpointer(tmp_path)
    may_go_on.set()
    thread.join(60)
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps == [1]


def test_a_loop_may_change_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    with fs.Checkpointer("run") as checkpointer:
        checkpointer.save(1, model)
        os.chdir("elsewhere")
        checkpointer.save(2, model)
    assert not any((tmp_path / "elsewhere").iterdir())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.steps == [1, 2]


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with fs.Checkpointer("~/run") as checkpointer:
        checkpointer.save(1, nn.Linear(2, 2))
    fs.save_pretrained(nn.Linear(2, 2), "~/model")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["model", "run"]


@pytest.mark.parametrize("path", ["", 5, None])
def test_what_is_no_path(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (fs.Checkpointer, lambda path: fs.save_pretrained(nn.Linear(2, 2), path)):
        with pytest.raises(ConfigError, match=f"^{path!r} is not a path; give a string or a pathlib.Path"):
            call(path)
    assert not list(tmp_path.iterdir())


def test_an_address_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="s3://bucket/run is not a local directory; give one, and remote=s3://buck"):
        fs.Checkpointer("s3://bucket/run")
    assert not any(tmp_path.iterdir())


def _num_gloo_threads() -> int:
    num_threads = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            num_threads += "gloo_runloop" in (task / "comm").read_text()
    return num_threads


def _num_settled_gloo_threads() -> int:
    """Their number once it has not changed for a second: a thread names itself a little after its start."""
    found, since = _num_gloo_threads(), time.monotonic()
    while time.monotonic() - since < 1:
        time.sleep(0.01)
        if (now := _num_gloo_threads()) != found:
            found, since = now, time.monotonic()
    return found


@pytest.mark.long
def test_no_threads_of_groups_are_left(tmp_path: Path) -> None:
    """One that frees the tensors of the last collectives while Python exits would abort the process."""

    def work(context: DistributedContext) -> list[int]:
        model = nn.Linear(2, 2)
        context.barrier()
        counts = [_num_settled_gloo_threads()]
        with fs.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, model, torch.optim.AdamW(model.parameters()))
            counts.append(_num_settled_gloo_threads())
        counts.append(_num_settled_gloo_threads())
        fs.save_pretrained(model, tmp_path / "model")
        fs.load_weights(model, tmp_path / "model")
        return [*counts, _num_settled_gloo_threads()]

    for before, during, *after in on_ranks(2, work):
        assert during > before
        assert after == [before, before]


_FORKING = """
import os, time, fsdp_shard as fs

checkpointer = fs.Checkpointer("run")
child = os.fork()
if child == 0:
    os.closerange(1, 3)  # or the output would not end with this process
    time.sleep(600)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.long
def test_a_forked_process_does_not_keep_the_directory(tmp_path: Path) -> None:
    """A data worker may outlive a process that was killed."""
    done = run_command([sys.executable, "-c", _FORKING], tmp_path)
    try:
        fs.Checkpointer(tmp_path / "run").close()
    finally:
        os.kill(int(done.out), signal.SIGKILL)
