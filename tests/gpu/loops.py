"""Training loops to measure: ours, as the recipe drives it, and bare PyTorch with the same `fully_shard` calls."""

from __future__ import annotations

import itertools
import statistics
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_shard.data import Dataset, ShuffledDataset, WindowDataset
from fsdp_shard.distributed import DistributedContext, init_distributed
from fsdp_shard.models import build_on_meta, rebuild_buffers
from fsdp_shard.sharding import WRAPPERS, ShardedModel, plan_units
from fsdp_shard.training import (
    AdamWConfig,
    OptimConfig,
    RunLog,
    SgdConfig,
    TrainConfig,
    TrainerState,
    TrainingRun,
    build_optimizer,
    train,
    use_loss_head,
)
from tests.gpu.device import IS_REHEARSAL, Device, open_device
from tests.gpu.models import random_model

LR = 1e-4


@dataclass(frozen=True)
class Job:
    """A model to train, and how.

    Attributes:
        config: The model.
        length: Tokens of a window.
        num_micro_batches: Of a step.
        rows: Windows of a micro-batch.
        dtype: Of the weights that are updated.
        shard: Settings `shard.*`; `wrapper` chooses it.
        optim: The optimizer.
        windows: Windows of data.
    """

    config: Any
    length: int
    num_micro_batches: int = 1
    rows: int = 1
    dtype: torch.dtype = torch.float32
    shard: dict[str, Any] = field(default_factory=dict)
    optim: OptimConfig = field(default_factory=lambda: AdamWConfig(lr=LR))
    windows: int = 64

    def data(self) -> Dataset:
        """Random windows in random order."""
        vocabulary = self.config.get_text_config().vocab_size
        tokens = np.random.default_rng(0).integers(0, vocabulary, self.windows * self.length + 1)
        return ShuffledDataset(WindowDataset(tokens, self.length, "random"), seed=0)


@dataclass(frozen=True)
class Measured:
    """Of one side: median seconds of a step, the losses, and the peak of the device's memory in bytes."""

    seconds: float
    losses: list[float]
    peak_bytes: int


def sharded(job: Job, context: DistributedContext) -> ShardedModel:
    """The model of a job with random weights, sharded as `load_sharded` does."""
    options = dict(job.shard)
    settings = WRAPPERS[options.pop("wrapper", "fsdp2")](**options)
    model = build_on_meta(job.config, job.dtype).train()
    use_loss_head(model, "auto")
    rebuild_buffers(model, context.device)
    found = settings.shard(model, context)
    fill_shards(found, context.device)
    return found


@torch.no_grad()
def fill_shards(model: ShardedModel, device: torch.device, seed: int = 0) -> None:
    """Give this rank's shards random values, drawn on the `device` of this rank, whatever the wrapper."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, shard in model.local_shards().items():
        if not isinstance(shard.tensor, torch.nn.Parameter) and not shard.data.is_floating_point():
            continue
        if "norm" in name:
            shard.data.fill_(1.0)
        elif shard.data.device.type == generator.device.type:
            shard.data.normal_(0.0, 0.02, generator=generator)
        else:
            shard.data.uniform_(-0.03, 0.03)


def filled_alike(job: Job, context: DistributedContext) -> ShardedModel:
    """The model of a job with weights that depend on their names alone, on no device and number of ranks."""
    model = sharded(job, context)
    for name, shard in model.local_shards().items():
        if not isinstance(shard.tensor, torch.nn.Parameter):
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.ones(shard.shape) if "norm" in name else torch.randn(shard.shape, generator=generator) * 0.02
        if shard.box is not None:
            offsets, sizes = shard.box
            part = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].flatten()
        else:
            part = whole.flatten()[shard.start : shard.start + len(shard.data)]
        with torch.no_grad():
            shard.data.copy_(part)
    return model


def ours(job: Job, device: Device) -> Iterator[float]:
    """Steps of our loop, each when it is asked for; their losses."""
    with init_distributed(device.type, timeout_seconds=120) as context, TemporaryDirectory() as directory:
        model = sharded(job, context)
        run = training_run(job, model, context)
        with run.stop, RunLog(directory, run) as log:
            for report in train(run):
                log.step(report)
                yield report.loss


def training_run(job: Job, model: ShardedModel, context: DistributedContext, steps: int = 1 << 30) -> TrainingRun:
    """The run of a job at its beginning."""
    optimizer, data = build_optimizer(job.optim, model, context), job.data()
    batch = job.rows * job.num_micro_batches * context.num_data_ranks
    config = TrainConfig(
        steps=steps, global_batch_size=batch, micro_batch_size=job.rows, schedule="constant", log_every=1 << 30
    )
    return TrainingRun(model, optimizer, data, config, context, TrainerState(0, data.identity))


def bare(job: Job, device: Device) -> Iterator[float]:
    """The loop that a tutorial has, with torch's loss of all logits."""
    settings = WRAPPERS["fsdp2"](**job.shard)
    with init_distributed(device.type, timeout_seconds=120) as context:
        model = random_model(job.config, job.dtype, context.device).train()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        *inner, _ = plan_units(model, settings)
        for unit in inner:
            fully_shard(model.get_submodule(unit.fqn), mesh=context.mesh["shard"], mp_policy=policy)
        fully_shard(model, mesh=context.mesh["shard"], mp_policy=policy, reshard_after_forward=False)
        yield from _bare_steps(model, _bare_optimizer(job, model), job, device)


def _bare_optimizer(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
    if isinstance(job.optim, SgdConfig):
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=job.optim.momentum)
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)


def _bare_steps(model: Any, optimizer: torch.optim.Optimizer, job: Job, device: Device) -> Iterator[float]:
    data = job.data()
    for step in itertools.count():
        total = 0.0
        for number in range(step * job.num_micro_batches, (step + 1) * job.num_micro_batches):
            batch = data.batch(range(number * job.rows, (number + 1) * job.rows))
            inputs = {name: torch.from_numpy(value).to(device.torch_device) for name, value in batch.inputs.items()}
            logits = model(**inputs, use_cache=False).logits
            labels = torch.from_numpy(batch.labels).to(device.torch_device)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) / job.num_micro_batches
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield total


SIDES = {"ours": ours, "bare": bare}


def measure(side: str, job: Job, steps: int, warm: int = 3, *, fails_on_recompile: bool = False) -> Measured:
    """Time `steps` steps of one of `SIDES` after `warm` ones. For a process of its own."""
    device = open_device()
    steps = 2 if IS_REHEARSAL else steps
    running = SIDES[side](job, device)
    losses = [next(running) for _ in range(1 if IS_REHEARSAL else warm)]
    device.reset()
    seconds = []
    stance: AbstractContextManager[Any] = nullcontext()
    if fails_on_recompile:
        stance = torch.compiler.set_stance("fail_on_recompile")
    with stance:
        for _ in range(steps):
            device.synchronize()
            began = time.perf_counter()
            losses.append(next(running))
            device.synchronize()
            seconds.append(time.perf_counter() - began)
    peak = device.peak_bytes
    running.close()  # type: ignore[attr-defined]  # it is a generator
    return Measured(statistics.median(seconds), losses, peak)
