"""Conversions side by side with `cp` and with the libraries that people use today; prints times, memory and ratios.

    python benchmarks/convert.py --work /big/disk/bench --size 2.4

Wants a machine with nothing else to do and room for about ten times `--size`. What is converted is made once in
`--work` and kept. Every figure is the median of `--repeats` rounds; in a round each side runs once, page cache warm.
`cp` does not wait for the disk and we do (a conversion is on the disk when it ends), so `cp` followed by `sync` of what
it wrote is shown too. Targets are those of the issue that asked for this.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import MB, Cost, kept_memory, run, side_by_side

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable


@dataclass(frozen=True)
class Row:
    """One line of the table. `limit`, if any, is the most that `value` should be, or the least where `at_least`."""

    name: str
    value: float
    unit: str = "x"
    limit: float | None = None
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.limit is None or (self.value >= self.limit if self.at_least else self.value <= self.limit)

    def __str__(self) -> str:
        target = "" if self.limit is None else f"{'>=' if self.at_least else '<='} {self.limit:g} {self.unit}"
        mark = "" if self.limit is None else "met" if self.is_met else "MISSED"
        return f"{self.name:<62} {self.value:>9.2f} {self.unit:<2} {target:>12} {mark}"


@dataclass(frozen=True)
class Bench:
    """Where things lie, and the commands of all sides."""

    work: Path
    size: float
    repeats: int
    shard_size: str
    with_peers: bool

    @property
    def target(self) -> Path:
        return self.work / "target"

    def made(self, name: str, make: Sequence[str]) -> Path:
        """The source `name`; where it is not there, the command `make` makes it, at the path put in for TARGET."""
        path = self.work / name
        if not path.exists():
            partial = self.work / f"{name}.partial"
            run(["rm", "-rf", str(partial)])
            print(f"making {path}", flush=True)
            run([str(partial) if word == "TARGET" else word for word in make])
            partial.rename(path)
        return path

    def model(self, size: float | None = None) -> Path:
        size = self.size if size is None else size
        return self.made(f"llama-{size:g}", [PYTHON, str(HERE / "sources.py"), "llama", "TARGET", f"{size:g}"])

    def converted(self, name: str, *settings: str, size: float | None = None) -> Path:
        """The model as our own `convert` writes it with these settings."""
        source = self.model(size)
        return self.made(f"{source.name}-{name}", [PYTHON, str(HERE / "ours.py"), str(source), "TARGET", *settings])

    def by_ranks(self, ranks: int, size: float | None = None) -> Path:
        """dcp/ and safetensors/ by torch's writers on so many ranks, with the model's config beside the pieces."""
        source = self.model(size)
        make = [PYTHON, str(HERE / "sources.py"), "torch_ranks", "TARGET", str(source), str(ranks)]
        return self.made(f"{source.name}-torch-{ranks}", make)

    def inside(self, source: Path, *settings: str) -> list[str]:
        return [PYTHON, str(HERE / "ours.py"), str(source), str(self.target), *settings]

    def whole(self, source: Path, *settings: str) -> list[str]:
        paths = [f"source={source}", f"target={self.target}", f"run_dir={self.work / 'run'}"]
        return [PYTHON, "-m", "fsdp_shard", "convert", *paths, *settings]

    def peer(self, name: str, source: Path, *arguments: str) -> dict[str, list[str]]:
        command = [PYTHON, str(HERE / "peers.py"), name, str(source), str(self.target), *arguments]
        return {name: command} if self.with_peers else {}

    def copies(self, source: Path) -> dict[str, list[str]]:
        copy = f"cp -r {shlex.quote(str(source))} {shlex.quote(str(self.target))}"
        synced = f"{copy} && find {shlex.quote(str(self.target))} -type f -exec sync {{}} +"
        return {"cp": ["sh", "-c", copy], "cp + sync": ["sh", "-c", synced]}

    def compare(self, title: str, source: Path, *settings: str, **peers: list[str]) -> dict[str, Cost]:
        """`cp`, our conversion from inside and as a whole process, and the peers, of one source."""
        commands = {
            **self.copies(source),
            "as cp, inside": self.inside(source, *settings, "sync=false"),
            "as cp, process": self.whole(source, *settings, "sync=false"),
            "synced, inside": self.inside(source, *settings),
            "synced, process": self.whole(source, *settings),
            **peers,
        }
        return self.measure(title, commands, source)

    def measure(self, title: str, commands: dict[str, list[str]], source: Path | None = None) -> dict[str, Cost]:
        costs = side_by_side(commands, self.target, self.repeats, source)
        print(f"\n{title}")
        for name, cost in costs.items():
            print(f"  {name:<22} {cost}", flush=True)
        return costs


def against_cp(name: str, costs: dict[str, Cost], inside: float, process: float | None) -> Iterator[Row]:
    """Our conversion and our process, and the peers', as multiples of `cp`, like with like.

    `cp` leaves its bytes in memory for the system to write, as `sync=false` does; by default a conversion has them on
    the disk, which is to be compared with `cp` and `sync`.
    """
    for ours, copy in (("as cp", "cp"), ("synced", "cp + sync")):
        conversion, whole = costs[f"{ours}, inside"].inside["seconds"], costs[f"{ours}, process"].seconds
        yield Row(f"{name}: conversion / {copy}", conversion / costs[copy].seconds, limit=inside)
        yield Row(f"{name}: whole process / {copy}", whole / costs[copy].seconds, limit=process)
    yield Row(f"{name}: synced conversion / cp", costs["synced, inside"].inside["seconds"] / costs["cp"].seconds)
    for peer in list(costs)[6:]:
        yield Row(f"{name}: {peer} / cp", costs[peer].seconds / costs["cp"].seconds)


def split(bench: Bench) -> Iterator[Row]:
    """One file into shards and back, without reading back; CPU time against save_pretrained's."""
    source, size = bench.model(), bench.shard_size
    shards = bench.converted("shards", f"max_shard_size={size}", "verify=false")
    peers = {**bench.peer("transformers", source, size), **bench.peer("accelerate", source, size)}
    costs = bench.compare(f"one file -> {size} shards", source, f"max_shard_size={size}", "verify=false", **peers)
    yield from against_cp("one file -> shards", costs, 1.15, 2.0)
    if "transformers" in costs:
        ours = costs["as cp, inside"].inside["cpu_seconds"]
        ratio = costs["transformers"].cpu_seconds / ours
        yield Row("CPU seconds: transformers / our conversion", ratio, limit=6, at_least=True)
    peers = {**bench.peer("transformers", shards, "1000GB"), **bench.peer("accelerate", shards, "1000GB")}
    costs = bench.compare("shards -> one file", shards, "max_shard_size=1000GB", "verify=false", **peers)
    yield from against_cp("shards -> one file", costs, 1.15, 2.0)


def ranks(bench: Bench) -> Iterator[Row]:
    """Rank files into a Hugging Face directory: ours of 2 and 8 ranks, and torch's per-rank safetensors."""
    for count in (2, 8):
        source = bench.converted(f"ranks-{count}", "format=sharded", f"ranks={count}", "verify=false")
        torch_ranks = bench.by_ranks(count)
        peers = {
            **bench.peer("consolidate", torch_ranks / "safetensors"),
            **bench.peer("merge_weights", torch_ranks / "dcp"),
            **bench.peer("dcp_to_torch_save", torch_ranks / "dcp"),
        }
        costs = bench.compare(f"{count} rank files -> huggingface", source, "verify=false", **peers)
        yield from against_cp(f"{count} rank files -> huggingface", costs, 1.25, 2.2)
        costs = bench.compare(
            f"{count} of torch's rank files -> huggingface", torch_ranks / "safetensors", "verify=false"
        )
        yield from against_cp(f"{count} of torch's rank files -> huggingface", costs, 1.25, 2.2)


def dcp(bench: Bench) -> Iterator[Row]:
    """A DCP directory by torch into a Hugging Face directory."""
    for count in (2, 8):
        source = bench.by_ranks(count) / "dcp"
        peers = {**bench.peer("merge_weights", source), **bench.peer("dcp_to_torch_save", source)}
        costs = bench.compare(f"DCP of {count} ranks -> huggingface", source, "verify=false", **peers)
        yield from against_cp(f"DCP of {count} ranks -> huggingface", costs, 1.5, None)


def integrity(bench: Bench) -> Iterator[Row]:
    """What reading back costs."""
    source = bench.model()
    commands = {
        "verify=false": bench.inside(source, "verify=false"),
        "verify=true": bench.inside(source, "verify=true"),
    }
    costs = bench.measure("verify", commands, source)
    written, read_back = (costs[name].inside["seconds"] for name in commands)
    yield Row("verify=true / verify=false", read_back / written)


def cast(bench: Bench) -> Iterator[Row]:
    """fp32 to bf16; `cp` copies the fp32 file, which has twice the bytes that are written."""
    source = bench.converted("float32", "dtype=float32", "verify=false")
    costs = bench.compare("cast float32 -> bfloat16", source, "dtype=bfloat16", "verify=false")
    yield from against_cp("cast float32 -> bfloat16", costs, 3.0, None)


def header(bench: Bench) -> Iterator[Row]:
    """The index of a file with 20,000 tensors."""
    make = [PYTHON, str(HERE / "sources.py"), "many_tensors", "TARGET", "20000"]
    source = bench.made("many-tensors", make)
    costs = bench.measure(
        "index of 20,000 tensors", {"open": [PYTHON, str(HERE / "ours.py"), str(source), "-"]}, source
    )
    yield Row("index of 20,000 tensors in one file", costs["open"].inside["seconds"], "s", 0.5)


def start(bench: Bench) -> Iterator[Row]:
    """Whole commands that have next to nothing to do."""
    tiny = bench.made("llama-tiny", [PYTHON, str(HERE / "sources.py"), "llama", "TARGET", "0.001"])
    ours = bench.made("llama-tiny-ours", [PYTHON, str(HERE / "ours.py"), str(tiny), "TARGET"])
    base = [PYTHON, "-m", "fsdp_shard"]
    commands = {
        "--help": [*base, "--help"],
        "ls": [*base, "ls"],
        "inspect": [*base, "inspect", str(tiny)],
        "verify": [*base, "verify", str(ours)],
        "verify, without a manifest": [*base, "verify", str(tiny)],
        "convert": bench.whole(tiny),
    }
    costs = bench.measure("start-up", commands)
    # Without a manifest, values are looked at with numpy, whose import is a part of that work.
    limits = {"verify, without a manifest": None, "convert": 0.5}
    for name, cost in costs.items():
        yield Row(f"all of {name}, of a tiny model", cost.seconds, "s", limits.get(name, 0.3))


def memory(bench: Bench, sizes: Sequence[float]) -> Iterator[Row]:
    """The most that each conversion takes beyond what the process has after its imports, at several sizes."""
    for size in sizes:
        model = bench.model(size)
        rank_files = bench.converted("ranks-8", "format=sharded", "ranks=8", "verify=false", size=size)
        conversions: dict[str, tuple[Path, list[str]]] = {
            "one file -> shards": (model, [f"max_shard_size={bench.shard_size}"]),
            "one file -> 8 ranks": (model, ["format=sharded", "ranks=8"]),
            "8 rank files -> huggingface": (rank_files, []),
            "one file -> dcp": (model, ["format=dcp", "ranks=2"]),
            "dcp -> huggingface": (bench.by_ranks(2, size) / "dcp", []),
            "cast": (model, ["dtype=float32"]),
        }
        for name, (source, settings) in conversions.items():
            costs = side_by_side({"ours": bench.inside(source, *settings)}, bench.target, 1)
            yield Row(f"memory, {size:g} GB, {name}", costs["ours"].inside["grown_bytes"] / MB, "MB", 150)


GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    group.__name__: group for group in (start, header, split, ranks, dcp, integrity, cast)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for sources and targets; sources are kept")
    parser.add_argument("--size", type=float, default=2.4, help="gigabytes of the model (default 2.4)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of which the median counts (default 5)")
    parser.add_argument("--shard-size", default="200MB", help="max_shard_size of sharded targets (default 200MB)")
    parser.add_argument("--memory-sizes", type=float, nargs="*", default=[0.3, 1.2, 3.0], help="gigabytes, several")
    parser.add_argument("--only", nargs="*", default=[*GROUPS, "memory"], choices=[*GROUPS, "memory"], help="groups")
    parser.add_argument("--no-peers", action="store_true", help="run only `cp` beside ours")
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.work.resolve(), options.size, options.repeats, options.shard_size, not options.no_peers)
    with kept_memory(10e9 * options.size):
        rows = [row for name, group in GROUPS.items() if name in options.only for row in group(bench)]
        if "memory" in options.only:
            rows += memory(bench, options.memory_sizes)
    print("\n" + "\n".join(map(str, rows)))
    if options.json:
        options.json.write_text(json.dumps([{**asdict(row), "is_met": row.is_met} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
