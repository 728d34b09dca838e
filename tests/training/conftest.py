"""A world of one, and a plain module behind the protocol that the loop knows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_shard.data import WindowDataset
from fsdp_shard.distributed import DistributedContext, LocalShard, init_distributed


class Plain:
    """An unsharded module as a `ShardedModel`; counts the micro-batches whose gradients were not reduced."""

    shard_mesh_dim = "replicate"

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_unsynced = 0

    def no_sync(self) -> AbstractContextManager[None]:
        self.num_unsynced += 1
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def local_shards(self) -> dict[str, LocalShard]:
        raise NotImplementedError


@contextmanager
def world_of_one() -> Iterator[DistributedContext]:
    """Without touching the environment or a port."""
    with init_distributed("cpu", timeout_seconds=60) as context:
        yield context
    # A process group joins its threads when it is freed, which would wait for ever in a rank forked from here later.
    gc.collect()


@pytest.fixture
def alone() -> Iterator[DistributedContext]:
    with world_of_one() as context:
        yield context


def stream(num_tokens: int = 401, length: int = 8, vocabulary: int = 257) -> WindowDataset:
    """Random tokens in windows; the last one is not full when `length` does not divide `num_tokens` - 1."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, num_tokens)
    return WindowDataset(tokens, length, "random")
