"""Training side by side with a bare PyTorch loop and with the trainers that people use; prints ratios.

    python benchmarks/train.py --work /big/disk/bench --model path/to/SmolLM2-135M

Wants two quiet cores, 16 GB of memory, and an even number of rounds, as the sides take turns in going first. A random
Llama of 101 M parameters is always there, made once in `--work`; `--model` adds any other. Two ranks on the CPU, one
window each a step, fp32 and bf16. Two things are measured:

- tokens a second: our loop and bare ones with the same `fully_shard` calls take turns (`train_sides.py`);
- from the command to the first step, and to its end: whole programs, ours and each of others (`train_peers.py`) in
  turns. What such a program really ran, sharded or not, is looked at and printed; one that fails says why.

Targets are those of the issue that asked for this. `--quick` runs it all on a tiny model, where figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from convert import Row
from measure import kept_memory, run

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
RANKS = 2
PEERS = {
    "bare": "bare PyTorch",
    "trainer_distributed_config": "Trainer, DistributedConfig",
    "trainer_accelerate": "Trainer, accelerate's FSDP2",
    "fabric": "Lightning Fabric",
}
PROGRAM_STEPS = 2  # of a whole program: the way to the first is what is asked for
OTHERS = ("bare", "bare, torch's loss", "DDP")
QUICK = {"sequence_length": 16, "rounds": 1, "steps": 1, "dtypes": ["float32"]}


@dataclass(frozen=True)
class Program:
    """What a whole program did: seconds to its first step, and to the end of that, tokens a second after it, and what
    it was.
    """

    first_step: float
    first_step_end: float
    tokens_per_second: float
    what: str

    def __str__(self) -> str:
        return (
            f"{self.first_step:7.2f} s to the first step, {self.first_step_end:7.2f} s to its end, "
            f"{self.tokens_per_second:10,.1f} tokens/s ({self.what})"
        )


Pair = tuple[Program, Program]  # ours, and another's


@dataclass(frozen=True)
class Bench:
    """Where things lie, and how much is run."""

    work: Path
    sequence_length: int
    rounds: int
    steps: int
    with_peers: bool
    others: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return RANKS * self.sequence_length

    def llama(self, hidden: int, layers: int, vocabulary: int) -> Path:
        path = self.work / f"trainable-{hidden}"
        if not path.exists():
            print(f"making {path}", flush=True)
            partial = path.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            run([PYTHON, str(HERE / "sources.py"), "trainable", str(partial), *map(str, (hidden, layers, vocabulary))])
            partial.rename(path)
        return path

    def turns(self, model: Path, dtype: str) -> dict[str, Any]:
        """What `train_sides.py` prints: the seconds of a step of each side in each round, and its first loss."""
        sides = ("ours", *self.others)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        losses: dict[str, float] = {}
        for number in range(self.rounds):
            turn = number % len(sides)
            for side in sides[turn:] + sides[:turn]:
                words = (side, str(model), dtype, str(self.sequence_length), str(self.steps))
                found = json.loads(_output(_ranks("train_sides.py", *words)).strip().splitlines()[-1])
                seconds[side].append(found["seconds"])
                losses[side] = found["loss"]
        return {"seconds": seconds, "losses": losses}

    def programs(self, model: Path, text: Path, dtype: str) -> dict[str, list[Pair] | str]:
        """Of each other program, in each round, ours and theirs, one right after the other: a machine's speed changes
        within minutes. A text instead says why one does not run.
        """
        found: dict[str, list[Pair] | str] = {}
        for name in PEERS if self.with_peers else ["bare"]:
            try:
                found[name] = [self._pair(name, model, text, dtype, number) for number in range(self.rounds)]
            except RuntimeError as error:
                found[name] = str(error)
        return found

    def _pair(self, name: str, model: Path, text: Path, dtype: str, number: int) -> Pair:
        sides = (name, "ours") if number % 2 else ("ours", name)
        ran = {side: self._program(side, model, text, dtype) for side in sides}
        return ran["ours"], ran[name]

    def _program(self, name: str, model: Path, text: Path, dtype: str) -> Program:
        with tempfile.TemporaryDirectory(dir=self.work) as directory:
            if name == "ours":
                log = Path(directory) / "run" / "metrics.jsonl"
                command = self._ours(model, text, dtype, Path(directory))
            else:
                log = Path(directory) / "steps.jsonl"
                words = (name, str(model), str(text), dtype, str(self.sequence_length), str(PROGRAM_STEPS), str(log))
                command = _ranks("train_peers.py", *words)
            try:
                first_step, first_step_end, said = _watch(command, log)
            except RuntimeError as error:
                if name == "ours":
                    raise SystemExit(f"our own command failed: {error}") from error
                raise
            rows = [json.loads(line) for line in log.read_text().splitlines()]
        seconds = statistics.median(row["step_seconds"] for row in rows[1:])
        lines = [line for line in said.splitlines() if line.startswith('{"sharded"')]
        what = (
            "FSDP2Model"
            if name == "ours"
            else "{wrapper}, {state}".format(
                wrapper=(told := json.loads(lines[-1]))["wrapper"],
                state="sharded" if told["sharded"] else "NOT SHARDED",
            )
        )
        return Program(first_step, first_step_end, self.tokens / seconds, what)

    def _ours(self, model: Path, text: Path, dtype: str, directory: Path) -> list[str]:
        return [
            *(PYTHON, "-m", "fsdp_shard", "finetune", f"model.path={model}", f"data.path={text}"),
            *(f"run_dir={directory / 'run'}", f"data.cache_dir={directory / 'tokens'}", "checkpoint.optimizer=false"),
            *(f"data.sequence_length={self.sequence_length}", f"train.global_batch_size={RANKS}", "optim.lr=1e-5"),
            *(
                f"train.steps={PROGRAM_STEPS}",
                f"launch.ranks={RANKS}",
                "launch.device=cpu",
                f"shard.param_dtype={dtype}",
            ),
        ]


def _ranks(script: str, *words: str) -> list[str]:
    start = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    return [*start, str(HERE / script), *words]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _watch(command: Sequence[str], log: Path) -> tuple[float, float, str]:
    """Seconds until `log` is there, and until it has a line, and what the command said; RuntimeError when it fails."""
    with tempfile.TemporaryFile("w+") as said:
        start, begun, first = time.perf_counter(), None, None
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=_environment()
        )
        while process.poll() is None:
            if begun is None and log.exists():
                begun = time.perf_counter() - start
            if begun is not None and first is None and log.stat().st_size:
                first = time.perf_counter() - start
            time.sleep(0.005)
        said.seek(0)
        text = said.read()
    if process.returncode or begun is None or first is None:
        raise RuntimeError(_reason(text))
    return begun, first, text


def _output(command: Sequence[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, env=_environment(), stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {_reason(ended.stderr)}")
    return ended.stdout


def _reason(text: str) -> str:
    """The line that names the exception of the rank that failed first."""
    lines = [line.split("]:")[-1].strip() for line in text.splitlines()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception")) and ":" in line]
    return (errors or lines or ["it said nothing"])[0][:300]


def _median(programs: Sequence[Program]) -> Program:
    first = statistics.median(program.first_step for program in programs)
    end = statistics.median(program.first_step_end for program in programs)
    rate = statistics.median(program.tokens_per_second for program in programs)
    return Program(first, end, rate, programs[0].what)


def tokens(bench: Bench, name: str, found: dict[str, Any]) -> Iterator[Row]:
    """Our tokens a second over each bare loop's: the median of the rounds' ratios, as noise is in both of a round."""
    ours = found["seconds"]["ours"]
    for side, seconds in found["seconds"].items():
        rate = bench.tokens / statistics.median(seconds)
        print(f"  {side:<22} {rate:10,.1f} tokens/s, first loss {found['losses'][side]:.6f}", flush=True)
    for side, seconds in found["seconds"].items():
        if side != "ours":
            ratio = statistics.median(theirs / mine for theirs, mine in zip(seconds, ours, strict=True))
            yield Row(
                f"{name}: tokens/s of ours / {side}", ratio, limit=0.97 if side == "bare" else None, at_least=True
            )


def starts(name: str, found: dict[str, list[Pair] | str]) -> Iterator[Row]:
    """From the command to the first step and to its end, ours over each other's: the median of the pairs' ratios.

    The step itself takes all of them about as long: what is asked for is the way to it.
    """
    for side, pairs in found.items():
        if isinstance(pairs, str):
            print(f"  {PEERS[side]:<28} does not run here: {pairs}", flush=True)
            continue
        ours, theirs = (_median(programs) for programs in zip(*pairs, strict=True))
        print(f"  {PEERS[side]:<28} {theirs}", flush=True)
        print(f"  {'ours beside it':<28} {ours}", flush=True)
        first = statistics.median(mine.first_step / other.first_step for mine, other in pairs)
        end = statistics.median(mine.first_step_end / other.first_step_end for mine, other in pairs)
        yield Row(f"{name}: to first step, ours / {PEERS[side]}", first, limit=None if side == "bare" else 0.6)
        yield Row(f"{name}: to its end, ours / {PEERS[side]}", end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for models and runs; models are kept")
    parser.add_argument("--model", type=Path, help="a Llama to train beside the random one, such as SmolLM2-135M")
    parser.add_argument("--only-model", action="store_true", help="leave the random Llama out")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens a rank and step (default 256)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds, of which the median counts (default 8)")
    parser.add_argument("--steps", type=int, default=4, help="steps of each loop in a round (default 4)")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="*", default=["tokens", "starts"], choices=["tokens", "starts"])
    parser.add_argument("--loops", nargs="*", default=OTHERS, choices=OTHERS, help="loops that take turns with ours")
    parser.add_argument("--no-peers", action="store_true", help="run only the bare loops beside ours")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: does it work at all?")
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        options.work.resolve(),
        options.sequence_length,
        options.rounds,
        options.steps,
        not options.no_peers,
        tuple(options.loops),
    )
    llama = bench.llama(64, 2, 512) if options.quick else bench.llama(768, 9, 49_152)
    models = {} if options.only_model else {"Llama": llama}
    if options.model:
        models[options.model.name] = options.model.resolve()
    rows: list[Row] = []
    with kept_memory(1e7 if options.quick else 12e9):
        for model, path in models.items():
            for dtype in options.dtypes:
                name = f"{model}, {dtype}"
                if "tokens" in options.only:
                    print(f"\n{name}: loops in turns", flush=True)
                    rows += tokens(bench, name, bench.turns(path, dtype))
                if "starts" in options.only:
                    print(f"\n{name}: whole programs", flush=True)
                    rows += starts(name, bench.programs(path, llama / "text.txt", dtype))
    print("\n" + "\n".join(map(str, rows)))
    if options.json:
        options.json.write_text(json.dumps([{**asdict(row), "is_met": row.is_met} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
