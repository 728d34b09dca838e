"""With its adapters disabled, a sharded model is its base bit for bit, and training does not notice it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_shard.checkpoint import locate
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import ModelConfig, model_run_errors
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training.load_model import LoadedModel, load_sharded
from fsdp_shard.training.peft.config import AdapterConfig, LoraConfig
from fsdp_shard.training.peft.disable_adapters import adapters_disabled
from tests.support.ranks import on_ranks, update
from tests.support.tiny import token_batch

# peft 0.21 asks transformers 5.23 for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS = 3
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"modules_to_save": ["model.norm", "v_proj"], "dropout": 0.1},
    "dora": {"modules_to_save": ["model.norm"], "dropout": 0.1, "dora": True},
    "pissa": {"modules_to_save": ["model.norm"], "init": "pissa"},
    "nf4": {"modules_to_save": ["model.norm"], "quantize": "nf4"},
}
CASES = [(wrapper, kind) for wrapper in ("fsdp2", "fsdp1", "ddp") for kind in ADAPTERS]


def load(context: DistributedContext, directory: Path, wrapper: str, adapter: AdapterConfig | None) -> LoadedModel:
    shard = WRAPPERS[wrapper](param_dtype="float32", activation_checkpointing=wrapper == "fsdp2")
    return load_sharded(ModelConfig(path=str(directory)), shard, locate(directory), context, adapter, seed=7)


def logits_of(loaded: LoadedModel, context: DistributedContext) -> torch.Tensor:
    tokens = token_batch(5).chunk(context.world_size)[context.rank]
    with torch.no_grad(), model_run_errors(loaded.model.module):
        return loaded.model.module(input_ids=tokens, use_cache=False).logits.clone()


def train(context: DistributedContext, directory: Path, case: tuple[str, str], *, detour: bool) -> dict[str, Any]:
    """Losses, and with `detour` the logits of the model and of its base before each step."""
    loaded = load(context, directory, case[0], LoraConfig(rank=3, alpha=24, **ADAPTERS[case[1]]))
    module = loaded.model.module.train()
    marks = [param.requires_grad for param in module.parameters()]
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=3e-2)
    losses, disabled, enabled = [], [], []
    for step in range(STEPS):
        if detour:
            with adapters_disabled(module):
                assert [param.requires_grad for param in module.parameters()] == marks
                disabled.append(logits_of(loaded, context))
            assert [param.requires_grad for param in module.parameters()] == marks
        torch.manual_seed(step)  # of dropout
        tokens = token_batch(0).chunk(context.world_size)[context.rank]
        losses.append(update(optimizer, module(input_ids=tokens, labels=tokens, use_cache=False).loss, context))
    enabled.append(logits_of(loaded, context))
    return {"losses": losses, "disabled": disabled, "enabled": enabled}


def run_cases(context: DistributedContext, directory: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for case in CASES:
        # The layers of a new adapter add exactly zero, so that is what a quantized base without one computes.
        adapter = None if case[1] != "nf4" else LoraConfig(quantize="nf4")
        base = logits_of(load(context, directory, case[0], adapter), context)
        straight, detour = (train(context, directory, case, detour=detour) for detour in (False, True))
        found[case] = {"base": base, "straight": straight["losses"], **detour}
    return found


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def found(request: pytest.FixtureRequest, tiny_model: Path) -> list[dict[Any, Any]]:
    return on_ranks(request.param, run_cases, tiny_model)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_base_is_computed_and_training_goes_on_as_without(
    found: list[dict[Any, Any]], case: tuple[str, str]
) -> None:
    for of_rank in found:
        results = of_rank[case]
        assert all(torch.equal(logits, results["base"]) for logits in results["disabled"])
        assert not torch.allclose(results["enabled"][0], results["base"], atol=1e-2), "the adapter is trained"
        assert results["losses"] == results["straight"]
