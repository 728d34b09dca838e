"""A process with everything imported and every command run once, from which each case gets children of its own.

python -m tests.faults.harness.warm_process PLACE: reads lines of JSON {subject, case, commands} and answers each with a
line of JSON, the outcomes. The stand-ins must be on PYTHONPATH.
"""

from __future__ import annotations

import gc
import importlib
import itertools
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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers  # so that all children have it

from tests.faults.corpus import bases
from tests.faults.corpus.case import Case, cases, subjects
from tests.faults.fuzz import formats
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
    subjects()  # imported, so that no child does
    found = commands()
    healthy = warm_up(found, place / "warm")
    gc.collect()
    gc.freeze()
    answers.write(json.dumps(healthy) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        jobs = [Job(*job) for job in request["jobs"]]
        outcomes = run_jobs(jobs, found, place / "cases", request["seconds"])
        answers.write(json.dumps([[outcome.to_dict() for outcome in ended] for ended in outcomes]) + "\n")


class Job(NamedTuple):
    """A case, and commands to run on it."""

    subject: str
    name: str
    commands: Sequence[str]

    @property
    def case(self) -> Case:
        """The case; of an example of hypothesis, the name says how to build it."""
        return formats.case(self.name) if self.subject == "fuzz" else cases(self.subject)[self.name]


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


def run_jobs(jobs: Sequence[Job], found: dict[str, Command], place: Path, seconds: float) -> list[list[Outcome]]:
    """How each command of each job ends: in one child, and where it had to be ended or died, the rest in another."""
    outcomes: list[list[Outcome]] = [[] for _ in jobs]
    while True:
        left = [
            (number, job._replace(commands=job.commands[len(outcomes[number]) :]))
            for number, job in enumerate(jobs)
            if len(outcomes[number]) < len(job.commands)
        ]
        if not left:
            return outcomes
        for (number, _), ended in zip(left, _in_child([job for _, job in left], found, place, seconds), strict=False):
            outcomes[number] += ended


def _in_child(jobs: Sequence[Job], found: dict[str, Command], place: Path, seconds: float) -> list[list[Outcome]]:
    """The outcomes of a child up to where it ended, one that it was ended by included."""
    _remove(place)
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiver)
        _child(jobs, found, place, sender)
    os.close(sender)
    try:
        received, hung = _receive(receiver, sum(len(job.commands) for job in jobs), seconds)
    finally:
        os.close(receiver)
        _end_group(pid)
        _, status = os.waitpid(pid, 0)
        _remove(place)
    ended, outcomes = iter(received), list[list[Outcome]]()
    for job in jobs:
        outcomes.append(list(itertools.islice(ended, len(job.commands))))
        if len(outcomes[-1]) < len(job.commands):
            is_built = os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
            assert is_built, f"{job.subject}: {job.name} cannot be built, see above"
            reason = f"ended after {seconds:.0f} s" if hung else f"the process died: {_died(status)}"
            outcomes[-1].append(Outcome(job.commands[len(outcomes[-1])], error=reason, hung=hung))
            break
    return outcomes


def _child(jobs: Sequence[Job], found: dict[str, Command], place: Path, sender: int) -> None:
    """Never returns."""
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        child.limit_memory()
        for number, job in enumerate(jobs):
            for outcome in child.run(job.case, place / str(number), job.commands, found):
                _write(sender, child.encode(outcome))
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
        self._log = place.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.harness.warm_process", str(place)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # a case that kills its group kills no test
                cwd=root,
                text=True,
            )
        self.healthy: dict[str, float] = self._answer()

    def run(self, jobs: Sequence[Job], seconds: float = WALL_SECONDS) -> list[list[Outcome]]:
        """How each command of each job ends; all in one child, as far as that lives."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then it says why
            self._process.stdin.write(json.dumps({"jobs": jobs, "seconds": seconds}) + "\n")
            self._process.stdin.flush()
        return [[Outcome(**outcome) for outcome in ended] for ended in self._answer()]

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
