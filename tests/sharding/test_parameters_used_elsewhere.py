"""Models that call a module's forward themselves, or read weights from elsewhere: gathered with what is around them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import no_split_blocks
from fsdp_shard.sharding import Fsdp1Config, Fsdp2Config, ShardConfig, check_shardable, plan_units, wrap_policy
from fsdp_shard.sharding.forward_trace import trace_forward, unused_by_text
from fsdp_shard.sharding.registry import WRAPPERS
from tests.support.ranks import on_ranks, update
from tests.support.sharded import assembled

STEPS, BATCH, LENGTH, LR = 2, 4, 16, 0.05
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 8}
ALIKE = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "embedding_size": 32}
REFORMER: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 131,
    "num_attention_heads": 4,
    "attention_head_size": 8,
    "num_hashes": 1,
}
REFORMER |= {"attn_layers": ["local", "lsh"], "feed_forward_size": 48, "axial_pos_shape": [4, 4], "is_decoder": True}
REFORMER |= {"axial_pos_embds_dim": [16, 16], "hash_seed": 1, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8}
REFORMER |= {"hidden_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0, "num_buckets": 4}
REFORMER |= {"local_attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
VISION: dict[str, Any] = {"hidden_size": 16, "depth": 2, "num_heads": 2, "intermediate_size": 20, "out_hidden_size": 32}
VISION |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
SWITCH = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 131, "num_experts": 4}
SWITCH |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
CROSS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
}
CROSS |= {"intermediate_size": 48, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default"}}
CROSS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TILES: dict[str, Any] = {"hidden_size": 16, "attention_heads": 2, "num_hidden_layers": 2, "num_global_layers": 1}
TILES |= {"intermediate_size": 20, "image_size": 28, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
TILES |= {"intermediate_layers_indices": [0], "vision_output_dim": 32}
# Name -> class of the model, type and values of its config.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", SMALL),
    "squeezebert": ("SqueezeBertForMaskedLM", "squeezebert", ALIKE),
    "reformer": ("ReformerModelWithLMHead", "reformer", REFORMER),
    "albert": ("AlbertForMaskedLM", "albert", ALIKE),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {
            "text_config": SMALL
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
            "vision_config": VISION,
        },
    ),
    "switch": ("SwitchTransformersForConditionalGeneration", "switch_transformers", SWITCH),
    "mllama": ("MllamaForConditionalGeneration", "mllama", {"text_config": CROSS, "vision_config": TILES}),
}
# Units of the blocks, and of every module that can be one.
SETTINGS: dict[str, Callable[[str], ShardConfig]] = {
    "blocks": lambda wrapper: WRAPPERS[wrapper](param_dtype="float32"),
    "all": lambda wrapper: WRAPPERS[wrapper](param_dtype="float32", min_params=1),
}
CASES = [(name, "fsdp2", units) for name in MODELS if name not in ("switch", "mllama") for units in SETTINGS]
CASES += [(name, "fsdp1", units) for name in ("squeezebert", "qwen3_vl") for units in SETTINGS]


def fresh(name: str) -> PreTrainedModel:
    cls, kind, values = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **copy.deepcopy(values))
    model: PreTrainedModel = getattr(transformers, cls)(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return model.train()


def loss_of(model: nn.Module, step: int, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
    tokens = torch.randint(3, 131, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    tokens = tokens.chunk(num_ranks)[rank]
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def train_plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = fresh(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {fqn: param.detach() for fqn, param in model.named_parameters()}


def train_sharded(context: DistributedContext, name: str, wrapper: str, units: str) -> dict[str, Any]:
    model = SETTINGS[units](wrapper).shard(fresh(name), context)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        losses.append(update(optimizer, loss_of(model.module, step, context.rank, context.world_size), context))
    shards = model.local_shards()
    return {"losses": losses, "shards": {fqn: (s.start, s.data.clone(), s.writes) for fqn, s in shards.items()}}


def run_cases(context: DistributedContext) -> dict[tuple[str, str, str], dict[str, Any]]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    return {case: train_sharded(context, *case) for case in CASES}


@pytest.fixture(scope="module")
def results() -> list[dict[tuple[str, str, str], dict[str, Any]]]:
    return on_ranks(2, run_cases, timeout_seconds=300)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_training_equals_one_process(results: list[Any], case: tuple[str, str, str]) -> None:
    losses, weights = train_plain(case[0])
    ranks = [result[case] for result in results]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
    whole = assembled(ranks, {fqn: weight.shape for fqn, weight in weights.items()})
    for fqn, weight in weights.items():
        torch.testing.assert_close(whole[fqn], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "albert", "qwen3_vl", "mllama"])
def test_what_text_does_not_reach_has_no_gradient(name: str) -> None:
    model = fresh(name)
    loss_of(model, 0).backward()
    without = {fqn for fqn, param in model.named_parameters() if param.grad is None}
    assert unused_by_text(model) == without
    assert any(fqn.startswith("model.visual.blocks") for fqn in without) == (name == "qwen3_vl")
    assert any(fqn.startswith("model.language_model.layers.1.") for fqn in without) == (name == "mllama")


def test_layers_dropped_at_random_count_as_reached() -> None:
    """And the decoder of BartForCausalLM, whose wrapper is never called."""
    sizes: dict[str, Any] = {
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
    }
    config = transformers.BartConfig(vocab_size=131, d_model=32, decoder_layerdrop=0.5, **sizes)
    assert not unused_by_text(transformers.BartForCausalLM(config))


def test_an_expert_that_no_token_chose_counts_as_reached() -> None:
    model = fresh("switch")
    assert "encoder.block.1.layer.1.mlp.experts.expert_3.wi.weight" in dict(model.named_parameters())
    assert not unused_by_text(model)


def units_of(name: str, **settings: Any) -> list[str]:
    return [unit.fqn for unit in plan_units(fresh(name), Fsdp2Config(**settings))]


def test_modules_that_are_called_otherwise_are_no_units() -> None:
    assert units_of("squeezebert") == [""], "its layers' forward is called directly"
    assert units_of("reformer") == [""], "its layers compute again in a backward pass of their own"
    assert "model.layers.0.self_attn.q_proj" in units_of("llama", min_params=1)
    visual = [fqn for fqn in units_of("qwen3_vl", min_params=1) if "visual" in fqn]
    assert visual == ["model.visual.blocks.0", "model.visual.blocks.1"], "only text was run"


def test_a_backward_pass_of_its_own_is_refused_under_fsdp1() -> None:
    with pytest.raises(ConfigError, match=r"own backward pass computes reformer\.encoder\.layers\.0 again"):
        check_shardable(fresh("reformer"), Fsdp1Config(param_dtype="float32"))
    check_shardable(fresh("llama"), Fsdp1Config(param_dtype="float32"))


def test_experts_that_run_by_choice_are_no_units() -> None:
    units = units_of("switch", min_params=1)
    assert "encoder.block.0.layer.0.SelfAttention.q" in units
    lists = ["encoder.block.1.layer.1.mlp.experts", "decoder.block.1.layer.2.mlp.experts"]
    assert [fqn for fqn in units if "expert" in fqn] == lists


def test_a_model_that_converts_its_weights_names_the_dtype() -> None:
    wanted = "converts encoder.block.1.layer.1.mlp.router.classifier.weight to float32; set shard.param_dtype=float32"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        check_shardable(fresh("switch"), Fsdp2Config())
    check_shardable(fresh("switch"), Fsdp2Config(param_dtype="float32"))
    frozen = fresh("switch")
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(".experts." not in name)  # FSDP1 does not train experts that may not run
    check_shardable(frozen, Fsdp1Config())


def test_a_layer_that_all_share_is_a_block() -> None:
    repeated = [block.fqn for block in no_split_blocks(fresh("albert")) if block.repeated]
    assert repeated == ["albert.encoder.albert_layer_groups.0"]
    assert repeated[0] in units_of("albert")


def test_a_list_is_neither_a_block_nor_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("qwen3_vl")
    merger = "model.visual.deepstack_merger_list"
    assert merger not in {block.fqn for block in no_split_blocks(model)}
    assert f"{merger}.1" in {block.fqn for block in no_split_blocks(model)}
    monkeypatch.setattr(wrap_policy, "_OWN_UNIT_BYTES", 1)
    lists = {fqn for fqn, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    assert lists.isdisjoint(units_of("qwen3_vl"))


def test_the_model_is_left_as_it_was() -> None:
    model = fresh("llama")
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    state = torch.get_rng_state()
    trace = trace_forward(model)
    assert trace.is_complete
    assert trace.outside == {"model.layers"}
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    after = dict(model.named_parameters())
    assert all(id(after[name]) == number and torch.equal(after[name], old) for name, (number, old) in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
