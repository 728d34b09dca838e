"""Batches: every prompt once, those of like length together, the same for a run that goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.inference.generation.batching import complete, windows
from fsdp_shard.inference.generation.decoder import Answer
from fsdp_shard.inference.generation.prompts import Prompt
from tests.support.ranks import on_ranks


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(1, 5))
def test_every_prompt_is_in_one_batch(lengths: list[int], batch_size: int) -> None:
    found = list(windows(lengths, batch_size))
    assert sorted(place for window in found for batch in window for place in batch) == list(range(len(lengths)))
    first = 0
    for window in found:
        flat = [place for batch in window for place in batch]
        assert sorted(flat) == list(range(first, first + len(flat)))
        assert [lengths[place] for place in flat] == sorted((lengths[place] for place in flat), reverse=True)
        assert all(0 < len(batch) <= batch_size for batch in window)
        first += len(flat)


@given(st.lists(st.integers(1, 5), max_size=200), st.integers(1, 5))
def test_batches_of_one_length(lengths: list[int], batch_size: int) -> None:
    found = [batch for window in windows(lengths, batch_size, equal=True) for batch in window]
    assert sorted(place for batch in found for place in batch) == list(range(len(lengths)))
    assert all(len({lengths[place] for place in batch}) == 1 and len(batch) <= batch_size for batch in found)


def _completions(context: DistributedContext) -> list[str]:
    """Those of two prompts, of which that of rank 1 takes longer than a collective may."""
    impatient = replace(context, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=1)))

    def run(ids: list[list[int]], on_text: object) -> list[Answer]:
        time.sleep(3.0 * context.rank)
        return [Answer(list(own)) for own in ids]

    decoder: Any = SimpleNamespace(
        model=torch.nn.Linear(1, 1), settings=SimpleNamespace(batch_size=1), run=run, text=lambda answer: str(answer)
    )
    prompts, encoded = [Prompt("a", "prompt"), Prompt("b", "prompt")], [[1], [2]]
    return [found.prompt for found in complete(decoder, prompts, encoded, seed=0, context=impatient)]


def test_ranks_wait_for_one_with_long_answers() -> None:
    assert on_ranks(2, _completions) == [["a", "b"], []]
