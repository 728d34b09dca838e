"""Every way to wrap, recompute, compile and prefetch trains like a plain model, and does what it says."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import build_on_meta
from fsdp_shard.sharding import check_accumulation, check_ranks, check_shardable, unit_tree
from fsdp_shard.sharding.activation_checkpointing import recompute_blocks
from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.sharding.module_shards import clean_fqns
from fsdp_shard.sharding.registry import DdpConfig, Fsdp1Config, Fsdp2Config
from fsdp_shard.sharding.wrap_policy import plan_units
from fsdp_shard.utils import check, is_costly_operator
from tests.support.ranks import on_ranks
from tests.support.sharded import assembled, sharded, train_plain, train_sharded
from tests.support.tiny import llama, llama_config, token_batch

STEPS = 2
CPU = torch.device("cpu")
BOTH: list[dict[str, Any]] = [
    {"activation_checkpointing": 2},
    {"activation_checkpointing": "selective"},
    {"prefetch_forward": 1, "prefetch_backward": 1},
    {"min_params": 2000},
    {"blocks": ["LlamaMLP", "LlamaAttention"], "activation_checkpointing": True},
]
CASES: list[ShardConfig] = [
    *(wrapper(param_dtype="float32", **case) for case in BOTH for wrapper in (Fsdp1Config, Fsdp2Config)),
    Fsdp1Config(param_dtype="float32", prefetch_backward=0),
    Fsdp2Config(param_dtype="float32", prefetch_forward=2, prefetch_backward=2),
    DdpConfig(),
    DdpConfig(sync_every_micro_batch=True, activation_checkpointing="all"),
]
COMPILED: list[ShardConfig] = [
    Fsdp1Config(param_dtype="float32", compile="aot_eager"),
    Fsdp2Config(param_dtype="float32", compile="aot_eager", activation_checkpointing="selective"),
    Fsdp2Config(param_dtype="float32", compile="aot_eager", activation_checkpointing=True),
]


def train_cases(context: DistributedContext, cases: list[tuple[ShardConfig, bool]]) -> list[dict[str, Any]]:
    results = []
    for config, frozen in cases:
        torch._dynamo.utils.counters.clear()
        found = train_sharded(context, config, True, frozen=frozen, steps=STEPS)
        results.append(found | {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]})
        torch._dynamo.reset()
    return results


@pytest.mark.long
def test_each_mode_trains_like_a_plain_model() -> None:
    compare([(config, False) for config in CASES])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's
def test_compiled_blocks_train_like_a_plain_model() -> None:
    compare([(config, False) for config in COMPILED])


def test_frozen_and_trainable_parameters_in_one_unit() -> None:
    frozen = [Fsdp1Config(param_dtype="float32"), Fsdp2Config(param_dtype="float32"), DdpConfig()]
    compare([(config, True) for config in frozen])
    assert train_plain(True, True, STEPS)[1] != train_plain(True, False, STEPS)[1]


def compare(cases: list[tuple[ShardConfig, bool]]) -> None:
    """Train each of `cases` (config, whether parameters are frozen) on two ranks and hold it against a plain loop."""
    ranks = on_ranks(2, train_cases, cases, timeout_seconds=300)
    plain = {frozen: train_plain(True, frozen, STEPS) for frozen in (False, True)}
    for (config, frozen), *results in zip(cases, *ranks, strict=True):
        losses, norms, weights = plain[frozen]
        for result in results:
            assert result["losses"] == pytest.approx(losses, rel=1e-6), config
            assert result["norms"] == pytest.approx(norms, rel=1e-5), config
        whole = assembled(results, {name: value.shape for name, value in weights.items()})
        for name, value in weights.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=5e-5)
        assert all((result["graphs"] > 0) == bool(config.compile) for result in results), config


def resharded(context: DistributedContext, settings: list[bool | int]) -> list[dict[str, Any]]:
    """What training gives with each of `reshard_after_forward`, and size and timeout of the groups that it has made."""
    results = []
    for every in settings:
        before = set(dist.distributed_c10d._world.pg_names)
        found = train_sharded(
            context, Fsdp2Config(param_dtype="float32", reshard_after_forward=every), True, False, STEPS
        )
        groups = [group for group in dist.distributed_c10d._world.pg_names if group not in before]
        timeouts = [group._get_backend(context.device).options._timeout.total_seconds() for group in groups]
        results.append(
            found | {"groups": [(group.size(), seconds) for group, seconds in zip(groups, timeouts, strict=True)]}
        )
    return results


@pytest.mark.long
def test_resharding_to_some_of_the_ranks() -> None:
    """All units share one mesh, whose two groups have the timeout of the run; a second model has the same mesh."""
    for result in on_ranks(4, resharded, [True, False, 2, 2]):
        every, kept, some, again = result
        assert [each["groups"] for each in result] == [[], [], [(2, 60.0), (2, 60.0)], []]
        assert every["losses"] == pytest.approx(train_plain(True, steps=STEPS)[0], rel=1e-6)
        for other in (kept, some, again):
            assert (other["losses"], other["norms"]) == (every["losses"], every["norms"])
    for every in (3, 4):
        with pytest.raises(ConfigError, match=f"reshard_after_forward={every} must divide the 4 ranks that a replica"):
            check_ranks(Fsdp2Config(reshard_after_forward=every), 4, on_gpu=False)


def norms_and_prefetch(context: DistributedContext, config: ShardConfig) -> dict[str, Any]:
    """The dtypes that norms and the layer after them see, and how far ahead units are gathered."""
    model = sharded(config, context)
    seen: dict[str, tuple[torch.dtype, ...]] = {}
    clean_fqn = clean_fqns(model.module)

    def look(name: str) -> Any:
        return lambda module, args: seen.update({name: (args[0].dtype, module.weight.dtype)})

    for name, module in model.module.named_modules():
        if isinstance(module, (LlamaRMSNorm, nn.Linear)):
            module.register_forward_pre_hook(look(clean_fqn(name)))
    loss = model.module(input_ids=token_batch(0), labels=token_batch(0), use_cache=False).loss
    loss.backward()
    return {
        "seen": seen,
        "loss": float(loss.detach()),
        "norm": float(model.clip_grad_norm_(1.0)),
        "keys": set(model.local_shards()),
    }


@pytest.mark.parametrize("wrapper", [Fsdp1Config, Fsdp2Config])
def test_norms_in_float32(wrapper: Any) -> None:
    for wide in (False, True):
        found = on_ranks(2, norms_and_prefetch, wrapper(norms_in_float32=wide, activation_checkpointing=True))
        dtype = torch.float32 if wide else torch.bfloat16
        for result in found:
            seen = result["seen"]
            norms = {name for name in seen if name.endswith("norm")}
            assert len(norms) == 5
            assert {seen[name] for name in norms} == {(dtype, dtype)}
            assert {seen[name] for name in set(seen) - norms} == {(torch.bfloat16, torch.bfloat16)}
            assert result["keys"] == set(dict(llama().named_parameters()))
            assert result["loss"] == pytest.approx(5.6, abs=0.3)
            assert result["norm"] > 0


def prefetch_lists(context: DistributedContext, config: ShardConfig) -> tuple[list[int], list[int]]:
    from torch.distributed.fsdp import FSDPModule

    states = [m._get_fsdp_state() for m in sharded(config, context).module.modules() if isinstance(m, FSDPModule)]
    forward = [len(state._states_to_forward_prefetch) for state in states]
    return forward, [len(state._states_to_backward_prefetch) for state in states]


def test_units_are_gathered_as_far_ahead_as_asked() -> None:
    config = Fsdp2Config(prefetch_forward=2, prefetch_backward=1, min_params=2000)
    ((forward, backward),) = on_ranks(1, prefetch_lists, config)
    assert len(forward) > 4
    assert forward == [0, *[2] * (len(forward) - 3), 1, 0]
    assert backward == [0, 0, *[1] * (len(backward) - 2)]


def test_activations_that_nothing_would_recompute_are_refused() -> None:
    check_shardable(llama(layers=2), Fsdp2Config(activation_checkpointing=2))
    with pytest.raises(
        ConfigError, match="activation_checkpointing=3 has no effect, as LlamaForCausalLM has 2 repeated"
    ):
        check_shardable(llama(layers=2), Fsdp2Config(activation_checkpointing=3))


@pytest.mark.parametrize("more", [{"norms_in_float32": True, "param_dtype": "bfloat16"}, {"min_params": 500}])
@pytest.mark.parametrize("wrapper", [Fsdp1Config, Fsdp2Config])
def test_selective_checkpointing_with_units_inside_of_blocks_is_refused(
    wrapper: type[ShardConfig], more: dict[str, Any]
) -> None:
    check_shardable(llama(), wrapper(activation_checkpointing=True, **more))
    with pytest.raises(ConfigError, match=r"cannot be combined with units inside of blocks, such as model\.layers\.0"):
        check_shardable(llama(), wrapper(activation_checkpointing="selective", **more))


def clipped(x: torch.Tensor, up: nn.Module, down: nn.Module) -> torch.Tensor:
    """As OLMo's queries."""
    return down(up(x).clamp_(-0.01, 0.01))


def read_before(x: torch.Tensor, up: nn.Module, down: nn.Module) -> torch.Tensor:
    y = up(x)
    z = down((y * 2).sin())
    y.add_(1)
    return z


def added_last(x: torch.Tensor, up: nn.Module, down: nn.Module) -> torch.Tensor:
    """As Falcon and Llama 4, in which nothing follows that the backward pass needs."""
    return down(up(x).sin()).add_(x)


@pytest.mark.parametrize(("mlp", "operator"), [(clipped, "clamp_"), (read_before, "add_"), (added_last, "")])
def test_kept_results_that_a_block_changes_in_place(mlp: Any, operator: str) -> None:
    """torch would recompute from what they have become, and give wrong gradients."""
    grads = []
    for kind in ("none", "selective"):
        model = llama(layers=2)
        for layer in model.model.layers:
            layer.mlp.forward = partial(mlp, up=layer.mlp.up_proj, down=layer.mlp.down_proj)
        recompute_blocks(model, Fsdp2Config(activation_checkpointing=kind))
        loss = model(input_ids=token_batch(0), labels=token_batch(0), use_cache=False).loss
        if kind == "selective" and operator:
            message = rf"=selective does not work for LlamaDecoderLayer: aten::{operator}.* changes a result in place"
            with pytest.raises(ConfigError, match=message):
                loss.backward()
            return
        loss.backward()
        grads.append([param.grad for param in model.parameters() if param.grad is not None])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's
def test_what_a_block_compiles_stays_compiled_under_selective_checkpointing() -> None:
    """As flex attention, which would compute all scores otherwise."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = llama(layers=2)
    activation = torch.compile(lambda x: x.sin() * x.cos(), backend=backend)
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = activation
    recompute_blocks(model, Fsdp2Config(activation_checkpointing="selective"))
    model(input_ids=token_batch(0), labels=token_batch(0), use_cache=False).loss.backward()
    torch._dynamo.reset()
    assert compiled


def test_offload_of_what_stays_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_offload=true moves nearly nothing with .*=selective"):
        check(Fsdp2Config(activation_offload=True, activation_checkpointing="selective"))


def test_what_fsdp1_cannot_add_up_on_the_cpu_is_refused() -> None:
    check_accumulation(Fsdp1Config(cpu_offload=True), 1)
    check_accumulation(Fsdp1Config(cpu_offload=True, sync_every_micro_batch=False), 2)
    check_accumulation(Fsdp2Config(cpu_offload=True), 2)
    with pytest.raises(ConfigError, match="keeps the gradients of the last of 2 micro-batches only"):
        check_accumulation(Fsdp1Config(cpu_offload=True), 2)


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls(kind: bool | int | str) -> Counter[str]:
    model = llama(layers=4)
    recompute_blocks(model, Fsdp2Config(activation_checkpointing=kind))
    with Calls() as mode:
        model(input_ids=token_batch(0), labels=token_batch(0), use_cache=False).loss.backward()
    return mode.calls


def test_what_is_computed_again() -> None:
    plain = calls(False)
    product, cheap = "aten.mm.default", "aten.silu.default"
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    again = {kind: calls(kind) - plain for kind in (True, "all", "none", 2, 3, "selective")}
    assert plain[cheap] == plain[attention] == 4
    assert again["none"][cheap] == 0
    assert again[True] == again["all"]
    assert (again["all"][cheap], again["all"][attention], again["all"][product]) == (
        4,
        4,
        4 * 6,
    )  # what comes last is saved by nobody
    assert (again[2][cheap], again[3][cheap]) == (2, 1)
    assert (again["selective"][cheap], again["selective"][attention], again["selective"][product]) == (4, 0, 0)


def test_selective_checkpointing_keeps_attention_kernels_and_collectives() -> None:
    # Registered under the name of the package flash-attn, which needs a GPU.
    @torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
    def attend(q: torch.Tensor) -> torch.Tensor:
        return q * 2

    kept = [
        torch.ops.flash_attn._flash_attn_forward.default,
        torch.ops.higher_order.flex_attention,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    ]
    assert attend is not None
    assert all(is_costly_operator(operator) for operator in kept)
    assert not any(
        map(is_costly_operator, (torch.ops.aten.silu.default, torch.ops._c10d_functional.wait_tensor.default))
    )


def test_what_a_wrapper_cannot_do_is_named() -> None:
    model = build_on_meta(llama_config(), "float32")
    for config, said in (
        (Fsdp2Config(compile="inducter"), r"shard\.compile=inducter is neither .* \(did you mean inductor\?\)"),
        (DdpConfig(param_dtype="bfloat16"), r"of the parameters, which is float32; set the same for model\.dtype"),
        (Fsdp2Config(norms_in_float32=True), "Sequential has no norm layer with parameters"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_shardable(model if "norm" not in said else nn.Sequential(nn.LSTM(2, 2), nn.Linear(2, 2)), config)
    for name, config in {
        "cpu_offload": Fsdp2Config(cpu_offload=True),
        "activation_offload": Fsdp2Config(activation_offload=True),
    }.items():
        with pytest.raises(ConfigError, match=f"shard.{name}=true needs a GPU to offload from"):
            check_ranks(config, 1, on_gpu=False)


class Nested(nn.Module):
    """A tie across modules, and a module that uses its children's parameters without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.second = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.first["b"].weight = self.second[0].weight


def test_units_by_size() -> None:
    def fqns(min_params: int, **settings: Any) -> list[str]:
        return [unit.fqn for unit in plan_units(Nested(), Fsdp2Config(min_params=min_params, **settings))]

    assert fqns(64) == ["first.a", "attention", ""], "a tie keeps both ends in the root; attention is used as a whole"
    assert fqns(64, norms_in_float32=True) == ["first.a", "second.1", "attention", ""]
    assert fqns(10_000) == [""]
    units = plan_units(llama(tied=False), Fsdp2Config(min_params=5000))
    assert [unit.fqn for unit in units if "layers.1" in unit.fqn] == ["model.layers.1.mlp"]
    units = plan_units(llama(), Fsdp2Config(min_params=850))
    inner = [unit.fqn for unit in units if "layers.1" in unit.fqn]
    names = ["self_attn.q_proj", "self_attn.o_proj", "self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert inner == [f"model.layers.1.{name}" for name in names], "inner ones first"
    assert sum(unit.num_params for unit in units) == sum(p.numel() for p in llama().parameters())
    assert sorted(name for unit in units for name in unit.parameters) == sorted(dict(llama().named_parameters()))


def test_the_tree_of_units() -> None:
    model = build_on_meta(llama_config(layers=12), "float32")

    def tree(shard: ShardConfig, num_ranks: int) -> list[str]:
        return unit_tree(model, shard, num_ranks)

    assert tree(Fsdp2Config(norms_in_float32=True), 2) == [
        "unit                          class              units  parameters  gathered           per rank",
        "(root)                        LlamaForCausalLM       1       9,252  18.1 KiB  18.0 KiB-18.1 KiB",
        "  model.layers.0-11           LlamaDecoderLayer     12      12,636  24.7 KiB  24.5 KiB-24.8 KiB",
        "    input_layernorm           LlamaRMSNorm           1          36     144 B               72 B",
        "    post_attention_layernorm  LlamaRMSNorm           1          36     144 B               72 B",
        "  model.norm                  LlamaRMSNorm           1          36     144 B               72 B",
    ]
    whole = tree(DdpConfig(), 2)[2].split()
    flat = tree(Fsdp1Config(param_dtype="float32"), 2)[2].split()
    assert (whole[:2], flat[:2]) == (["model.layers.0-11", "LlamaDecoderLayer"],) * 2
    assert whole[-2:] == ["49.6", "KiB"]
    assert flat[-2:] == ["24.8", "KiB"]
