"""One training loop of several, on the ranks that torchrun started: SIDE MODEL DTYPE SEQUENCE_LENGTH STEPS.

Ours (`train` with its log, as the recipe drives it), the same in bare PyTorch with the same `fully_shard` calls, and
DDP; the bare ones with our loss, or with torch's. Rank 0 prints, as JSON, the median seconds of STEPS steps after the
first two, and the first loss. Each side has processes of its own: two that share them also share what the C library
has free, and one of them then pays for pages that the other has given back.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint import locate
from fsdp_shard.data import Dataset, ShuffledDataset, WindowDataset
from fsdp_shard.distributed import DistributedContext, init_distributed
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import Fsdp2Config, plan_units
from fsdp_shard.training import (
    AdamWConfig,
    RunLog,
    TrainConfig,
    TrainerState,
    TrainingRun,
    build_optimizer,
    cross_entropy,
    load_sharded,
    train,
)
from fsdp_shard.utils import keep_freed_memory

LR = 1e-5
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def our_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels, float(labels.numel()))


def torch_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def ours(
    model: str, dtype: str, data: Dataset, run_dir: str, context: DistributedContext
) -> Generator[float, None, None]:
    """One step each time it is asked for, as recipes/finetune.py makes them; its loss."""
    settings, shard = ModelConfig(path=model), Fsdp2Config(param_dtype=dtype)
    loaded = load_sharded(settings, shard, locate(model), context)
    optimizer = build_optimizer(AdamWConfig(lr=LR), loaded.model, context)
    batch = context.world_size
    config = TrainConfig(steps=1 << 30, global_batch_size=batch, schedule="constant", log_every=1 << 30)
    keep_freed_memory()
    run = TrainingRun(loaded.model, optimizer, data, config, context, TrainerState(0, data.identity))
    with run.stop, RunLog(run_dir, run) as log:
        for report in train(run):
            log.step(report)
            yield report.loss


def bare(
    model: Any, forward: Any, loss_of: Loss, optimizer: Any, data: Dataset, context: DistributedContext
) -> Generator[float, None, None]:
    """The loop that a tutorial has: one window a rank, gradients clipped, the loss looked at. The samples are ours."""
    for start in itertools.count(0, context.world_size):
        batch = data.batch([start + context.rank])
        logits = forward(
            **{name: torch.from_numpy(value) for name, value in batch.inputs.items()}, use_cache=False
        ).logits
        loss = loss_of(logits, torch.from_numpy(batch.labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)


def bare_fsdp2(path: str, dtype: str, context: DistributedContext) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    *inner, _ = plan_units(model, Fsdp2Config(param_dtype=dtype))
    for unit in inner:
        fully_shard(model.get_submodule(unit.fqn), mesh=context.mesh["shard"], mp_policy=policy)
    fully_shard(model, mesh=context.mesh["shard"], mp_policy=policy, reshard_after_forward=False)
    return model


def side(
    name: str, path: str, dtype: str, data: Dataset, run_dir: str, context: DistributedContext
) -> Generator[float, None, None]:
    """The steps of one of `SIDES`."""
    if name == "ours":
        return ours(path, dtype, data, run_dir, context)
    if name == "DDP":
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
        replicated = DistributedDataParallel(whole)

        def autocast(**inputs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                return replicated(**inputs)

        return bare(whole, autocast, our_loss, adamw(whole), data, context)
    sharded = bare_fsdp2(path, dtype, context)
    return bare(sharded, sharded, our_loss if name == "bare" else torch_loss, adamw(sharded), data, context)


def main() -> None:
    name, path, dtype = sys.argv[1:4]
    length, steps = map(int, sys.argv[4:])
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with init_distributed("cpu") as context, TemporaryDirectory() as directory:
        vocabulary = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        tokens = np.random.default_rng(0).integers(0, vocabulary, 64 * length + 1)
        data = ShuffledDataset(WindowDataset(tokens, length, "random"), seed=0)
        running = side(name, path, dtype, data, directory, context)
        loss = context.all_reduce([next(running)])[0] / context.world_size
        next(running)  # the optimizer's state is made in the first step
        seconds = []
        for _ in range(steps):
            context.barrier()
            began = time.perf_counter()
            next(running)
            context.barrier()
            seconds.append(time.perf_counter() - began)
        running.close()
        if context.is_main:
            print(json.dumps({"seconds": statistics.median(seconds), "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
