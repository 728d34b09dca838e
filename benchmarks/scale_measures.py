"""What `scale.py` measures, each in a process of its own: the work of a rank, or a command, on steps of many ranks.

Seconds are of the processor, memory is what the work adds to the imports, and opens are those of rank files.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from scale_steps import (
    SLOTS,
    Shape,
    config_of,
    dcp_metadata,
    rows_of,
    sparse_step,
    states_of,
    thin_shapes_of,
    thin_step,
    use_thin_chunks,
)

_ELEMENTS = 1 << 16  # read of each tensor at most, so that bytes do not hide what the number of ranks costs
_TENSOR_RANKS = 8
_DESCRIBED = {"manifest": "manifest.json", "index": "shards.index.json"}


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
    start, cpu = time.perf_counter(), time.process_time()
    try:
        found = dict(work())
        figures = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        peak[0] = max(peak[0], _resident())
    finally:
        done.set()
        watcher.join()
    return {**figures, "memory_bytes": peak[0] - before, "opened": opened[0], **found}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_open(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Open the weights of a step, as each rank does before it reads from them."""
    import torch  # noqa: F401 - as in a run

    from fsdp_shard.checkpoint import itemsize, open_checkpoint

    root = sparse_step(work, model, ranks, with_optimizer=False)
    itemsize("BF16")

    def opening() -> dict[str, Any]:
        with open_checkpoint(root) as index:
            return {"tensors": len(index.names)}

    figures = measured(opening)
    with open_checkpoint(root) as index:
        pieces = sum(len(entry.pieces) for entry in index.tensors.values())
    sizes = {f"{name}_bytes": (root / file).stat().st_size for name, file in _DESCRIBED.items()}
    return {**figures, "pieces": pieces, **sizes}


def _resume(work: Path, model: str, ranks: int, now: int) -> dict[str, Any]:
    """What rank `now // 2` of `now` ranks does to read its weights and its optimizer state, a block at a time."""
    import torch

    from fsdp_shard.checkpoint import load_shards, open_checkpoint
    from fsdp_shard.distributed import LocalShard

    root, rank = sparse_step(work, model, ranks), now // 2
    seconds = {}

    def shard(shape: Shape, dtype: torch.dtype) -> LocalShard:
        start, count = rows_of(shape, rank, now) if shape else (0, 1)  # each rank has all step counts
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

    root, rank = sparse_step(work, model, ranks, with_optimizer=False), ranks // 2
    shards, which = ranks // _TENSOR_RANKS, rank // _TENSOR_RANKS

    def shard(name: str, shape: Shape) -> LocalShard:
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


def measure_save(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Save a thin step, all ranks at once: rank 0, the median and worst of others; of the state, exp_avg and step."""
    use_thin_chunks(model, work)
    import torch
    from simulated_ranks import NUM_MEASURED, SimulatedRank, simulate

    from fsdp_shard.checkpoint import StepContent, StepStore, save_step
    from fsdp_shard.distributed import LocalShard

    shapes = thin_shapes_of(model, work)
    states = {name: shape for name, shape in states_of(shapes).items() if not name.endswith(SLOTS[1])}
    root = work / f"saved-{model}-{ranks}"
    shutil.rmtree(root, ignore_errors=True)
    store = StepStore(root)

    @cache
    def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
        """The data of all shards that have so many elements, or the memory of this machine would be the limit."""
        return torch.zeros(count, dtype=dtype)

    def shard(shape: Shape, rank: int, dtype: torch.dtype) -> LocalShard:
        start, count = rows_of(shape, rank, ranks)
        data = zeros(count if shape else 1, dtype)
        return LocalShard(data, data, start, shape, bool(shape) or rank == 0)

    def save(context: SimulatedRank) -> None:
        state = StepContent(
            {name: shard(shape, context.rank, torch.bfloat16) for name, shape in shapes.items()},
            {},
            {name: shard(shape, context.rank, torch.float32) for name, shape in states.items()},
        )
        save_step(context, store, 1, state, layout="sharded")

    results: list[Any] = []

    def saving() -> dict[str, Any]:
        results.extend(simulate(ranks, save))
        return {}

    try:
        whole = measured(saving)
    finally:
        shutil.rmtree(root, ignore_errors=True)
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
    """Verify a thin step."""
    use_thin_chunks(model, work)
    import torch  # noqa: F401 - as in a command

    from fsdp_shard.checkpoint import verify

    root = thin_step(work, model, ranks)

    def verifying() -> dict[str, Any]:
        report = verify(root)
        assert report.is_sound, report.problems
        return {"bytes": report.num_bytes}

    return measured(verifying)


def measure_convert(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Convert a thin step to a Hugging Face directory."""
    use_thin_chunks(model, work)
    import torch  # noqa: F401 - as in a command

    from fsdp_shard.checkpoint import convert

    source, target = thin_step(work, model, ranks), work / f"converted-{model}-{ranks}"
    shutil.rmtree(target, ignore_errors=True)

    def converting() -> dict[str, Any]:
        return {"bytes": convert(source, target, verify=False, sync=False).num_bytes}

    try:
        return measured(converting)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def measure_dcp(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Read the `.metadata` of a DCP checkpoint, and with `pickle.load`, in turns; the faster of two times each."""
    import torch  # noqa: F401 - as in a command
    from torch.distributed.checkpoint import filesystem  # noqa: F401 - what `pickle.load` would import

    ours: Any = importlib.import_module("fsdp_shard.checkpoint.torch_pickle")
    file = dcp_metadata(work, model, ranks)
    data = file.read_bytes()
    readers: dict[str, Callable[[], Any]] = {
        "cpu_seconds": lambda: ours.load(data, str(file)),
        "pickle_cpu_seconds": lambda: pickle.loads(data),
    }
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(2):
        for name, read in readers.items():
            start = time.process_time()
            pieces = len(read().storage_data)
            seconds[name].append(time.process_time() - start)
    best = {name: min(found) for name, found in seconds.items()}
    ratio = best["cpu_seconds"] / best["pickle_cpu_seconds"]
    return {"pieces": pieces, "metadata_bytes": len(data), **best, "ratio": ratio}


def measure_plan(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """`fsdp-shard plan` for that many ranks, the whole command."""
    place = work / f"plan-{model}-{ranks}"
    shutil.rmtree(place, ignore_errors=True)
    config_of(model).save_pretrained(place / "config")
    command = [sys.executable, "-m", "fsdp_shard", "plan", f"model.path={place / 'config'}", f"launch.ranks={ranks}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "data.sequence_length=2048", f"run_dir={place / 'run'}"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(place)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": seconds, "memory_bytes": after.ru_maxrss << 10}


def measure_init(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Start real ranks on this machine with the groups of a run, and let them talk as a step and a save do.

    Once with one copy of the model, and once with two (`replicated`). Sockets are those of the rank that has most,
    seconds those of the slowest one, all on the cores of this machine.
    With TORCH_GLOO_LAZY_INIT=0 in the environment, gloo connects all with all.
    """
    from fsdp_shard.distributed import LaunchConfig, variables_for_torch

    os.environ |= variables_for_torch(LaunchConfig(device="cpu"))
    with_copies = {f"replicated_{name}": value for name, value in _start(work, ranks, 2).items()}
    return {**_start(work, ranks, 1), **with_copies}


def measure_init_alone(work: Path, model: str, ranks: int) -> dict[str, Any]:
    """Start one rank of many, without the others: gloo connects to nobody before the first collective."""
    from fsdp_shard.distributed import LaunchConfig, init_distributed, variables_for_torch

    os.environ |= variables_for_torch(LaunchConfig(device="cpu"))
    os.environ |= {"RANK": str(ranks // 2), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    work.mkdir(parents=True, exist_ok=True)
    figures = {}
    for replicas, prefix in ((1, ""), (2, "replicated_")):
        store = work / f"store-{ranks}-{replicas}"
        store.unlink(missing_ok=True)
        before, start = _num_sockets(), time.process_time()
        with init_distributed("cpu", replicas, 300.0, f"file://{store}"):
            figures[f"{prefix}init_cpu_seconds"] = time.process_time() - start
            figures[f"{prefix}sockets_after_init"] = _num_sockets() - before
        store.unlink(missing_ok=True)
    return figures


def _start(work: Path, ranks: int, replicas: int) -> dict[str, Any]:
    from torch.multiprocessing.spawn import start_processes

    place = work / f"init-{ranks}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    start_processes(_init, (ranks, replicas, str(place)), ranks, start_method="fork")
    found = [json.loads(file.read_text()) for file in place.glob("*.json")]
    shutil.rmtree(place)
    assert len(found) == ranks
    return {name: max(one[name] for one in found) for name in found[0]}


def _init(rank: int, ranks: int, replicas: int, place: str) -> None:
    import torch

    from fsdp_shard.distributed import init_distributed

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    before, start, cpu = _num_sockets(), time.perf_counter(), time.process_time()
    with init_distributed("cpu", replicas, 300.0, f"file://{place}/store") as context:
        of_saves = context.with_new_group(300.0)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        after_init = _num_sockets()
        for group in (context, of_saves):
            group.all_reduce([1.0])
            group.broadcast_object("run")
            group.barrier()
        talked = _num_sockets()
        of_saves.gather_object("report")  # rank 0 hears of each
        figures = {
            "init_seconds": seconds,
            "init_cpu_seconds": cpu_seconds,
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
