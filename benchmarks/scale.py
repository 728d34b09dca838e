"""What saving, opening, resuming, verifying and converting cost at 64 ranks and more, without that many machines.

    python benchmarks/scale.py --work /big/disk/scale --models 70B --ranks 64 256 1024 --json scale.json
    python benchmarks/scale.py --plot before.json after.json docs/scale.svg

All of it is the code of the package. Steps that are opened and resumed from have every header, the manifest and every
index in full, of the shapes of real models; their data are holes, so that they take a few GB of disk instead of TB. A
save runs all of its ranks as threads of one process (`simulated_ranks`), on tensors with their number of rows and a few
columns, as do verify and convert of that step. `--only init` starts real ranks, as many as the machine holds. Each
measurement has a process of its own. Seconds are of the processor, opens those of rank files, memory what the work adds
to the imports.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "70B": (
        "LlamaConfig",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "405B": (
        "LlamaConfig",
        {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "671B": ("DeepseekV3Config", {}),
}
MEASURES = ("init", "save", "open", "resume", "resume-fewer", "tensor-parallel", "verify", "convert")
_COLUMNS = 8  # of the tensors that are saved
_ELEMENTS = 1 << 16  # read of each tensor at most, so that bytes do not hide what the number of ranks costs
_TENSOR_RANKS = 8
_CHUNK = 1 << 20  # of the manifest's digests


def shapes_of(model: str, work: Path) -> dict[str, tuple[int, ...]]:
    """The parameters of a model by name; kept in a file, so that measurements import no transformers."""
    file = work / f"{model}.json"
    if not file.exists():
        import torch
        import transformers

        name, values = CONFIGS[model]
        config = getattr(transformers, name)(**values)
        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(config)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({key: list(value.shape) for key, value in built.named_parameters()}))
    return {name: tuple(shape) for name, shape in json.loads(file.read_text()).items()}


def rows_of(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, int]:
    """(first flat element, number of elements) of a rank, as FSDP2 divides rows."""
    rows, row = shape[0], math.prod(shape[1:])
    per_rank = -(-rows // ranks)
    start, stop = min(rank * per_rank, rows), min((rank + 1) * per_rank, rows)
    return start * row, (stop - start) * row


# ---- steps with holes


def sparse_step(work: Path, model: str, ranks: int) -> Path:
    """A step of `ranks` ranks whose data are holes, with weights in bfloat16 and AdamW's state in float32."""
    from fsdp_shard.checkpoint import FileRecord, Manifest, TensorRecord, TensorSpec, WriteRequest, writer

    root = work / f"sparse-{model}-{ranks}"
    if (root / "manifest.json").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    shapes = shapes_of(model, work)
    files: dict[str, Any] = {}
    weights = [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]
    states = [
        TensorSpec(f"{name}.{slot}", "F32", shape)
        for name, full in shapes.items()
        for slot, shape in (("exp_avg", full), ("exp_avg_sq", full), ("step", ()))
    ]
    for folder, specs in (("", weights), ("optimizer/", states)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        plan = writer("sharded").plan(specs, WriteRequest(None, ranks, 100, {}))
        for file in plan.files:
            with (root / folder / file.name).open("wb") as out:
                out.write(file.header)
                out.truncate(file.num_bytes)
            files[folder + file.name] = FileRecord(file.num_bytes, header_digest="0" * 32)
        for name, content in plan.small_files.items():
            (root / folder / name).write_bytes(content)
            files[folder + name] = FileRecord(len(content), digest=_digest(content))
    tensors = {
        spec.name: TensorRecord("BF16", spec.shape, "0" * 32, ("0" * 32,) * -(-spec.num_bytes // _CHUNK))
        for spec in weights
    }
    manifest = Manifest("sharded", 100, ranks, {"shard": ranks}, files, tensors, {})
    (root / "manifest.json").write_text(manifest.to_json())
    return root


def _digest(content: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(content)


# ---- what is measured, each in a process of its own


def measured(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of processor, memory beyond what the process had before, opens of rank files, and what `work` returns."""
    opened = [0]

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and "shard-" in str(arguments[0]):
            opened[0] += 1

    sys.addaudithook(note)
    before = _resident()
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, cpu = time.perf_counter(), time.thread_time()
    found = dict(work())
    figures = {"seconds": time.perf_counter() - start, "cpu_seconds": time.thread_time() - cpu}
    peak[0] = max(peak[0], _resident())
    done.set()
    watcher.join()
    return {**figures, "memory_bytes": peak[0] - before, "opened": opened[0], **found}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_open(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Open the weights of a step, as each rank does before it reads from them."""
    import torch  # noqa: F401 - as in a run

    from fsdp_shard.checkpoint import itemsize, open_checkpoint

    root = sparse_step(work, model, ranks)
    itemsize("BF16")

    def opening() -> dict[str, Any]:
        with open_checkpoint(root) as index:
            return {"tensors": len(index.names)}

    return {**measured(opening), "manifest_bytes": (root / "manifest.json").stat().st_size}


def _resume(work: Path, model: str, ranks: int, now: int) -> dict[str, Any]:
    """What rank `now // 2` of `now` ranks does to read its weights and its optimizer state, a block at a time."""
    import torch

    from fsdp_shard.checkpoint import load_shards, open_checkpoint
    from fsdp_shard.distributed import LocalShard

    root, rank = sparse_step(work, model, ranks), now // 2
    seconds = {}

    def shard(shape: tuple[int, ...], dtype: torch.dtype) -> LocalShard:
        start, count = rows_of(shape, rank, now) if shape else (0, 1)
        data = torch.empty(min(count, _ELEMENTS), dtype=dtype)
        return LocalShard(data, data, start, shape, True)

    def resume() -> dict[str, Any]:
        num_bytes = 0
        for folder, dtype in ((root, torch.bfloat16), (root / "optimizer", torch.float32)):
            with open_checkpoint(folder) as index:
                start = time.thread_time()
                for name in index.names:
                    part = shard(index.entry(name).shape, dtype)
                    num_bytes += part.data.nbytes
                    load_shards(index, {name: part})
                seconds[f"loading_{folder.name}"] = time.thread_time() - start
        return {"bytes": num_bytes, **seconds}

    return measured(resume)


def measure_resume(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Resume on as many ranks."""
    return _resume(work, model, ranks, ranks)


def measure_resume_fewer(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Resume on three quarters of the ranks."""
    return _resume(work, model, ranks, ranks * 3 // 4)


def measure_tensor_parallel(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Read the boxes of a rank under 8-fold tensor parallelism, half of the matrices by columns."""
    import torch

    from fsdp_shard.checkpoint import load_shards, open_checkpoint
    from fsdp_shard.distributed import LocalShard

    root, rank = sparse_step(work, model, ranks), ranks // 2
    shards, which = ranks // _TENSOR_RANKS, rank // _TENSOR_RANKS

    def shard(name: str, shape: tuple[int, ...]) -> LocalShard:
        if len(shape) > 1 and name.endswith(("o_proj.weight", "down_proj.weight")):
            start, count = rows_of((shape[0],), which, shards)
            width = shape[1] // _TENSOR_RANKS
            count = min(count, max(_ELEMENTS // width, 1))
            box = ((start, rank % _TENSOR_RANKS * width), (count, width))
            data = torch.empty(count * width, dtype=torch.bfloat16)
            return LocalShard(data, data, start * shape[1] + box[0][1], shape, True, box)
        start, count = rows_of(shape, rank, ranks)
        data = torch.empty(min(count, _ELEMENTS), dtype=torch.bfloat16)
        return LocalShard(data, data, start, shape, True)

    def load() -> dict[str, Any]:
        num_bytes = 0
        with open_checkpoint(root) as index:
            for name in index.names:
                part = shard(name, index.entry(name).shape)
                num_bytes += part.data.nbytes
                load_shards(index, {name: part})
        return {"bytes": num_bytes}

    return measured(load)


def thin_step(work: Path, model: str) -> Path:
    """Where the step is that `measure_save` has saved."""
    return work / f"thin-{model}"


def measure_save(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Save a step, all ranks at once, of tensors with a few columns: rank 0, the median and the worst of the others."""
    import torch
    from simulated_ranks import NUM_MEASURED, SimulatedRank, simulate

    from fsdp_shard.checkpoint import RunState, Store, save_step
    from fsdp_shard.distributed import LocalShard

    shapes = {
        name: (shape[0], _COLUMNS, *[1] * (len(shape) - 2)) if len(shape) > 1 else shape
        for name, shape in shapes_of(model, work).items()
    }
    root = thin_step(work, model)
    shutil.rmtree(root, ignore_errors=True)
    store = Store(root)

    def shard(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> LocalShard:
        start, count = rows_of(shape, rank, ranks) if shape else (0, 1)
        data = torch.zeros(count, dtype=dtype)
        return LocalShard(data, data, start, shape, bool(shape) or rank == 0)

    def save(context: SimulatedRank) -> None:
        weights = {name: shard(shape, context.rank, torch.bfloat16) for name, shape in shapes.items()}
        states = {
            f"{name}.{slot}": shard(shape, context.rank, torch.float32)
            for name, full in shapes.items()
            for slot, shape in (("exp_avg", full), ("step", ()))
        }
        save_step(context, store, 1, RunState(weights, {}, states), layout="sharded")  # type: ignore[arg-type]  # a stand-in

    results: list[Any] = []

    def saving() -> dict[str, Any]:
        results.extend(simulate(ranks, save))
        return {}

    whole = measured(saving)
    first, others = results[0], results[1:NUM_MEASURED]
    return {
        "seconds_of_all": whole["seconds"],
        "memory_of_all": whole["memory_bytes"],
        **{f"main_{key}": getattr(first, key) for key in ("cpu_seconds", "opened", "received")},
        **{
            f"{name}_{key}": how([getattr(cost, key) for cost in others])
            for key in ("cpu_seconds", "opened", "received")
            for name, how in (("median", statistics.median), ("worst", max))
        },
    }


def measure_verify(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Verify the step that was saved."""
    import torch  # noqa: F401 - as in a command

    from fsdp_shard.checkpoint import verify

    def verifying() -> dict[str, Any]:
        report = verify(thin_step(work, model) / "step-00000001")
        assert report.is_sound, report.problems
        return {"bytes": report.num_bytes}

    return measured(verifying)


def measure_convert(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Convert the step that was saved to a Hugging Face directory."""
    import torch  # noqa: F401 - as in a command

    from fsdp_shard.checkpoint import convert

    target = work / "converted"
    shutil.rmtree(target, ignore_errors=True)

    def converting() -> dict[str, Any]:
        return {"bytes": convert(thin_step(work, model) / "step-00000001", target, verify=False, sync=False).num_bytes}

    try:
        return measured(converting)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def measure_init(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Start real ranks on this machine with the groups of a run, and let them talk as a step and a save do.

    Sockets are those of the rank that has most, seconds those of the slowest one, all on the cores of this machine.
    With TORCH_GLOO_LAZY_INIT=0 in the environment, gloo connects all with all.
    """
    import torch.multiprocessing as processes

    from fsdp_shard.distributed import LaunchConfig, variables_for_torch

    place = work / f"init-{ranks}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    os.environ |= variables_for_torch(LaunchConfig(device="cpu"))
    processes.start_processes(_init, (ranks, str(place)), ranks, start_method="fork")
    found = [json.loads(file.read_text()) for file in place.glob("*.json")]
    shutil.rmtree(place)
    assert len(found) == ranks
    return {name: max(one[name] for one in found) for name in found[0]}


def _init(rank: int, ranks: int, place: str) -> None:
    import torch

    from fsdp_shard.distributed import init_distributed

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    before, start = _num_sockets(), time.perf_counter()
    with init_distributed("cpu", 2 if ranks > 1 else 1, 300.0, f"file://{place}/store") as context:
        of_saves = context.with_new_group(300.0)
        seconds, after_init = time.perf_counter() - start, _num_sockets()
        for group in (context, of_saves):
            group.all_reduce([1.0])
            group.broadcast_object("run")
            group.barrier()
        talked = _num_sockets()
        of_saves.gather_object("report")  # rank 0 hears of each
        figures = {
            "init_seconds": seconds,
            "sockets_after_init": after_init - before,
            "sockets_after_talk": talked - before,
            "sockets_of_others_after_gather": (_num_sockets() - before) if rank else 0,
            "sockets_of_main_after_gather": 0 if rank else _num_sockets() - before,
        }
        Path(place, f"{rank}.json").write_text(json.dumps(figures))
        context.barrier()


def _num_sockets() -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return found


CURVES = (
    ("open", "cpu_seconds", "opening the weights:\nseconds of processor"),
    ("resume", "opened", "resuming:\nrank files opened by a rank"),
    ("save", "median_received", "saving:\nbytes that a rank receives"),
)


def plot(before: Path, after: Path, target: Path) -> None:
    """Draw the curves over the number of ranks as an SVG, from the figures of two commits."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(10, 3), layout="constrained")
    for axis, (measure, key, title) in zip(axes, CURVES, strict=True):
        for label, file in (("before", before), ("now", after)):
            rows = [row for row in json.loads(file.read_text()) if row["measure"] == measure]
            points = sorted((row["ranks"], row[key]) for row in rows)
            axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(xscale="log", yscale="log", xlabel="ranks", title=title)
        axis.set_xticks([64, 256, 1024], ["64", "256", "1,024"])
        axis.minorticks_off()
    axes[0].legend()
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/scale"), help="on a file system with holes")
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=["70B"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES[1:]))
    parser.add_argument("--keep", action="store_true", help="keep the steps that were made")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--plot", nargs=3, type=Path, metavar=("BEFORE", "AFTER", "SVG"), help="draw figures instead")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plot:
        plot(*arguments.plot)
        return
    if arguments.measure:
        function = globals()[f"measure_{arguments.measure.replace('-', '_')}"]
        print(json.dumps(function(arguments.work, arguments.models[0], arguments.ranks[0])))
        return
    rows = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else []
    for model in arguments.models:
        shapes_of(model, arguments.work)
        for ranks in arguments.ranks:
            if {"open", "resume", "resume-fewer", "tensor-parallel"} & set(arguments.only):
                sparse_step(arguments.work, model, ranks)
            for name in arguments.only:
                rows.append(
                    {"measure": name, "model": model, "ranks": ranks, **_child(arguments.work, name, model, ranks)}
                )
                print(json.dumps(rows[-1]), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
            if not arguments.keep:
                shutil.rmtree(arguments.work / f"sparse-{model}-{ranks}", ignore_errors=True)
                shutil.rmtree(thin_step(arguments.work, model), ignore_errors=True)


def _child(work: Path, name: str, model: str, ranks: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", str(work), "--measure", name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--models", model, "--ranks", str(ranks)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{name} of {model} at {ranks} ranks failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
