"""What context parallelism costs: bytes that ranks send, and memory of activations, against what is promised."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import lcm
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import UntypedStorage
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.sharding import ContextRanks, attention_over
from fsdp_shard.sharding.context_parallel.attention import use_context_parallel
from fsdp_shard.utils import TorchDispatchMode, tensors_in
from tests.support.ranks import on_ranks

HEADS, KEY_VALUE_HEADS, WIDTH, LAYERS, BATCH = 8, 2, 8, 2, 2


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends to others: in all-to-alls, and to its neighbor."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks, self.exchanged, self.sent_to_next = num_ranks, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.name())
        if name == "c10d::alltoall_base_":
            self.exchanged += args[1].nbytes * (self.num_ranks - 1) // self.num_ranks
        if name == "c10d::send":
            self.sent_to_next += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


class Peak(TorchDispatchMode):
    """The peak of the bytes of all storages that operators make within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._now, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            if id(storage) not in given | self._known:
                self._add(storage)
        return output

    def _add(self, storage: UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def end() -> None:
            self._now -= size
            self._known.discard(key)

        self._known.add(key)
        weakref.finalize(storage, end)
        self._now += size
        self.peak = max(self.peak, self._now)


def model_of(*, width: int = WIDTH, vocabulary: int = 64) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HEADS * width,
            intermediate_size=HEADS * width * 2,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_VALUE_HEADS,
            head_dim=width,
            vocab_size=vocabulary,
            max_position_embeddings=1 << 14,
        )
    )


def train_once(context: DistributedContext, model: Any, method: str, batch_size: int, length: int) -> None:
    """Forward and backward pass of a batch; on one rank, of whole sequences by sdpa."""
    tokens = np.random.default_rng(1).integers(3, 60, (batch_size, length))
    inputs, labels, sequence = {"input_ids": tokens}, tokens, None
    if context.world_size > 1:
        use_context_parallel(model, method)
        part = ContextRanks.of(context, method).own_part(inputs, labels, ignore_index=-100)
        inputs, labels, sequence = part.inputs, part.labels, part.sequence
    with attention_over(sequence):
        logits = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten()).backward()


def sent(context: DistributedContext, method: str) -> tuple[int, int]:
    with Sent(context.world_size) as found:
        train_once(context, model_of(), method, BATCH, 48)
    return found.exchanged, found.sent_to_next


def by_ulysses(num_ranks: int) -> int:
    """Bytes of a rank: queries and outputs of all heads, and as many keys and values as are sent; and gradients."""
    heads = 2 * HEADS + 2 * lcm(KEY_VALUE_HEADS, num_ranks)
    return 2 * LAYERS * (num_ranks - 1) * BATCH * (48 // num_ranks) * heads * WIDTH * 4 // num_ranks


def in_ring(num_ranks: int) -> int:
    """Bytes of a rank: in each of N-1 rounds keys and values, twice, and their float32 gradients."""
    return LAYERS * (num_ranks - 1) * BATCH * (48 // num_ranks) * 2 * KEY_VALUE_HEADS * WIDTH * (4 + 4 + 4)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("method", "formula"), [("ulysses", by_ulysses), ("ring", in_ring)])
def test_bytes_that_are_sent_are_those_of_the_formula(
    num_ranks: int, method: str, formula: Callable[[int], int]
) -> None:
    found = on_ranks(num_ranks, sent, method, context_parallel=num_ranks)
    expected = (formula(num_ranks), 0) if method == "ulysses" else (0, formula(num_ranks))
    assert found == [expected] * num_ranks


def peak(context: DistributedContext, method: str, length: int) -> int:
    model = model_of(width=16, vocabulary=128)
    with Peak() as found:
        train_once(context, model, method, 1, length)
    own = sum(param.numel() * 4 for param in model.parameters())  # gradients
    return found.peak - own


@pytest.mark.long
@pytest.mark.parametrize("length", [2048, pytest.param(8192, marks=pytest.mark.slow)])
def test_peak_of_activations(length: int) -> None:
    """Of forward and backward pass, with all that is in memory for a moment only: 0.6 and 0.35 of one rank's."""
    whole = on_ranks(1, peak, "", length)[0]
    for method in ("ulysses", "ring"):
        for num_ranks, most in ((2, 0.6), (4, 0.35)):
            fraction = max(on_ranks(num_ranks, peak, method, length, context_parallel=num_ranks)) / whole
            print(f"{length} tokens: {method} on {num_ranks} ranks {fraction:.3f} of {whole} bytes")
            assert fraction <= most, (method, num_ranks)
