"""Both wrappers against a plain model in one process, on real ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import build_on_meta
from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.sharding.registry import Fsdp2Config, shard
from fsdp_shard.sharding.wrap_policy import plan_units
from tests.support.ranks import on_ranks
from tests.support.sharded import WRAPPERS, assembled, sharded, train_plain, train_sharded
from tests.support.tiny import llama, llama_config, token_batch


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (4, {"replicas": 2}),
        (2, {"activation_checkpointing": True}),
        (2, {"reshard_after_forward": False}),
    ],
)
def test_training_equals_a_plain_model(wrapper: str, world_size: int, settings: dict[str, Any]) -> None:
    tied = world_size != 3
    config = WRAPPERS[wrapper](param_dtype="float32", **settings)
    results = on_ranks(world_size, train_sharded, config, tied, replicas=settings.get("replicas", 1))
    losses, norms, weights = train_plain(tied)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-6)
        assert result["norms"] == pytest.approx(norms, rel=1e-5)
    whole = assembled(results, {name: value.shape for name, value in weights.items()})
    for name, value in weights.items():
        # Adam divides by the root of a near-zero square here and there: rounding of 1e-9 becomes a part of lr = 1e-3.
        torch.testing.assert_close(whole[name], value, rtol=0, atol=5e-5)


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "ddp"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_wrapper_is_in_the_mode_of_its_model(wrapper: str, trains: bool) -> None:
    def modes(context: DistributedContext) -> set[bool]:
        model = build_on_meta(llama_config(), "float32").train(trains)
        return {part.training for part in shard(model, context, wrapper).module.modules()}

    assert on_ranks(1, modes) == [{trains}]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_filters_of_warnings_stay_as_they_are(wrapper: str) -> None:
    def filters(context: DistributedContext) -> tuple[list[Any], list[Any]]:
        before = list(warnings.filters)
        sharded(WRAPPERS[wrapper](), context)
        return before, list(warnings.filters)

    ((before, after),) = on_ranks(1, filters)
    assert before == after


@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_compute_keeps_float32_masters(world_size: int) -> None:
    losses = {}
    for wrapper, config in WRAPPERS.items():
        results = on_ranks(world_size, train_sharded, config(param_dtype="bfloat16"), True)
        assert {data.dtype for _, data, _ in results[0]["shards"].values()} == {torch.float32}
        losses[wrapper] = results[0]["losses"]
    plain, _, _ = train_plain(True)
    assert losses["fsdp1"] == pytest.approx(losses["fsdp2"], rel=1e-5)
    assert losses["fsdp2"] != plain, "bfloat16 must have been used"
    assert losses["fsdp2"] == pytest.approx(plain, rel=1e-3)


def grads_after_two(context: DistributedContext, config: ShardConfig, no_sync: bool) -> list[torch.Tensor]:
    from contextlib import nullcontext

    model = sharded(config, context)
    model.module.train()
    for micro in range(2):
        rows = token_batch(micro).chunk(context.world_size)[context.rank]
        with model.no_sync() if no_sync and micro == 0 else nullcontext():
            model.module(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    return [s.view_of(s.tensor.grad).clone() for s in model.local_shards().values() if s.tensor.grad is not None]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_sync_gives_the_same_gradients(wrapper: str, world_size: int) -> None:
    config = WRAPPERS[wrapper](param_dtype="float32")
    always, once = (on_ranks(world_size, grads_after_two, config, no_sync) for no_sync in (False, True))
    for one, other in zip(always, once, strict=True):
        assert one
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)


def test_no_sync_on_one_rank_in_bfloat16_with_tied_weights() -> None:
    """FullyShardedDataParallel kept gradients in bfloat16, and could not give them to both of the tied parameters."""
    config = WRAPPERS["fsdp1"](param_dtype="bfloat16")
    always, once = (on_ranks(1, grads_after_two, config, no_sync)[0] for no_sync in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(always, once, strict=True))


def shards_after_forward(context: DistributedContext, config: ShardConfig) -> bool:
    model = sharded(config, context)
    before = {name: shard.data.clone() for name, shard in model.local_shards().items()}
    model.module.eval()
    with torch.no_grad():
        model.module(input_ids=token_batch(0), use_cache=False)
    after = model.local_shards()
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n].data) for n in before)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_local_shards_after_an_evaluation(wrapper: str) -> None:
    assert all(on_ranks(2, shards_after_forward, WRAPPERS[wrapper](param_dtype="float32")))


def fqns(model: nn.Module, **settings: Any) -> list[str]:
    return [unit.fqn for unit in plan_units(model, Fsdp2Config(**settings))]


def test_units_keep_tied_parameters_in_the_root() -> None:
    assert fqns(llama(tied=True)) == ["model.layers.0", "model.layers.1", ""]


def test_a_large_untied_embedding_is_a_unit() -> None:
    config = llama_config(tied=False)
    config.vocab_size = 200_000
    units = fqns(build_on_meta(config, "float32"))
    assert units == ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head", ""]


def shard_from_python(context: DistributedContext, wrapper: str) -> tuple[float, str]:
    import fsdp_shard
    from fsdp_shard.errors import ConfigError

    model = fsdp_shard.shard(llama(), context, wrapper, param_dtype="float32")
    with torch.no_grad():
        loss = model.module(input_ids=token_batch(0), labels=token_batch(0), use_cache=False).loss
    with pytest.raises(ConfigError, match=r"shard\.replica is not a setting of .* \(did you mean replicas\?\)"):
        fsdp_shard.shard(llama(), context, wrapper, replica=2)
    with pytest.raises(ConfigError, match="does not divide the 2 ranks"):
        fsdp_shard.shard(llama(), context, wrapper, replicas=3)
    with pytest.raises(ConfigError, match=r"shard\.explain=true is for finetune, and has no effect here"):
        fsdp_shard.shard(llama(), context, wrapper, explain=True)
    return float(loss), type(model).__name__


@pytest.mark.parametrize(("wrapper", "name"), [("fsdp1", "Fsdp1Model"), ("fsdp2", "Fsdp2Model")])
def test_sharding_a_model_that_has_weights(wrapper: str, name: str) -> None:
    wanted = float(llama()(input_ids=token_batch(0), labels=token_batch(0)).loss.detach())
    assert on_ranks(2, shard_from_python, wrapper) == [(pytest.approx(wanted, rel=1e-6), name)] * 2


def _gathers(context: DistributedContext) -> tuple[list[str], int]:
    """The units, and how many gathers a forward and a backward pass make."""
    model = sharded(Fsdp2Config(param_dtype="float32", min_params=9_000), context, tied=False)
    units = [name for name, module in model.module.named_modules() if isinstance(module, FSDPModule)]
    rows = token_batch(0)
    with CommDebugMode() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its hooks
        model.module(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    return units, seen.get_comm_counts()[torch.ops.c10d._allgather_base_]


def test_the_output_head_is_gathered_once_a_step() -> None:
    """It is the last in the forward pass and the first in the backward pass, as are the parameters of the root."""
    units, num_gathers = on_ranks(2, _gathers)[0]
    assert {"", "lm_head"} < set(units)
    assert num_gathers == 2 * len(units) - 2
