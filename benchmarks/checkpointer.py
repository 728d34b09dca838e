"""`fs.Checkpointer` beside what else keeps the checkpoints of a loop: what is lost, what is noticed, what it costs.

    python benchmarks/checkpointer.py --work /big/disk/bench --kills 20

All sides (`checkpointers/`) train the same model from a config, on two gloo ranks under `fully_shard` with AdamW,
unless their note says otherwise. For each side:

- kills: all ranks, and what they have started, get SIGKILL at a random moment of a run that saves every few steps, and
  a fresh start restores the newest step that it finds. It is *unreadable* if that raises, *mixed* if weights and
  optimizer are not those that the loop had at that step, and *gone* if an older step, or none, is found than one
  that was reported to be on the disk. After an unreadable one the side begins anew in an empty directory. A save in
  the background counts as under way until the loop waits for it, which is before the next one.
- flips: one bit of a data file of a complete step is flipped, and the step restored: an error, or silence.
- costs: how long `save` keeps the loop from going on, with what the next `optimizer.step` takes longer; seconds until
  the step is on the disk if nothing else is done, with an fsync of each file, which takes long only where the side has
  none; bytes; seconds to restore it on 2 ranks, 1 and 3, imports apart, and whether that is bit-equal.

Ranks are forked from a process that has imported everything, and have one thread each. Every figure of a cost is the
median of `--rounds` rounds; a round has each side once, in an order of its own, so that whatever else the machine does
meets all of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpointers import SIDES, Log, Side, build
from measure import MB, kept_memory

RANKS = 2
OTHER_RANKS = (1, 3)
SAVES = 6  # of a round of costs; the first two allocate what the others use again
TIMEOUT = 120.0  # seconds until a run is held to hang
_PATH = re.compile(r"(/[^\s:'/]+)+/(?=(killed|saved)\b)")  # of this machine
_NUMBERS = re.compile(r"\b(step[_-]|checkpoint[_-])\d+")  # so that what is the same but for the step is counted as one
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Task:
    """What the ranks of a run do: restore the newest step in `directory`, and train up to step `last`."""

    side: str
    directory: str
    size: str
    ranks: int = RANKS
    last: int = 0
    every: int = 2
    seed: int = 0
    in_turns: bool = False
    again: bool = False


# ---- runs


def _rank(rank: int, task: Task, port: int, place: str) -> None:
    os.setsid()  # so that it can be killed with what it starts
    output = os.open(f"{place}/rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": task.ranks, "LOCAL_WORLD_SIZE": task.ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})  # as torchrun does
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    log = Log(Path(place, "events"), task.every, in_turns=task.in_turns, again=task.again)
    side = SIDES[task.side](Path(task.directory), build(task.size, task.seed))
    side.run(log, task.last)
    side.close()
    dist.barrier()
    log.write(event="end")
    signal.pause()  # until it is killed: what libraries do at exit is not measured


class Run:
    """A run of real ranks."""

    def __init__(self, task: Task, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        Path(task.directory).mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        self.place = place
        self.ranks: list[ForkProcess] = [
            _FORK.Process(target=_rank, args=(rank, task, port, str(place))) for rank in range(task.ranks)
        ]
        for process in self.ranks:
            process.start()

    def events(self) -> list[dict[str, Any]]:
        """What it has reported so far."""
        file = self.place / "events"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, event: str) -> str | None:
        """Wait until it reports an event; what went wrong if it fails before."""
        end = time.monotonic() + TIMEOUT
        while not any(found["event"] == event for found in self.events()):
            failed = [rank for rank, process in enumerate(self.ranks) if process.exitcode]
            if failed:
                time.sleep(0.5)  # the others may have more to say than that this one is gone
                return self.reason()
            if time.monotonic() > end:
                return f"hangs: no {event!r} in {TIMEOUT:g} s"
            time.sleep(0.01)
        return None

    def reason(self) -> str:
        """The first exception that a rank has raised which is not about another rank that is gone."""
        said = [(self.place / f"rank-{rank}.txt") for rank in range(len(self.ranks))]
        lines = [line for file in said if file.exists() for line in file.read_text(errors="replace").splitlines()]
        errors = [line.strip() for line in lines if _is_exception(line)]
        first = [line for line in errors if "Connection" not in line and "gloo" not in line]
        return (first or errors or lines or ["it ended without a word"])[0].split(". ")[0][:200]

    def kill(self) -> None:
        """End all ranks at once, with what they have started."""
        for process in self.ranks:
            with suppress(ProcessLookupError):
                assert process.pid is not None
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.ranks:
            process.kill()  # one that is not yet the leader of its group
            process.join()


def _is_exception(line: str) -> bool:
    name = line.partition(":")[0].removeprefix("[rank0]: ").rpartition(".")[2]
    return not line.startswith(" ") and name.endswith(("Error", "Exception", "Interrupt"))


@contextmanager
def running(task: Task, place: Path) -> Iterator[Run]:
    run = Run(task, place)
    try:
        yield run
    finally:
        run.kill()


def restored(task: Task, place: Path) -> tuple[dict[str, Any], str | None]:
    """Restore the newest step: step, checksum and seconds as they were reported, and what went wrong."""
    with running(task, place) as run:
        problem = run.wait_for("end")
        return {name: value for event in reversed(run.events()) for name, value in event.items()}, problem


# ---- what is measured


@dataclass
class Figures:
    """Of one side."""

    name: str
    note: str
    unavailable: str = ""
    kills: int = 0
    kills_in_saves: int = 0
    unreadable: int = 0
    mixed: int = 0
    gone: int = 0
    flips: int = 0
    flips_found: int = 0
    flips_silent: int = 0
    stall: list[float] = field(default_factory=list)
    on_disk: list[float] = field(default_factory=list)
    num_bytes: int = 0
    restore: dict[int, list[float]] = field(default_factory=dict)
    problems: dict[str, int] = field(default_factory=dict)
    unequal: list[int] = field(default_factory=list)

    def problem(self, what: str, reason: str) -> None:
        said = f"{what}: " + _NUMBERS.sub(r"\1N", _PATH.sub("", reason))
        self.problems[said] = self.problems.get(said, 0) + 1


class Bench:
    """All that is measured, in a directory of its own for each side."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, options.work.resolve() / "checkpointer"
        self.size = "quick" if options.quick else "5M"
        self.steps: dict[str, tuple[Path, int, str]] = {}  # of each side a complete one: directory, number, checksum

    def task(self, side: str, directory: Path, **settings: Any) -> Task:
        return Task(side, str(directory), self.size, every=self.options.every, **settings)

    def kill(self, side: str, found: Figures) -> None:
        """Kill runs at random moments, and restore what they have left."""
        moments = random.Random(f"{self.options.seed} {side}")
        directory, place = self.work / side / "killed", self.work / side / "run"
        shutil.rmtree(directory, ignore_errors=True)
        known: dict[int, set[str]] = {}
        durable, number, is_check = 0, 0, False
        while True:
            is_last = number == self.options.kills
            with running(self.task(side, directory, last=0 if is_last else 1 << 20, seed=number), place) as run:
                problem = run.wait_for("restored")
                if problem is not None:
                    if not is_check:
                        raise RuntimeError(f"{found.name} does not start in an empty directory: {problem}")
                    found.unreadable += 1
                    found.problem("after a kill", problem)
                    shutil.rmtree(directory)
                    known, durable, is_check = {}, 0, False
                    if is_last:
                        return
                    continue
                self.compare(run.events()[0], known, durable, found)
                if is_last:
                    return
                if (problem := run.wait_for("durable")) is not None:
                    raise RuntimeError(f"{found.name} does not save: {problem}")
                time.sleep(moments.uniform(0, self.options.span))
                run.kill()
                events = run.events()
            number, is_check = number + 1, True
            found.kills += 1
            for event in events:
                if event["event"] == "saving":
                    known.setdefault(event["step"], set()).add(event["checksum"])
                if event["event"] == "durable":
                    durable = max(durable, event["step"])
            states = [event["event"] for event in events if event["event"] in ("saving", "durable")]
            found.kills_in_saves += states[-1:] == ["saving"]

    def compare(self, event: Mapping[str, Any], known: Mapping[int, set[str]], durable: int, found: Figures) -> None:
        step = event["step"]
        if (step or 0) < durable:
            found.gone += 1
            found.problem("after a kill", f"step {durable} was on the disk, and {step or 'none'} was restored")
        if step is not None and event["checksum"] not in known.get(step, ()):
            found.mixed += 1
            found.problem("after a kill", "weights or optimizer are not those of the step that was saved")

    def cost(self, side: str, found: Figures) -> None:
        """Save in a fresh run, and restore the last step on several numbers of ranks."""
        directory, place = self.work / side / "saved", self.work / side / "run"
        shutil.rmtree(directory, ignore_errors=True)
        os.sync()
        last = SAVES * self.options.every + 1  # a step more, which shows what the save before it holds up
        with running(self.task(side, directory, last=last, in_turns=True), place) as run:
            if (problem := run.wait_for("end")) is not None:
                found.unavailable = _PATH.sub("", problem)
                return
            events = run.events()
        for kind, values in (("stalled", found.stall), ("on disk", found.on_disk)):
            values += [one["seconds"] for one in events if one["event"] == kind][1:]
        step, checksum = next((one["step"], one["checksum"]) for one in reversed(events) if one["event"] == "saving")
        self.steps[side] = directory, step, checksum
        found.num_bytes = sum(file.stat().st_size for file in files_of(SIDES[side].path(directory, step)))
        for ranks in (RANKS, *OTHER_RANKS):
            event, problem = restored(self.task(side, directory, ranks=ranks, seed=1, again=True), place)
            if problem is not None:
                found.problem(f"on {ranks} ranks", problem)
                continue
            found.restore.setdefault(ranks, []).append(event["seconds"])
            if (event["step"], event["checksum"]) != (step, checksum) and ranks not in found.unequal:
                found.unequal.append(ranks)

    def flip(self, side: str, found: Figures) -> None:
        """Flip one bit at a time in the files of a complete step, the largest ones in turn, and restore it."""
        directory, step, checksum = self.steps[side]
        place = self.work / side / "run"
        files = sorted(files_of(SIDES[side].path(directory, step)), key=lambda file: (-file.stat().st_size, file))
        files = [file for file in files if file.stat().st_size >= files[0].stat().st_size // 100]
        moments = random.Random(f"{self.options.seed} {side}")
        for number in range(self.options.flips):
            file = files[number % len(files)]
            where, bit = moments.randrange(file.stat().st_size), 1 << moments.randrange(8)
            _flip(file, where, bit)
            event, problem = restored(self.task(side, directory, seed=1), place)
            _flip(file, where, bit)
            found.flips += 1
            if problem is not None:
                found.flips_found += 1
            elif (event["step"], event["checksum"]) != (step, checksum):
                found.flips_silent += 1


def files_of(step: Path) -> list[Path]:
    return [file for file in step.rglob("*") if file.is_file()]


def _flip(file: Path, where: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(where)
        old = stream.read(1)[0]
        stream.seek(where)
        stream.write(bytes([old ^ bit]))


# ---- the table


def table(sides: Sequence[Figures]) -> Iterator[str]:
    """In Markdown; ratios are to the first side."""
    yield "| | kills, of which during a save | unreadable | mixed | gone | bits flipped | detected | silent |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in sides:
        kills = [f"{one.kills}, {one.kills_in_saves}", *map(str, (one.unreadable, one.mixed, one.gone))]
        flips = map(str, (one.flips, one.flips_found, one.flips_silent))
        cells = ["-"] * 7 if one.unavailable else [*kills, *flips]
        yield f"| {one.name} | {' | '.join(cells)} |"
    yield ""
    others = "".join(f" | {RANKS} -> {ranks}" for ranks in OTHER_RANKS)
    yield f"| | `save` blocks the loop for | on disk after | size of a step | restored on {RANKS} ranks{others} |"
    yield "|---|---|---|---|---" + "|---" * len(OTHER_RANKS) + "|"
    first = sides[0]
    for one in sides:
        cells = [_seconds(one.stall, first.stall), _seconds(one.on_disk, first.on_disk), f"{one.num_bytes / MB:.1f} MB"]
        for ranks in (RANKS, *OTHER_RANKS):
            seconds = one.restore.get(ranks, [])
            words = "" if not seconds else ", not equal" if ranks in one.unequal else ", bit-equal"
            cells.append(_seconds(seconds, first.restore.get(ranks, [])) + words if seconds else "cannot")
        cells = ["-"] * len(cells) if one.unavailable else cells
        yield f"| {one.name} | {' | '.join(cells)} |"
    yield ""
    for one in sides:
        said = [one.note] if one.note else []
        said += [f"Not run: {one.unavailable.rstrip('.')}."] if one.unavailable else []
        said += [f"{problem} ({count} times)." for problem, count in one.problems.items()]
        if said:
            yield f"- **{one.name}**: {' '.join(said)}"


def _seconds(values: Sequence[float], ours: Sequence[float]) -> str:
    if not values:
        return "-"
    value = statistics.median(values)
    ratio = "" if values is ours or not ours else f" ({value / max(statistics.median(ours), 1e-6):.2g})"
    return f"{value:.3f} s{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory that is written to, on the disk to measure")
    parser.add_argument("--kills", type=int, default=20, help="kills of each side (default 20)")
    parser.add_argument("--flips", type=int, default=6, help="bits that are flipped, one at a time (default 6)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of what is timed (default 3)")
    parser.add_argument("--every", type=int, default=2, help="steps from one save to the next (default 2)")
    parser.add_argument(
        "--span", type=float, default=2.0, help="seconds after the first save of a run in which its kill comes"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills, and of the bits")
    parser.add_argument("--only", nargs="+", default=list(SIDES), choices=SIDES, help="sides; ratios are to the first")
    parser.add_argument("--quick", action="store_true", help="a model of 1 MB and one round, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    bench = Bench(options)
    found = {side: Figures(SIDES[side].name, SIDES[side].note, _missing(SIDES[side])) for side in options.only}
    with kept_memory(1e7 if options.quick else 2e9):
        for number in range(1 if options.quick else options.rounds):
            for side in random.Random(number).sample(options.only, len(options.only)):
                if not found[side].unavailable:
                    print(f"costs, round {number + 1}: {found[side].name}", file=sys.stderr, flush=True)
                    bench.cost(side, found[side])
    for side in options.only:
        if not found[side].unavailable:
            print(f"bits and kills: {found[side].name}", file=sys.stderr, flush=True)
            bench.flip(side, found[side])
            bench.kill(side, found[side])
        if options.json:
            options.json.write_text(json.dumps([asdict(one) for one in found.values()], indent=2) + "\n")
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "accelerate", "transformers")
    )
    parameters = sum(parameter.numel() for parameter in build(bench.size, 0).parameters())
    print(f"{parameters / 1e6:.1f} M parameters, AdamW, float32, {RANKS} ranks; {versions}\n")
    print("\n".join(table(list(found.values()))))
    shutil.rmtree(bench.work)


def _missing(side: type[Side]) -> str:
    return "" if importlib.util.find_spec(side.package) else f"{side.package} is not installed"


if __name__ == "__main__":
    main()
