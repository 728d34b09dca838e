"""The tiny Llama trained under a wrapper on real ranks, and by a plain loop in one process, to compare the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import build_on_meta, rebuild_buffers
from fsdp_shard.sharding import Fsdp1Config, Fsdp2Config, ShardConfig, ShardedModel
from tests.support.tiny import llama, llama_config, token_batch

WRAPPERS = {"fsdp1": Fsdp1Config, "fsdp2": Fsdp2Config}
STEPS = 4
MAX_NORM = 0.5


def sharded(
    config: ShardConfig,
    context: DistributedContext,
    *,
    tied: bool = True,
    prepare: Callable[[PreTrainedModel], object] = lambda model: None,
) -> ShardedModel:
    """The tiny Llama, sharded, with the weights of seed 0 written through its local shards."""
    model = build_on_meta(llama_config(tied=tied), "float32")
    rebuild_buffers(model, context.device)
    plain = llama(tied=tied)
    prepare(model)
    prepare(plain)
    wrapped = config.shard(model, context)
    source = dict(plain.named_parameters())
    shards = wrapped.local_shards()
    assert shards.keys() == source.keys()
    for name, shard in shards.items():
        assert shard.shape == tuple(source[name].shape)
        shard.data.copy_(source[name].detach().view(-1)[shard.start : shard.start + len(shard.data)])
    return wrapped


def freeze(model: nn.Module) -> None:
    """Leave only the attention of the first layer and the second layer trainable: mixed in units and in the root."""
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" in name or "layers.0.self_attn" in name)


def train_sharded(
    context: DistributedContext, config: ShardConfig, tied: bool, frozen: bool = False, steps: int = STEPS
) -> dict[str, Any]:
    """Losses and gradient norms of some steps, and every element this rank holds afterwards."""
    model = sharded(config, context, tied=tied, prepare=freeze) if frozen else sharded(config, context, tied=tied)
    model.module.train()
    optimizer = torch.optim.AdamW([p for p in model.module.parameters() if p.requires_grad], lr=1e-3, fused=True)
    losses, norms = [], []
    for step in range(steps):
        rows = token_batch(step).chunk(context.world_size)[context.rank]
        loss = model.module(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        norms.append(float(model.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / context.world_size)
    shards = {n: (s.start, s.data.clone(), s.writes) for n, s in model.local_shards().items()}
    return {"losses": losses, "norms": norms, "shards": shards}


def train_plain(
    tied: bool, frozen: bool = False, steps: int = STEPS, first: int = 0
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same without sharding: losses, norms and weights."""
    model = llama(tied=tied).train()
    if frozen:
        freeze(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    losses, norms = [], []
    for step in range(first, first + steps):
        rows = token_batch(step)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def assembled(results: list[dict[str, Any]], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Whole tensors out of what each rank holds; every element must be written by exactly one rank."""
    whole = {}
    for name, shape in shapes.items():
        written = torch.zeros(shape.numel(), dtype=torch.int64)
        value = torch.zeros(shape.numel())
        for result in results:
            start, data, writes = result["shards"][name]
            if writes:
                written[start : start + len(data)] += 1
                value[start : start + len(data)] = data
        assert bool((written == 1).all()), name
        whole[name] = value.view(shape)
    return whole
