"""A process with everything imported and every command run once, from which each case gets children of its own.

python -m tests.faults.harness.warm_process PLACE: reads lines of JSON {subject, case, commands} and answers each with a
line of JSON, the outcomes. The stand-ins must be on PYTHONPATH.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers  # so that all children have it

from tests.faults.corpus import bases
from tests.faults.corpus.case import Case, cases
from tests.faults.harness import child
from tests.faults.harness.commands import Command, commands
from tests.faults.harness.outcome import WALL_SECONDS, Outcome


def main(place: Path) -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    place.mkdir(parents=True, exist_ok=True)
    bases.make_all(place / "bases")
    found = commands()
    healthy = warm_up(found, place / "warm")
    gc.collect()
    gc.freeze()
    answers.write(json.dumps(healthy) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        case = cases(request["subject"])[request["case"]]
        outcomes = run_case(case, request["commands"], found, place / "cases", request.get("seconds", WALL_SECONDS))
        answers.write(json.dumps([outcome.to_dict() for outcome in outcomes]) + "\n")


def warm_up(found: dict[str, Command], place: Path) -> dict[str, float]:
    """Run each command on a sound model, so that what its first run imports and allocates is here; its seconds."""
    seconds = {}
    shutil.rmtree(place, ignore_errors=True)
    bases.copy("model", place / "model")
    _import_readers()
    for name, command in found.items():
        work = place / name
        work.mkdir()
        began = time.process_time()
        command(place / "model", work)
        seconds[name] = time.process_time() - began
    return seconds


def _import_readers() -> None:
    """Packages that only some formats need."""
    for name in ("gguf", "peft", "safetensors.torch"):
        importlib.import_module(name)


def run_case(
    case: Case, chosen: Sequence[str], found: dict[str, Command], place: Path, seconds: float
) -> list[Outcome]:
    """How each chosen command ends on the case: in one child, and where it had to be ended, the rest in another."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(chosen):
        outcomes += _in_child(case, chosen[len(outcomes) :], found, place, seconds)
    return outcomes


def _in_child(
    case: Case, chosen: Sequence[str], found: dict[str, Command], place: Path, seconds: float
) -> list[Outcome]:
    _remove(place)
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiver)
        _child(case, chosen, found, place, sender)
    os.close(sender)
    try:
        outcomes, hung = _receive(receiver, len(chosen), seconds)
    finally:
        os.close(receiver)
        _end_group(pid)
        _, status = os.waitpid(pid, 0)
        _remove(place)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"{case.name} cannot be built, see above"
    if len(outcomes) < len(chosen):
        reason = f"ended after {seconds:.0f} s" if hung else f"the process died: {_died(status)}"
        outcomes.append(Outcome(chosen[len(outcomes)], error=reason, hung=hung))
    return outcomes


def _child(case: Case, chosen: Sequence[str], found: dict[str, Command], place: Path, sender: int) -> None:
    """Never returns."""
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        child.run(case, place, chosen, found, lambda outcome: _write(sender, child.encode(outcome)))
    except BaseException:
        traceback.print_exc()
        os._exit(77)
    os._exit(0)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _receive(receiver: int, count: int, seconds: float) -> tuple[list[Outcome], bool]:
    """What a child sends, until it has sent all, has died, or sends nothing for too long."""
    data, deadline, received = b"", time.monotonic() + seconds, 0
    while received < count:
        ready, _, _ = select.select([receiver], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return _decode(data), True
        block = os.read(receiver, 1 << 20)
        if not block:
            break
        data += block
        if data.count(b"\n") > received:
            received, deadline = data.count(b"\n"), time.monotonic() + seconds
    return _decode(data), False


def _decode(data: bytes) -> list[Outcome]:
    return [Outcome(**json.loads(line)) for line in data.split(b"\n")[:-1]]


def _end_group(pid: int) -> None:
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _died(status: int) -> str:
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"


def _remove(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)


class WarmProcess:
    """The process, seen from a test."""

    def __init__(self, place: Path) -> None:
        root = Path(__file__).resolve().parents[3]
        stand_ins = Path(__file__).parent / "stand_ins"
        path = os.pathsep.join([str(stand_ins), str(root), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "0",
            "KERNEL_CALLS": str(place / "calls"),
            "XDG_CACHE_HOME": str(place / "cache"),
        }
        self.root = str(place / "cases" / "case" / "model")  # where each case is
        self._log = place.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.harness.warm_process", str(place)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=root,
                text=True,
            )
        self.healthy: dict[str, float] = self._answer()

    def run(self, subject: str, case: str, chosen: Sequence[str], seconds: float = WALL_SECONDS) -> list[Outcome]:
        assert self._process.stdin is not None
        request = {"subject": subject, "case": case, "commands": list(chosen), "seconds": seconds}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return [Outcome(**outcome) for outcome in self._answer()]

    def close(self) -> None:
        with self._process:  # which closes its pipes and waits
            pass

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the warm process died: {self._log.read_text()[-3000:]}"
        return json.loads(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
