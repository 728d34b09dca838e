"""What saving costs: a training run on real ranks, beside plain copies, plain writing, and torch's own savers.

    python benchmarks/save.py --work /big/disk/bench

Wants a machine with nothing else to do: two cores for two ranks, and room for some 10 GB. A round has every side once,
in an order of its own; every figure is the median over `--repeats` rounds. What a save adds to a run is that over
`--windows` of them, as steps differ from each other by as much, each beside the steps without one right before and
right after it, as machines are faster in some minutes than in others. What is left to be written is written before a
clock starts. Targets are those of the issue that asked.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import mmap
import multiprocessing
import os
import random
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from convert import Row
from measure import MB, kept_memory
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_shard.checkpoint import CheckpointConfig, tensor_bytes
from fsdp_shard.distributed import DistributedContext, init_distributed
from fsdp_shard.models import rebuild_buffers, tied_names
from fsdp_shard.sharding import Fsdp2Config
from fsdp_shard.training import FinetuneSaver, LoadedModel, LoadFigures, RunContent, RunLock, TrainerState
from fsdp_shard.utils import keep_freed_memory

# SmolLM2-135M's sizes, and a model of a few MB.
SIZES: dict[str, dict[str, Any]] = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
    "quick": {"hidden_size": 72, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 1024},
}
GROUPS = ("windows", "processor", "saves")
FRESH, REUSED = "copy into fresh memory", "copy into reused memory"
ASYNC, SYNC = "ours, asynchronous", "ours, synchronous"
STEPS = 2  # of a window: a save behind the training takes less


class Training:
    """One rank of a run that saves, by whatever side."""

    def __init__(self, context: DistributedContext, work: Path, size: str) -> None:
        self.context, self.work = context, work
        config = LlamaConfig(**SIZES[size], num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        rebuild_buffers(model, context.device)
        self.model = Fsdp2Config(param_dtype="float32", reshard_after_forward=False).shard(model, context)
        for shard in self.model.local_shards().values():
            shard.data.normal_(std=0.02)
        self.optimizer = torch.optim.AdamW(self.model.module.parameters(), lr=1e-4, fused=True)
        self.loaded = LoadedModel(
            model=self.model, num_params=0, num_blocks=0, aliases=tied_names(model), figures=LoadFigures(0, 0, 0, 0)
        )
        self.batch = torch.randint(0, config.vocab_size, (1, 8))
        self.group = dist.new_group(backend="gloo")
        self.kept: dict[str, torch.Tensor] = {}
        self.savers: dict[str, FinetuneSaver] = {}
        self.step()
        self.own = [shard.data for shard in self.model.local_shards().values()]
        self.own += [value.to_local() for state in self.optimizer.state.values() for value in _sharded(state)]

    def step(self) -> None:
        self.model.module(input_ids=self.batch, labels=self.batch, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def window(self, save: Callable[[], Callable[[], None]]) -> float:
        """Seconds of what comes between two steps of a run: a save, STEPS steps, and what `save` returns, its end."""
        self.fresh()
        start = time.perf_counter()
        finish = save()
        for _ in range(STEPS):
            self.step()
        finish()
        dist.barrier()
        return time.perf_counter() - start

    def timed(self, work: Callable[[], None]) -> float:
        self.fresh()
        start = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - start

    def processor(self, save: Callable[[], Callable[[], None]]) -> float:
        """Seconds of processors that a save takes in this rank, all of its threads, with no training beside it.

        Where training keeps all cores busy, a run is longer by them; they vary less than its steps do.
        """
        self.fresh()
        start = time.process_time()
        save()()
        return time.process_time() - start

    def fresh(self) -> None:
        """No target of the side before, and nothing left to be written."""
        if self.context.is_main:
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(parents=True)
            os.sync()
        dist.barrier()

    # What may be called for a save. Each returns what ends it.

    def ours(self, **settings: Any) -> Callable[[], None]:
        saver = self.saver(**settings)
        saver.save(TrainerState(0, "none", step=1))
        return saver.finish

    def saver(self, **settings: Any) -> FinetuneSaver:
        if (key := json.dumps(settings)) not in self.savers:
            config = CheckpointConfig(**settings)
            content = RunContent(self.loaded, self.optimizer, None, {"config.json": b"{}"})
            self.savers[key] = FinetuneSaver(str(self.work), config, self.context, content, _Quiet(), RunLock())
        return self.savers[key]

    def copy_fresh(self) -> Callable[[], None]:
        """As `clone` does where memory that was freed is not kept, as it is here and in our runs."""
        self.copies = [_fresh(tensor).copy_(tensor) for tensor in self.own]
        return self.forget_copies

    def forget_copies(self) -> None:
        self.copies = []

    def copy_reused(self) -> Callable[[], None]:
        if not self.kept:
            self.kept = {str(number): torch.empty_like(tensor) for number, tensor in enumerate(self.own)}
        for tensor, copy in zip(self.own, self.kept.values(), strict=True):
            copy.copy_(tensor)
        return _nothing

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model.module, self.optimizer)
        model.pop("lm_head.weight", None)  # tied
        return {"model": model, "optimizer": optimizer}

    def dcp_async(self) -> Callable[[], None]:
        future = dcp.async_save(self.state_dict(), checkpoint_id=self.work / "dcp", process_group=self.group)
        return lambda: future.result() and None  # type: ignore[union-attr]  # a Future, as no staging is asked for

    def dcp_sync(self) -> Callable[[], None]:
        dcp.save(self.state_dict(), checkpoint_id=self.work / "dcp")
        return _nothing

    # Saves of which only the time counts.

    def write(self, tensors: list[torch.Tensor]) -> None:
        """The bytes of these tensors, written and on the disk, one file a rank: what no save of them can beat."""
        descriptor = os.open(self.work / f"plain-{self.context.rank}", os.O_CREAT | os.O_WRONLY)
        for tensor in tensors:
            data = tensor_bytes(tensor.reshape(-1))
            while data:
                data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
        os.close(descriptor)

    def gather_and_save_file(self) -> None:
        """Whole tensors on rank 0, and safetensors' own writer."""
        from safetensors.torch import save_file

        whole = {}
        for name, value in self.model.module.state_dict().items():
            tensor = value.full_tensor()
            if self.context.is_main and name != "lm_head.weight":
                whole[name] = tensor
        if self.context.is_main:
            save_file(whole, self.work / "model.safetensors")

    def hugging_face_writer(self) -> None:
        state = self.state_dict()["model"]
        writer = dcp.HuggingFaceStorageWriter(str(self.work / "hf"), save_distributed=True, enable_consolidation=True)
        dcp.save(state, storage_writer=writer)


class _Quiet:
    def note(self, lines: str) -> None: ...

    def warn(self, lines: str) -> None: ...

    def saved(self, directory: Path) -> None: ...


def _nothing() -> None: ...


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a copy that the system has to give first; what is little comes from what malloc has."""
    if tensor.nbytes < mmap.PAGESIZE:
        return torch.empty_like(tensor)
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)


def _sharded(state: dict[str, Any]) -> Iterator[Any]:
    return (value for value in state.values() if hasattr(value, "to_local"))


class Stall:
    """The time in which a save holds up the training thread: the call, and the wait before the weights change."""

    def __init__(self, training: Training) -> None:
        self.seconds, self._start = 0.0, 0.0
        training.optimizer.register_step_pre_hook(lambda *_: setattr(self, "_start", time.perf_counter()))

    def watch(self, training: Training) -> None:
        """After the saver's own hook."""
        training.optimizer.register_step_pre_hook(lambda *_: self._add())

    def _add(self) -> None:
        self.seconds += time.perf_counter() - self._start

    def of(self, save: Callable[[], Callable[[], None]]) -> Callable[[], Callable[[], None]]:
        def timed() -> Callable[[], None]:
            self.seconds = -time.perf_counter()
            finish = save()
            self.seconds += time.perf_counter()
            return finish

        return timed


def extra_memory(work: Callable[[], object]) -> float:
    """Resident bytes that `work` takes at most beyond what is there before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def measure(
    context: DistributedContext, work: Path, size: str, repeats: int, windows: int, groups: Sequence[str]
) -> dict[str, list[float]]:
    """What was measured in each round, by side; `longer: SIDE` is by how much a window is longer than those around it
    without a save, and `processor: SIDE` what a save takes of processors by itself.
    """
    training = Training(context, work, size)
    stall = Stall(training)
    behind: dict[str, Any] = {"asynchronous": True, "layout": "sharded"}
    training.saver(**behind)
    stall.watch(training)
    gc.collect()
    gc.freeze()  # as in our runs: what there was before is not looked through again
    sides: dict[str, Callable[[], Callable[[], None]]] = {
        FRESH: training.copy_fresh,
        REUSED: training.copy_reused,
        ASYNC: lambda: training.ours(**behind),
        SYNC: lambda: training.ours(asynchronous=False),
        "dcp.async_save": training.dcp_async,
        "dcp.save": training.dcp_sync,
    }
    weights = [shard.data for shard in training.model.local_shards().values()]
    saves: dict[str, Callable[[], object]] = {
        "write and fsync": lambda: training.write(training.own),
        "sharded": lambda: training.ours(asynchronous=False),
        "gathered": lambda: training.ours(asynchronous=False, layout="gathered"),
        "write and fsync, weights": lambda: training.write(weights),
        "gathered, weights": lambda: training.ours(asynchronous=False, layout="gathered", optimizer=False),
        "gather + save_file, weights": training.gather_and_save_file,
        "HuggingFaceStorageWriter, weights": training.hugging_face_writer,
    }
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(context.all_reduce([value], "max")[0])

    def in_turns(count: int, names: Sequence[str], work: Callable[[str], dict[str, float]]) -> None:
        for number in range(count + 1):
            for name in random.Random(number).sample(names, len(names)):
                for what, value in work(name).items():
                    if number:  # the round before allocates what is used again
                        note(what, value)

    without = 0.0  # seconds of the last window without a save

    def window(name: str) -> dict[str, float]:
        nonlocal without
        with_save, waited, before = training.window(stall.of(sides[name])), stall.seconds, without
        without = training.window(lambda: _nothing)
        longer = with_save - (before + without) / 2
        return {f"longer: {name}": longer, f"stall: {name}": waited, "window: nothing": without}

    def processor(name: str) -> dict[str, float]:
        return {f"processor: {name}": training.processor(sides[name])}

    def save(name: str) -> dict[str, float]:
        return {f"save: {name}": training.timed(saves[name])}  # type: ignore[arg-type]  # what it returns is not used

    if "windows" in groups:
        in_turns(windows, list(sides), window)
    if "processor" in groups:
        in_turns(repeats, list(sides), processor)
    if "saves" in groups:
        in_turns(repeats, list(saves), save)
        for layout in repeats * ["sharded", "gathered"]:
            training.fresh()
            note(f"memory: {layout}", extra_memory(saves[layout]))
    training.fresh()
    return found | {"bytes": [float(sum(tensor.nbytes for tensor in training.own))]}


# What is asked of a save behind the training: (words, measured, that it is a multiple of, limit).
RATIOS = (
    ("async lengthens the run / a copy into fresh memory does", f"longer: {ASYNC}", f"longer: {FRESH}", 1.2),
    ("the same against a copy into memory that is there", f"longer: {ASYNC}", f"longer: {REUSED}", None),
    ("async lengthens the run / sync does", f"longer: {ASYNC}", f"longer: {SYNC}", None),
    ("processors: async / a copy into fresh memory", f"processor: {ASYNC}", f"processor: {FRESH}", None),
    ("processors: async / a copy into memory that is there", f"processor: {ASYNC}", f"processor: {REUSED}", None),
)


def rows(measured: dict[str, list[float]]) -> Iterator[Row]:
    """What was asked for."""
    found = {name: statistics.median(values) for name, values in measured.items()}
    yield Row("bytes of the state, a rank", found["bytes"] / MB, "MB")
    for name, value in found.items():
        if name.startswith(("stall: ", "save: ", "processor: ")):
            yield Row(name, value, "s")
        if name == "window: nothing":
            yield Row(f"{STEPS} steps without a save", value, "s")
        if name.startswith("longer: "):
            error = _standard_error(measured[name])
            yield Row(f"lengthens the run: {name.removeprefix('longer: ')} ({error:.2f} either way)", value, "s")
    for what, over, under, limit in RATIOS:
        if over in found and under in found:
            yield Row(what, found[over] / found[under], "x", limit)
    if (peer := "stall: dcp.async_save") in found and (behind := f"stall: {ASYNC}") in found:
        yield Row("stall of dcp.async_save / of ours", found[peer] / max(found[behind], 1e-6), "x", 3, True)
    if "save: sharded" in found:
        yield from _rows_of_saves(found)


def _standard_error(values: Sequence[float]) -> float:
    """Of their median, if they vary as a normal distribution does."""
    return math.sqrt(math.pi / 2 * statistics.pvariance(values) / len(values))


def _rows_of_saves(found: dict[str, float]) -> Iterator[Row]:
    plain = found["save: write and fsync"]
    for layout in ("sharded", "gathered"):
        yield Row(f"sync, {layout} / write and fsync", found[f"save: {layout}"] / plain, "x", 1.3)
        yield Row(f"extra memory a rank, sync, {layout}", found[f"memory: {layout}"] / MB, "MB", 64)
    ours = found["save: gathered, weights"]
    for peer in ("gather + save_file", "HuggingFaceStorageWriter"):
        yield Row(f"{peer} / ours gathered, weights", found[f"save: {peer}, weights"] / ours, "x", 2.5, True)


def _rank(rank: int, options: argparse.Namespace, rendezvous: str, out: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(options.ranks), LOCAL_RANK=str(rank))
    with init_distributed("cpu", rendezvous=rendezvous) as context:
        size, work = "quick" if options.quick else "135M", options.work.resolve() / "save"
        found = measure(context, work, size, options.repeats, options.windows, options.only)
    if rank == 0:
        out.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory that is written to, on the disk to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--windows", type=int, default=25, help="rounds for what a save adds to a run (default 25)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds for all else (default 5)")
    parser.add_argument("--only", nargs="*", default=GROUPS, choices=GROUPS, help="what is measured")
    parser.add_argument("--quick", action="store_true", help="a model of a few MB, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    with TemporaryDirectory() as directory, kept_memory(1e7 if options.quick else 16e9):
        out = Path(directory) / "found.json"
        task = options, f"file://{directory}/rendezvous", out
        processes = [fork.Process(target=_rank, args=(rank, *task)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed")
        table = list(rows(json.loads(out.read_text())))
    print("\n".join(map(str, table)))
    if options.json:
        options.json.write_text(json.dumps([{**asdict(row), "is_met": row.is_met} for row in table], indent=2) + "\n")


if __name__ == "__main__":
    main()
