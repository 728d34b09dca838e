"""From a checkpoint to text beside transformers, accelerate and torch; prints times, memory and ratios.

    python benchmarks/inference.py --work /big/disk/bench --size 2.4

Wants a machine with nothing else to do. What is run is made once in `--work` and kept. Every figure is the median of
`--repeats` rounds; in a round each side runs once, as a whole process. Targets are those of the issue that asked for
this. `--quick` is one round on a tiny model, to see that everything runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from convert import Bench as Sources, Row
from generate_from import WORDS
from measure import Cost, forget, kept_memory, median, memory_limit, run, warm

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable


@dataclass(frozen=True)
class Bench:
    """Where things lie and how often each side runs."""

    sources: Sources
    repeats: int
    tokens: int

    def run(
        self, title: str, commands: Mapping[str, Sequence[str]], *sources: Path, tokens: int = 0
    ) -> dict[str, Cost]:
        """The medians of each command, all run once in each round; the page cache has `sources` before each."""
        os.environ["TOKENS"] = str(tokens)
        forget(self.sources.work)
        found: dict[str, list[Cost]] = {name: [] for name in commands}
        for _ in range(self.repeats):
            for name, command in commands.items():
                for source in sources:
                    warm(source)
                found[name].append(run(command))
                for kind in ("*-offload", "*-merged", "run"):
                    for directory in list(self.sources.work.rglob(kind)):
                        shutil.rmtree(directory, ignore_errors=True)
        print(f"\n{title}")
        costs = {name: median(these) for name, these in found.items()}
        for name, cost in costs.items():
            inside = ", ".join(f"{key} {value:.4g}" for key, value in cost.inside.items() if key != "token")
            print(f"  {name:<26} {cost}; {inside}", flush=True)
        tokens_found = {name: cost.inside.get("token") for name, cost in costs.items()}
        same = {token for name, token in tokens_found.items() if token is not None and name != "int8"}
        assert len(same) <= 1, tokens_found
        return costs

    def command(self, source: Path) -> list[str]:
        """Our own command, as far as the first token."""
        settings = [f"checkpoint={source}", f"prompt={WORDS}", "generation.max_new_tokens=1"]
        return [PYTHON, "-m", "fsdp_shard", "generate", *settings, f"run_dir={self.sources.work / 'run'}"]

    def way(self, name: str, source: Path, *arguments: str) -> list[str]:
        return [PYTHON, str(HERE / "generate_from.py"), name, str(source), *arguments]


def _weights(source: Path) -> int:
    """Bytes of the weights of a model directory."""
    return sum(file.stat().st_size for file in source.glob("*.safetensors"))


def from_ranks(bench: Bench) -> Iterator[Row]:
    """1. From rank files to the first token, beside merging with accelerate or torch and then loading.

    The peak of resident memory counts pages of mapped files, which the system can drop at any time; anonymous memory is
    what has to be there. `budget`: a quarter of the weights, which bounds both.
    """
    quarter = str(_weights(bench.sources.model()) // 4)
    for count in (2, 8):
        files = bench.sources.converted(f"ranks-{count}", "format=sharded", f"ranks={count}", "verify=false")
        dcp = bench.sources.by_ranks(count) / "dcp"
        for file in bench.sources.model().glob("*.json"):
            shutil.copy(file, dcp / file.name)
        commands = {
            "generate, rank files": bench.command(files),
            "generate, DCP": bench.command(dcp),
            "ours, rank files": bench.way("ours", files),
            "ours, DCP": bench.way("ours", dcp),
            "ours, rank files, budget": bench.way("ours", files, "auto", quarter),
            "accelerate's merge, load": bench.way("merged", dcp, "accelerate"),
            "torch's merge, load": bench.way("merged", dcp, "torch"),
        }
        costs = bench.run(f"{count} ranks to the first token", commands, files, dcp)
        for peer in ("accelerate's merge, load", "torch's merge, load"):
            for kind in ("rank files", "DCP"):
                name, command, call = (
                    f"{count} ranks: {peer} / {kind}",
                    costs[f"generate, {kind}"],
                    costs[f"ours, {kind}"],
                )
                yield Row(f"{name}, seconds", costs[peer].seconds / command.seconds, limit=2, at_least=True)
                yield Row(f"{name}, peak", costs[peer].peak_bytes / command.peak_bytes, limit=2, at_least=True)
                anonymous = costs[peer].inside["peak_anonymous_bytes"] / call.inside["peak_anonymous_bytes"]
                yield Row(f"{name}, peak of anonymous memory", anonymous, limit=2, at_least=True)
            budget = costs["ours, rank files, budget"]
            name = f"{count} ranks: {peer} / rank files with a budget"
            yield Row(f"{name}, seconds", costs[peer].seconds / budget.seconds, limit=2, at_least=True)
            yield Row(f"{name}, peak", costs[peer].peak_bytes / budget.peak_bytes, limit=2, at_least=True)


def from_directory(bench: Bench) -> Iterator[Row]:
    """2. From a Hugging Face directory, beside `from_pretrained`."""
    source = bench.sources.model()
    costs = bench.run(
        "a directory to the first token",
        {
            "ours": bench.way("ours", source),
            "from_pretrained": bench.way("plain", source),
            "generate": bench.command(source),
            "a script": bench.way("script", source),
        },
        source,
    )
    ours, plain, weights = costs["ours"], costs["from_pretrained"], _weights(source)
    yield Row("load and first token / from_pretrained", ours.inside["seconds"] / plain.inside["seconds"], limit=1)
    yield Row("whole process / from_pretrained", costs["generate"].seconds / costs["a script"].seconds, limit=0.8)
    yield Row("anonymous memory / weights", ours.inside["anonymous_bytes"] / weights, limit=0.15)
    yield Row("anonymous memory of from_pretrained / weights", plain.inside["anonymous_bytes"] / weights)


def offload(bench: Bench) -> Iterator[Row]:
    """3. Blocks on disk: seconds of a token, page cache warm and cold, nothing or half of the blocks kept."""
    source = bench.sources.model()
    weights = _weights(source)
    half = str(int(0.55 * weights))
    commands = {
        "in memory": bench.way("plain", source),
        "ours, disk": bench.way("ours", source, "disk"),
        "ours, disk, budget": bench.way("ours", source, "disk", str(weights // 4)),
        "ours, half": bench.way("ours", source, "auto", half),
        "transformers, disk": bench.way("transformers_disk", source),
        "accelerate, disk": bench.way("accelerate", source),
        "accelerate, half": bench.way("accelerate", source, half),
        "best cold read": bench.way("read", source),
    }
    costs = bench.run("blocks on disk", commands, source, tokens=bench.tokens)
    memory = costs["in memory"].inside["warm_token_seconds"]
    warm_seconds = {name: cost.inside.get("warm_token_seconds", 0.0) for name, cost in costs.items()}
    cold = {name: cost.inside.get("cold_token_seconds", 0.0) for name, cost in costs.items()}
    best = costs["best cold read"].inside["seconds"]
    yield Row("warm token: ours, disk / in memory", warm_seconds["ours, disk"] / memory, limit=1.1)
    yield Row("warm token: ours, disk, budget held / in memory", warm_seconds["ours, disk, budget"] / memory)
    yield Row("warm token: transformers, disk / in memory", warm_seconds["transformers, disk"] / memory)
    yield Row("warm token: accelerate, disk / in memory", warm_seconds["accelerate, disk"] / memory)
    yield Row("cold token: ours / best read of the same bytes", cold["ours, disk, budget"] / best, limit=1.15)
    ratio = cold["accelerate, disk"] / cold["ours, disk, budget"]
    yield Row("cold token: accelerate / ours", ratio, limit=1.8, at_least=True)
    yield Row("cold token: transformers / ours", cold["transformers, disk"] / cold["ours, disk, budget"])
    ratio = cold["accelerate, disk"] / cold["ours, half"]
    yield Row("cold token, half kept: accelerate, all on disk / ours", ratio, limit=2.8, at_least=True)
    yield Row("cold token, half kept: accelerate, half kept / ours", cold["accelerate, half"] / cold["ours, half"])


def budget(bench: Bench) -> Iterator[Row]:
    """4. A quarter of the weights as budget, from a directory and from rank files; the same token comes out."""
    source = bench.sources.model()
    ranks = bench.sources.converted("ranks-2", "format=sharded", "ranks=2", "verify=false")
    weights = _weights(source)
    quarter = str(weights // 4)
    commands = {
        "in memory": bench.way("plain", source),
        "ours": bench.way("ours", source, "auto", quarter),
        "ours, rank files": bench.way("ours", ranks, "auto", quarter),
        "accelerate": bench.way("accelerate", source, quarter),
    }
    costs = bench.run("a quarter of the weights as budget", commands, source, ranks)
    for name in ("ours", "ours, rank files", "accelerate"):
        yield Row(f"anonymous memory / budget: {name}", costs[name].inside["anonymous_bytes"] / float(quarter))


def limited(bench: Bench) -> Iterator[Row]:
    """4. The same where the kernel gives no more than that and 450 MB, for the libraries: how many are killed."""
    source = bench.sources.model()
    ranks = bench.sources.converted("ranks-2", "format=sharded", "ranks=2", "verify=false")
    quarter = str(_weights(source) // 4)
    ways = {
        "ours": [bench.way("ours", source, "auto", quarter), bench.way("ours", ranks, "auto", quarter)],
        "accelerate": [bench.way("accelerate", source, quarter)],
    }
    os.environ["TOKENS"] = "0"
    token = run(bench.way("plain", source)).inside["token"]
    with memory_limit(int(quarter) + 450e6) as limit:
        if not limit:
            print("\nno control group can be made here: memory was not limited")
            return
        for side, commands in ways.items():
            ends = [_end([*limit, *command], bench.sources.work) for command in commands * bench.repeats]
            assert {end for end in ends if end is not None} <= {token}, ends
            killed = ends.count(None) / len(ends)
            yield Row(f"killed at a limit of a quarter and 450 MB: {side}", killed, limit=0 if side == "ours" else None)


def _end(command: Sequence[str], work: Path) -> float | None:
    """The token of a run that begins with nothing in the page cache; None if it is killed."""
    forget(work)
    try:
        return run(command).inside["token"]
    except RuntimeError as error:
        if "status -9" not in str(error):
            raise
        return None


def lookup(bench: Bench) -> Iterator[Row]:
    """3. To find and map each of 20,000 tensors of one file, beside accelerate's loader, which opens it for each."""
    source = bench.sources.made("many-tensors", [PYTHON, str(HERE / "sources.py"), "many_tensors", "TARGET", "20000"])
    commands = {name: bench.way(f"lookup_{name}", source) for name in ("ours", "accelerate")}
    costs = bench.run("each of 20,000 tensors", commands, source)
    ratio = costs["accelerate"].inside["seconds"] / costs["ours"].inside["seconds"]
    yield Row("look-up of a tensor: accelerate / ours, opening included", ratio, limit=50, at_least=True)


def int8(bench: Bench) -> Iterator[Row]:
    """6. Weights in 8 bits: peak memory of the process, loading included, and seconds of a token."""
    if importlib.util.find_spec("torchao") is None:
        print("\ntorchao is not installed: no figures of 8 bits")
        return
    source = bench.sources.model()
    commands = {"bfloat16": bench.way("ours", source), "int8": bench.way("ours_int8", source)}
    costs = bench.run("8 bits", commands, source, tokens=bench.tokens)
    yield Row("peak memory: int8 / bfloat16", costs["int8"].peak_bytes / costs["bfloat16"].peak_bytes, limit=0.6)
    ratio = costs["int8"].inside["warm_token_seconds"] / costs["bfloat16"].inside["warm_token_seconds"]
    yield Row("token: int8 / bfloat16", ratio)


def start(bench: Bench) -> Iterator[Row]:
    """2. A tiny model, which is start-up and nothing else: our command beside a script with `from_pretrained`."""
    tiny = bench.sources.made("llama-tiny", [PYTHON, str(HERE / "sources.py"), "llama", "TARGET", "0.001"])
    commands = {"generate": bench.command(tiny), "a script": bench.way("script", tiny)}
    costs = bench.run("start-up to the first token", commands, tiny)
    ratio = costs["generate"].seconds / costs["a script"].seconds
    yield Row("start-up to first token / from_pretrained", ratio, limit=0.8)


GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    group.__name__: group for group in (start, from_directory, from_ranks, offload, budget, limited, lookup, int8)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for what is made; it is kept")
    parser.add_argument("--size", type=float, default=2.4, help="gigabytes of the model (default 2.4)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of which the median counts (default 5)")
    parser.add_argument("--tokens", type=int, default=6, help="tokens to time in each run (default 6)")
    parser.add_argument("--quick", action="store_true", help="one round on a model of 30 MB")
    parser.add_argument("--only", nargs="*", default=list(GROUPS), choices=list(GROUPS), help="groups")
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()
    size, repeats = (0.03, 1) if options.quick else (options.size, options.repeats)
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}"
    bench = Bench(Sources(options.work.resolve(), size, repeats, "200MB", True), repeats, options.tokens)
    with kept_memory(10e9 * size):
        rows = [row for name, group in GROUPS.items() if name in options.only for row in group(bench)]
    print("\n" + "\n".join(map(str, rows)))
    if options.json:
        options.json.write_text(json.dumps([{**asdict(row), "is_met": row.is_met} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
