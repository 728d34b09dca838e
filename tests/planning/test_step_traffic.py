"""Bytes that ranks send in a step: what real ranks give to their collectives, to the byte, in every mode."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AlbertConfig, PretrainedConfig

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import ModelConfig, build_on_meta, rebuild_buffers
from fsdp_shard.planning.costs.model_facts import ModelFacts, model_facts
from fsdp_shard.planning.costs.step_time import link_bytes, network_bytes
from fsdp_shard.planning.costs.step_traffic import Traffic, step_traffic
from fsdp_shard.planning.costs.unit_shares import unit_shares
from fsdp_shard.planning.meta_model import build_planned
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.sharding import (
    ContextRanks,
    DdpConfig,
    Fsdp1Config,
    Fsdp2Config,
    ShardConfig,
    ShardedModel,
    attention_over,
    resolve_context_method,
)
from fsdp_shard.training import (
    OBJECTIVES,
    OPTIMIZERS,
    AdamWConfig,
    AdapterConfig,
    LoraConfig,
    ObjectiveConfig,
    TrainConfig,
    inject_lora,
    quantize_base,
    train,
)
from fsdp_shard.utils import TorchDispatchMode
from tests.support.live_bytes import build_sharded, training_run
from tests.support.mixtures import config as mixture_config
from tests.support.ranks import on_ranks
from tests.support.tiny import llama_config, token_batch

ROWS, LENGTH = 2, 16
WRAPPERS: dict[str, type[ShardConfig]] = {"fsdp2": Fsdp2Config, "fsdp1": Fsdp1Config, "ddp": DdpConfig}

_LORA, _LAST_LAYER = LoraConfig(rank=2), LoraConfig(rank=2, layers_to_transform=[3])
_EMBEDDING_TOO = LoraConfig(rank=2, layers_to_transform=[3], modules_to_save=["embed_tokens"])

# Wrapper, ranks, its settings, model, micro-batches, adapter.
Case = tuple[str, int, dict[str, Any], str, int, LoraConfig | None]
CASES: list[Case] = [
    ("fsdp2", 2, {"param_dtype": "float32"}, "llama", 1, None),
    ("fsdp2", 3, {}, "llama", 2, None),
    ("fsdp2", 4, {"replicas": 2, "reduce_dtype": "bfloat16"}, "llama", 2, None),
    ("fsdp2", 2, {"replicas": 2}, "llama", 1, None),
    ("fsdp2", 4, {"reshard_after_forward": 2}, "llama", 2, None),
    ("fsdp2", 2, {"reshard_after_forward": False, "sync_every_micro_batch": False}, "llama", 2, None),
    ("fsdp2", 2, {"min_params": 9000}, "llama", 1, _LORA),
    ("fsdp2", 2, {"norms_in_float32": True}, "llama", 1, None),
    ("fsdp2", 4, {"tensor_parallel": 2}, "four heads", 2, None),
    ("fsdp2", 2, {"tensor_parallel": 2}, "four heads, tied", 1, None),
    ("fsdp2", 2, {"tensor_parallel": 2, "activation_checkpointing": True}, "four heads", 1, None),
    ("fsdp2", 2, {"tensor_parallel": 2, "activation_checkpointing": "selective"}, "four heads", 1, None),
    ("fsdp2", 2, {"expert_parallel": 2, "param_dtype": "float32"}, "mixture", 2, None),
    (
        "fsdp2",
        4,
        {"expert_parallel": 2, "param_dtype": "float32", "activation_checkpointing": True},
        "mixture",
        1,
        None,
    ),
    (
        "fsdp2",
        4,
        {"expert_parallel": 2, "replicas": 2, "param_dtype": "float32", "activation_checkpointing": "selective"},
        "mixture",
        1,
        None,
    ),
    ("fsdp2", 2, {"context_parallel": 2, "context_method": "ulysses"}, "four heads", 1, None),
    ("fsdp2", 4, {"context_parallel": 2, "context_method": "ring"}, "four heads", 2, None),
    (
        "fsdp2",
        4,
        {"context_parallel": 4, "context_method": "ring", "activation_checkpointing": True},
        "llama",
        1,
        None,
    ),
    ("fsdp2", 2, {"context_parallel": 2, "activation_checkpointing": "selective"}, "four heads", 1, None),
    ("fsdp2", 2, {}, "four layers", 1, _LAST_LAYER),
    ("fsdp2", 2, {"prefetch_backward": 2}, "four layers", 2, _LAST_LAYER),
    ("fsdp2", 2, {"reshard_after_forward": False}, "four layers", 1, _LAST_LAYER),
    ("fsdp2", 2, {}, "four layers", 1, _EMBEDDING_TOO),
    ("fsdp1", 2, {}, "four layers", 1, _LAST_LAYER),
    ("fsdp1", 2, {}, "four heads", 1, LoraConfig(rank=2, quantize="nf4")),
    ("fsdp1", 2, {"prefetch_backward": 0}, "four heads", 2, LoraConfig(rank=2, quantize="nf4")),
    ("fsdp1", 2, {}, "llama", 2, None),
    ("fsdp1", 4, {"replicas": 2}, "llama", 2, None),
    ("fsdp1", 2, {"min_params": 9000}, "llama", 1, _LORA),
    ("fsdp1", 2, {"reshard_after_forward": False}, "llama", 2, None),
    (
        "fsdp1",
        2,
        {"reshard_after_forward": False, "sync_every_micro_batch": False, "reduce_dtype": "bfloat16"},
        "llama",
        2,
        None,
    ),
    ("fsdp2", 2, {}, "one block of three layers", 2, None),
    ("fsdp2", 2, {"reshard_after_forward": False}, "one block of three layers", 1, None),
    ("fsdp2", 4, {"reshard_after_forward": 2}, "one block of three layers", 1, None),
    ("fsdp2", 2, {"activation_checkpointing": True}, "one block of three layers", 1, None),
    ("fsdp2", 2, {"min_params": 1500}, "one block of three layers", 1, None),
    ("fsdp1", 2, {}, "one block of three layers", 2, None),
    ("fsdp1", 2, {"activation_checkpointing": True}, "one block of three layers", 1, None),
    ("ddp", 2, {}, "llama", 2, None),
    ("ddp", 4, {"sync_every_micro_batch": True}, "llama", 2, None),
]


def model_config(kind: str) -> PretrainedConfig:
    if kind == "mixture":
        found: PretrainedConfig = mixture_config("mixtral")
        return found
    if kind == "one block of three layers":
        return AlbertConfig(
            architectures=["AlbertForMaskedLM"], vocab_size=1024, embedding_size=16, hidden_size=32,
            intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
    config = llama_config(tied=kind.endswith(", tied"), layers=4 if kind == "four layers" else 2)
    if kind.startswith("four heads"):
        config.hidden_size, config.head_dim = 32, 8
        config.num_attention_heads, config.num_key_value_heads = 4, 2
    return config


class Given(TorchDispatchMode):
    """Adds up what this rank gives to collectives, by kind: whole tensors where they are gathered or reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func.name():
            case "c10d::_allgather_base_":
                self.num_bytes["all-gather"] += args[0].nbytes
            case "c10d::allgather_":
                self.num_bytes["all-gather"] += sum(tensor.nbytes for tensor in args[0][0])
            case "_c10d_functional::all_gather_into_tensor":
                self.num_bytes["all-gather"] += args[0].nbytes * args[1]
            case "c10d::_reduce_scatter_base_":
                self.num_bytes["reduce-scatter"] += args[1].nbytes
            case "c10d::allreduce_":
                self.num_bytes["all-reduce"] += sum(tensor.nbytes for tensor in args[0])
            case "_c10d_functional::all_reduce":
                self.num_bytes["all-reduce"] += args[0].nbytes
            case "c10d::alltoall_base_":
                self.num_bytes["all-to-all"] += args[1].nbytes
            case "_c10d_functional::all_to_all_single":
                self.num_bytes["all-to-all"] += args[0].nbytes
            case "c10d::send":
                self.num_bytes["send"] += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def given(context: DistributedContext, case: Case) -> dict[str, int]:
    """What a rank gives to collectives in the passes of a step."""
    wrapper, _, settings, kind, num_micro_batches, adapter = case
    shard, config = WRAPPERS[wrapper](**settings), model_config(kind)
    model = build_on_meta(config, "float32").train()
    if adapter is not None:
        inject_lora(model, adapter, "x", {})
        quantize_base(model, adapter.quantize, shard, {})
    rebuild_buffers(model, "cpu")
    sharded = shard.shard(model, context)
    with torch.no_grad():
        for param in sharded.module.parameters():
            (param.to_local() if hasattr(param, "to_local") else param).fill_(0.01)
    with Given() as found:
        for number in range(num_micro_batches):
            is_synced = shard.sync_every_micro_batch or number == num_micro_batches - 1
            with nullcontext() if is_synced else sharded.no_sync():
                _passes(sharded.module, context, shard, config)
    return dict(found.num_bytes)


def _passes(model: Any, context: DistributedContext, shard: ShardConfig, config: PretrainedConfig) -> None:
    tokens, sequence = token_batch(0, ROWS, LENGTH).numpy(), None
    inputs: dict[str, Any] = {"input_ids": tokens}
    labels = tokens
    if shard.context_parallel > 1:
        ranks = ContextRanks.of(context, resolve_context_method(shard, config))
        part = ranks.own_part(inputs, tokens.astype(np.int64), ignore_index=-100)
        inputs, labels, sequence = part.inputs, part.labels, part.sequence
    with attention_over(sequence):
        given_inputs = {name: torch.from_numpy(array) for name, array in inputs.items()}
        logits = model(**given_inputs, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1).float(), torch.from_numpy(labels).flatten()).backward()


def planned(case: Case) -> tuple[ModelFacts, PlannedRun]:
    wrapper, num_ranks, settings, kind, num_micro_batches, adapter = case
    shard = WRAPPERS[wrapper](**settings)
    model = ModelConfig(path="x")
    num_data_ranks = num_ranks // (shard.tensor_parallel * shard.context_parallel)
    train = TrainConfig(global_batch_size=ROWS * num_micro_batches * num_data_ranks, micro_batch_size=ROWS)
    config = model_config(kind)
    trained = adapter or AdapterConfig()
    stored, _ = build_planned(config, model, trained, model.dtype, shard)
    facts = model_facts(config, stored, model, trained, shard)
    return facts, PlannedRun(model, shard, train, AdamWConfig(), LENGTH, num_ranks, trained)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # logits of divided heads
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0]} {case[2]} {case[3]} x{case[4]}{' lora' if case[5] else ''}"
)
def test_ranks_send_what_is_planned_to_the_byte(case: Case) -> None:
    shard = WRAPPERS[case[0]](**case[2])
    parallel = {name: getattr(shard, name) for name in ("tensor_parallel", "expert_parallel", "context_parallel")}
    ranks = on_ranks(case[1], given, case, replicas=shard.replicas, **parallel)
    expected: Counter[str] = Counter()
    facts, run = planned(case)
    for traffic in step_traffic(facts, run, unit_shares(facts, run)):
        expected[traffic.collective] += traffic.payload_bytes
    if shard.expert_parallel > 1:  # routers decide how much each rank sends, but not how much all of them do
        total = sum(rank.pop("all-to-all") for rank in ranks)
        assert total == case[1] * expected.pop("all-to-all")
    if shard.tensor_parallel > 1:  # of layers that are divided unevenly, the first rank has the most
        assert all(sum(rank.values()) <= sum(expected.values()) for rank in ranks)
        ranks = ranks[:1]
    assert ranks == [dict(expected)] * len(ranks)


class _Values(TorchDispatchMode):
    """Adds up the bytes of float32 values that are gathered in lists, as no parameter is."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::allgather_" and args[1][0].dtype == torch.float32:
            self.num_bytes += sum(tensor.nbytes for tensor in args[0][0])
        return func(*args, **(kwargs or {}))


def _train(context: DistributedContext, config: PretrainedConfig, run: PlannedRun, counter: Any) -> ShardedModel:
    """Train two steps, whose collectives `counter` sees."""
    model, _ = build_sharded(config, run, context)
    training = training_run(config, run, model, context)
    with counter:
        for _ in train(training):
            pass
    return model


def _gathered_values(context: DistributedContext, config: PretrainedConfig, run: PlannedRun) -> int:
    """Bytes of values of tokens that are gathered in two steps of training."""
    found = _Values()
    _train(context, config, run, found)
    return found.num_bytes


@pytest.mark.long
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_values_of_answers_are_gathered(method: str) -> None:
    objective, config = OBJECTIVES["simpo"](), model_config("four heads")
    shard = Fsdp2Config(context_parallel=2, context_method=method)
    train_config = TrainConfig(global_batch_size=4, micro_batch_size=2)
    model, length = ModelConfig(path="x"), 30  # of which rings divide 32
    run = PlannedRun(model, shard, train_config, AdamWConfig(), length, 2, objective=objective)
    stored, _ = build_planned(config, model, run.adapter, model.dtype, shard)
    facts = model_facts(config, stored, model, run.adapter, shard)
    gathers = {
        each.over: each for each in step_traffic(facts, run, unit_shares(facts, run)) if each.collective == "all-gather"
    }
    padded = 32 if method == "ring" else length
    assert gathers["context"].payload_bytes == 2 * (2 * 2) * padded * 4, "micro-batches, rows, tokens, float32"
    expected = 2 * gathers["context"].payload_bytes
    assert on_ranks(2, _gathered_values, config, run, context_parallel=2) == [expected] * 2
    run = replace(run, objective=ObjectiveConfig())
    plain = step_traffic(facts, run, unit_shares(facts, run))
    assert [each.over for each in plain if each.collective == "all-gather"] == ["shard"]


def _given_to_updates(context: DistributedContext, config: PretrainedConfig, run: PlannedRun) -> int:
    """What a rank gives to the all-to-alls of two steps, unless that is to itself only, as under DDP."""
    found = Given()
    model = _train(context, config, run, found)
    return found.num_bytes["all-to-all"] if context.mesh[model.shard_mesh_dim].size() > 1 else 0


@pytest.mark.long
@pytest.mark.parametrize("optim", ["muon", "adafactor"])
@pytest.mark.parametrize(
    ("wrapper", "num_ranks", "settings"),
    [("fsdp2", 2, {}), ("fsdp2", 4, {"replicas": 2}), ("fsdp1", 2, {}), ("ddp", 2, {})],
)
def test_parameters_go_to_the_ranks_that_update_them_and_come_back(
    wrapper: str, num_ranks: int, settings: dict[str, Any], optim: str
) -> None:
    """Ranks own parameters of other sizes, so that some give a little more; the plan has the mean."""
    shard, model, config = WRAPPERS[wrapper](**settings), ModelConfig(path="x"), model_config("llama")
    train_config = TrainConfig(global_batch_size=2 * num_ranks, micro_batch_size=2)
    run = PlannedRun(model, shard, train_config, OPTIMIZERS[optim](), 30, num_ranks)
    facts = model_facts(
        config, build_planned(config, model, run.adapter, model.dtype, shard)[0], model, run.adapter, shard
    )
    found = {each.collective: each for each in step_traffic(facts, run, unit_shares(facts, run))}
    planned_bytes = found["all-to-all"].payload_bytes if "all-to-all" in found else 0
    given_bytes = on_ranks(num_ranks, _given_to_updates, config, run, replicas=shard.replicas)
    assert sum(given_bytes) == 2 * num_ranks * planned_bytes
    assert (planned_bytes > 0) == (wrapper != "ddp")


def test_a_ring_sends_the_share_of_all_but_one() -> None:
    assert Traffic("all-gather", "shard", 4, 1, 400).sent_bytes == 300
    assert Traffic("reduce-scatter", "shard", 4, 1, 400).sent_bytes == 300
    assert Traffic("all-reduce", "replicate", 4, 1, 400).sent_bytes == 600
    assert Traffic("all-to-all", "expert", 4, 1, 400).sent_bytes == 300
    assert Traffic("send", "context", 4, 1, 400).sent_bytes == 400


@pytest.mark.parametrize(
    ("collective", "num_ranks", "stride", "links", "network"),
    [
        ("all-gather", 8, 1, 7 / 8, 0),
        ("all-gather", 32, 1, 7 / 8, 24 / 32 / 8),
        ("reduce-scatter", 32, 1, 7 / 8, 24 / 32 / 8),
        ("all-gather", 4, 8, 0, 3 / 4),  # one of each machine, as replicas of eight ranks are
        ("all-reduce", 4, 8, 0, 1),
        ("all-reduce", 8, 1, 1, 0),
        ("all-reduce", 16, 1, 1, 1 / 8),
        ("all-gather", 4, 4, 1 / 2, 2 / 4 / 2),
        ("all-to-all", 16, 1, 7 / 16, 8 / 16),
        ("send", 16, 1, 1, 1),
        ("send", 8, 1, 1, 0),
    ],
)
def test_what_stays_in_a_machine_of_eight(
    collective: str, num_ranks: int, stride: int, links: float, network: float
) -> None:
    traffic = Traffic(collective, "any", num_ranks, stride, 3200)
    assert (link_bytes(traffic, 8), network_bytes(traffic, 8)) == (3200 * links, 3200 * network)
