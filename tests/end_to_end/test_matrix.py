"""The matrix: wrapper x strategy x dtype x memory x what is trained, five steps each, against a loop without sharding.

Every cell that torch supports on a CPU runs; the others are refused by name, which is asserted in the same place. All
cells of a number of ranks run in the same forked ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import ShardConfig, check_ranks
from tests.support.ranks import on_ranks
from tests.support.sharded import WRAPPERS, sharded
from tests.support.tiny import llama, token_batch

STEPS = 5

# Strategy -> (ranks, settings); memory -> settings.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (2, {}),
    "grad-op": (2, {"reshard_after_forward": False}),
    "hybrid": (4, {"replicas": 2}),
}
DTYPES = ("float32", "bfloat16")
MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"activation_checkpointing": True},
    "offload": {"cpu_offload": True},
}
TRAINED = ("full", "lora")


def prepare(model: nn.Module, trained: str) -> nn.Module:
    """`model` with what is not `trained` frozen: with adapters of peft in each layer, drawn from a seed."""
    if trained == "lora":
        settings = peft.LoraConfig(r=3, lora_alpha=24, target_modules="all-linear", init_lora_weights=False)
        on_meta = next(model.parameters()).is_meta
        torch.manual_seed(1)
        peft.inject_adapter_in_model(settings, model, low_cpu_mem_usage=on_meta)
    return model


@dataclass(frozen=True)
class Cell:
    """One combination."""

    wrapper: str
    strategy: str
    dtype: str
    memory: str
    trained: str

    @property
    def ranks(self) -> int:
        return STRATEGIES[self.strategy][0]

    @property
    def config(self) -> ShardConfig:
        settings = STRATEGIES[self.strategy][1] | MEMORY[self.memory]
        return WRAPPERS[self.wrapper](param_dtype=self.dtype, **settings)


CELLS = [Cell(*values) for values in itertools.product(WRAPPERS, STRATEGIES, DTYPES, MEMORY, TRAINED)]


def run_cells(context: DistributedContext, cells: list[Cell]) -> list[list[float]]:
    """The losses of each of `cells`."""
    return [_losses(context, cell) for cell in cells]


def _losses(context: DistributedContext, cell: Cell) -> list[float]:
    model = sharded(cell.config, context, prepare=partial(prepare, trained=cell.trained))
    model.module.train()
    optimizer = torch.optim.AdamW([p for p in model.module.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(STEPS):
        rows = token_batch(0).chunk(context.world_size)[context.rank]
        loss = model.module(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / context.world_size)
    return losses


@cache
def unsharded(dtype: str, parts: int, trained: str) -> list[float]:
    """A plain loop over the same rows, `parts` of them at a time: weights in float32, a copy in `dtype` computes."""
    weights, copy = (prepare(llama(), trained).train() for _ in range(2))
    for param in copy.parameters():  # buffers stay in float32, as under the wrappers
        param.data = param.data.to(getattr(torch, dtype))
    trainable = [param for param in weights.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    losses = []
    for _ in range(STEPS):
        total = 0.0
        _copy(weights, copy)
        for rows in token_batch(0).chunk(parts):
            loss = copy(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            total += float(loss.detach()) / parts
            for param, computed in zip(weights.parameters(), copy.parameters(), strict=True):
                if not param.requires_grad:
                    continue
                assert computed.grad is not None
                grad = computed.grad.float() / parts
                param.grad = grad if param.grad is None else param.grad + grad
            copy.zero_grad()
        torch.nn.utils.clip_grad_norm_(trainable, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _copy(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for one, two in zip(source.parameters(), target.parameters(), strict=True):
            two.copy_(one)


@pytest.fixture(scope="module")
def losses() -> dict[Cell, list[list[float]]]:
    """Of each cell that is not refused, the losses on each rank."""
    found: dict[Cell, list[list[float]]] = {}
    for ranks, replicas in ((2, 1), (4, 2)):
        cells = [cell for cell in CELLS if cell.ranks == ranks and not _refusal(cell)]
        results = on_ranks(ranks, run_cells, cells, replicas=replicas)
        found |= {cell: [result[place] for result in results] for place, cell in enumerate(cells)}
    return found


def _refusal(cell: Cell) -> str | None:
    try:
        check_ranks(cell.config, cell.ranks, on_gpu=False)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(vars(cell).values()))
def test_a_cell_trains_as_without_sharding_or_is_refused(cell: Cell, losses: dict[Cell, list[list[float]]]) -> None:
    if cell.memory == "offload":
        assert _refusal(cell) == "shard.cpu_offload=true needs a GPU to offload from; this run is on the CPU already."
        return
    wanted = unsharded(cell.dtype, cell.ranks, cell.trained)
    assert wanted[-1] < wanted[0] - 0.05
    for found in losses[cell]:
        assert found == pytest.approx(wanted, rel=1e-5 if cell.dtype == "float32" else 1e-4)


def test_the_dtypes_can_be_told_apart() -> None:
    assert unsharded("bfloat16", 2, "full") != pytest.approx(unsharded("float32", 2, "full"), rel=1e-5)
