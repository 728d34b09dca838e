"""Saving while training goes on: what is saved is the state of its step, training hardly notices, and a run resumes."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_shard.checkpoint import CheckpointConfig, Staging, StepContent, optimizer_shards, tensor_bytes
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import LaunchConfig, LocalShard, init_distributed
from fsdp_shard.models import ModelConfig, build_on_meta, tied_names
from fsdp_shard.sharding import Fsdp2Config
from fsdp_shard.training import (
    AdamWConfig,
    BackgroundSave,
    FinetuneSaver,
    LoadedModel,
    LoadFigures,
    RunContent,
    RunLock,
    TrainConfig,
    build_optimizer,
    load_sharded,
    open_run,
    run_files,
    start_run,
    train,
)
from tests.gpu.child import Bench, apart, in_turn
from tests.gpu.device import open_device, resident_bytes
from tests.gpu.loops import LR, Job, sharded, training_run
from tests.gpu.models import config_of, written

check = pytest.mark.check


def staged_saves(job: Job, num_saves: int) -> tuple[int, float]:
    """Bytes of saves in the background that differ from copies made while nothing ran; memory over staged bytes."""
    device = open_device()
    with init_distributed(device.type, timeout_seconds=60) as context:
        model = sharded(job, context)
        run = training_run(job, model, context)
        running, staging, wrong, growth = train(run), Staging(), 0, 0.0
        next(running)  # makes the optimizer's state
        copies: list[Any] = []
        run.optimizer.register_step_pre_hook(lambda *_: copies[-1].copy_remaining() if copies else None)
        for number in range(num_saves):
            shards = model.local_shards()
            state = StepContent(shards, {}, optimizer_shards(run.optimizer, shards))
            device.synchronize()
            expected = {name: shard.data.to("cpu", copy=True) for name, shard in _all(state).items()}
            before = resident_bytes()
            staged, copy = staging.stage(state)
            if not number:
                copy.wait()
                growth = (resident_bytes() - before) / sum(shard.data.nbytes for shard in _all(state).values())
            copies.append(copy)
            save = BackgroundSave(number, copy, partial(_num_different, staged, expected))
            next(running)  # changes the weights
            wrong += save.outcome.result(60)
        running.close()  # type: ignore[attr-defined]  # it is a generator
        return wrong, growth


def _all(state: StepContent) -> dict[str, LocalShard]:
    weights = {name: shard for name, shard in state.weights.items() if isinstance(shard.tensor, torch.nn.Parameter)}
    return weights | {f"optimizer {name}": shard for name, shard in state.optimizer.items()}


def _num_different(staged: StepContent, expected: Mapping[str, torch.Tensor]) -> int:
    wrong = 0
    for name, shard in _all(staged).items():
        if shard.data.nbytes:
            with staged.reading(shard, slice(0, shard.data.nbytes)) as found:
                wanted = np.frombuffer(tensor_bytes(expected[name]), np.uint8)
                wrong += int(np.count_nonzero(np.frombuffer(found, np.uint8) != wanted))
    return wrong


@check(seconds=150, concurrent="all")
def test_saves_in_the_background_are_those_of_their_step(bench: Bench) -> None:
    job = Job(config_of("100M", layers=4), bench.size(2048, 32))
    num_saves = bench.size(50, 5)
    wrong, growth = staged_saves(job, num_saves)
    bench.record(f"bytes that differ in {num_saves} saves", wrong, "bytes", at_most=0, exact=True)
    bench.record("pinned memory of a save", growth, "x of its bytes", at_most=1.05)


class _Quiet:
    """A log of saves that nobody reads."""

    def note(self, lines: str) -> None:
        del lines

    def warn(self, lines: str) -> None:
        del lines

    def saved(self, directory: Path) -> None:
        del directory


def saved_steps(job: Job, run_dir: str, num_saves: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of steps without a save, of the steps after one, and of the calls that began one."""
    device = open_device()
    with init_distributed(device.type, timeout_seconds=60) as context:
        model = sharded(job, context)
        run = training_run(job, model, context)
        aliases = tied_names(build_on_meta(job.config, job.dtype))
        loaded = LoadedModel(model=model, num_params=0, num_blocks=0, aliases=aliases, figures=LoadFigures(0, 0, 0, 0))
        settings = CheckpointConfig(keep_last=1)
        content = RunContent(loaded, run.optimizer, None, {"config.json": b"{}"})
        running, plain, after, calls = train(run), [], [], []

        def step() -> float:
            device.synchronize()
            began = time.perf_counter()
            next(running)
            device.synchronize()
            return time.perf_counter() - began

        with FinetuneSaver(run_dir, settings, context, content, _Quiet(), RunLock()) as saver:
            step()
            for number in range(num_saves + 1):  # the first makes the memory of the copies
                plain += [step() for _ in range(3)]
                device.synchronize()
                began = time.perf_counter()
                saver.save(run.state)
                calls.append(time.perf_counter() - began)
                after.append(step())
                saver.wait()
                if not number:
                    plain, after, calls = [], [], []
            saver.finish()
        running.close()  # type: ignore[attr-defined]  # it is a generator
        return plain, after, calls


@check(seconds=70)
def test_training_hardly_notices_a_save(bench: Bench) -> None:
    job = Job(config_of("1.2B", 8), bench.size(4096, 32), num_micro_batches=4)
    plain, after, calls = saved_steps(job, str(bench.directory / "saved"), bench.size(4, 2))
    ratio = statistics.median(after) / statistics.median(plain)
    bench.record("longest stall of a save", 1000 * max(calls), "ms", at_most=30)
    bench.record(
        "step during a save", ratio, "x", at_most=1.05, note=f"{1000 * statistics.median(plain):.0f} ms without"
    )


def resumable(run_dir: str, path: str, length: int, stop_after: int) -> tuple[list[float], str]:
    """The losses of a run of 6 steps that saves the third, as the recipe makes it, and a digest of its weights.

    It resumes from what is in `run_dir`, and ends early after step `stop_after`.
    """
    device = open_device()
    settings = TrainConfig(steps=6, global_batch_size=2, micro_batch_size=1, deterministic=True)
    config = FinetuneConfig(
        run_dir=run_dir,
        launch=LaunchConfig(device=device.type),
        model=ModelConfig(path=path),
        data=DataConfig(path="random"),  # it has data of its own
        shard=Fsdp2Config(),
        optim=AdamWConfig(lr=LR),
        train=settings,
        checkpoint=CheckpointConfig(every=3),
    )
    data, losses = Job(config_of("100M", layers=4), length).data(), []
    with start_run(config) as start:
        context = start.context
        loaded = load_sharded(config.model, config.shard, start.source, context, None, config.seed, start.resume_from)
        optimizer = build_optimizer(config.optim, loaded.model, context)
        run = open_run(config, start, loaded, optimizer, data)
        state = run.state
        module: Any = loaded.model.module
        files = run_files(config, loaded) | {"config.json": module.config.to_json_string().encode()}
        content = RunContent(loaded, optimizer, None, files)
        with FinetuneSaver(run_dir, config.checkpoint, context, content, _Quiet(), start.lock) as saver:
            for report in train(run):
                losses.append(report.loss)
                if saver.is_due(state, 6) and state.step < 6:
                    saver.save(state)
                if state.step == stop_after:
                    break
            saver.finish()
        digest = hashlib.sha256()
        for name, shard in sorted(loaded.model.local_shards().items()):
            digest.update(name.encode() + bytes(tensor_bytes(shard.data.cpu())))
    return losses, digest.hexdigest()


@check(seconds=150, concurrent="all")
def test_a_resumed_run_is_bit_equal(bench: Bench) -> None:
    if not bench.has("resumed run", "omegaconf"):
        return
    path = str(bench.directory / "100M-4")
    length = bench.size(512, 32)
    runs = [(str(bench.directory / name), stop) for name, stop in (("whole", 6), ("parts", 3), ("parts", 6))]
    _, (whole, digest), (first, _) = apart(
        in_turn,
        (written, bench.directory, "100M", 4, bench.device.torch_device),
        *((resumable, directory, path, length, stop) for directory, stop in runs[:2]),
    )
    directory, stop = runs[2]
    second, resumed = apart(resumable, directory, path, length, stop)  # a process of its own, as after a kill
    different = sum(one != other for one, other in zip(whole, first + second, strict=True))
    bench.record("losses of a resumed run that differ", different, "of 6", at_most=0, exact=True)
    bench.record("weights of a resumed run that differ", float(digest != resumed), "", at_most=0, exact=True)
