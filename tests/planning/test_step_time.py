"""FLOPs of real training steps, the least time of a step, and measurements that others have published."""

from __future__ import annotations

import logging
import time
from copy import deepcopy
from dataclasses import replace
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AlbertConfig,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    ModernBertConfig,
    PretrainedConfig,
    PreTrainedModel,
    ViTConfig,
)

from fsdp_shard.config import OPTIONS
from fsdp_shard.data import IGNORE_INDEX
from fsdp_shard.models import ModelConfig, build_on_meta
from fsdp_shard.planning.costs.block_flops import Attention, CostPolynomial
from fsdp_shard.planning.costs.model_facts import ModelFacts, measured_costs, model_facts
from fsdp_shard.planning.costs.step_cost import StepCost, step_cost
from fsdp_shard.planning.costs.step_report import step_figures, step_report
from fsdp_shard.planning.costs.step_time import missing_figures, step_time
from fsdp_shard.planning.devices import Hardware
from fsdp_shard.planning.meta_model import build_planned
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.sharding import DdpConfig, Fsdp2Config, ShardConfig, recompute_blocks
from fsdp_shard.training import (
    OBJECTIVES,
    AdamWConfig,
    AdapterConfig,
    LoraConfig,
    TrainConfig,
    head_returns_loss,
    inject_lora,
    use_loss_head,
)
from fsdp_shard.utils import FakeTensorMode, replace_tensors
from tests.planning.device_presets import preset
from tests.support.mixtures import config as mixture_config
from tests.support.tiny import llama_config

LENGTH = 48
FLOAT32 = Fsdp2Config(param_dtype="float32")


def measured(
    config: PretrainedConfig,
    shard: ShardConfig = FLOAT32,
    adapter: AdapterConfig | None = None,
    model: ModelConfig | None = None,
) -> ModelFacts:
    model, adapter = model or ModelConfig(path="x"), adapter or AdapterConfig()
    stored, _ = build_planned(config, model, adapter, model.dtype, shard)
    return model_facts(config, stored, model, adapter, shard)


def cost_of(config: PretrainedConfig, facts: ModelFacts | None = None, **settings: Any) -> StepCost:
    run = PlannedRun(ModelConfig(path="x"), FLOAT32, TrainConfig(global_batch_size=1), AdamWConfig(), LENGTH, 1)
    run = replace(run, **settings)
    return step_cost(facts or measured(config, run.shard, run.adapter), run)


def counted(config: PretrainedConfig, shard: ShardConfig, adapter: AdapterConfig, target_length: int = LENGTH) -> int:
    """What torch's counter finds in a real training step, in attention without kernels of its own."""
    torch.manual_seed(0)
    build: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = build.from_config(deepcopy(config))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch does not count grouped products
    if isinstance(adapter, LoraConfig):
        inject_lora(model, adapter, "x", {})
        replace_tensors(model, lambda tensor: torch.randn(tensor.shape) if tensor.is_meta else tensor)
    recompute_blocks(model.train(), shard)
    tokens = torch.randint(0, 250, (1, LENGTH))
    labels = tokens[:, :target_length]
    both = {"decoder_input_ids": labels} if config.is_encoder_decoder else {}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(input_ids=tokens, use_cache=False, **both).logits
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return int(counter.get_total_flops())


def hidden_flops(cost: CostPolynomial, length: int, target_length: int) -> int:
    """FLOPs of the pairs that masks of attention hide, which others count."""
    all_pairs = (replace(found, is_causal=False, window=None) for found in cost.attention)
    all_flops = sum(found.flops(length, target_length) for found in all_pairs)
    return all_flops - sum(found.flops(length, target_length) for found in cost.attention)


GPT2 = GPT2Config(
    architectures=["GPT2LMHeadModel"], n_embd=36, n_layer=3, n_head=3, vocab_size=257, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0,
)  # fmt: skip
BLOOM = BloomConfig(
    architectures=["BloomForCausalLM"], hidden_size=32, n_layer=2, n_head=4, vocab_size=257, hidden_dropout=0.0
)
T5 = AutoConfig.for_model(
    "t5", architectures=["T5ForConditionalGeneration"], d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4,
    vocab_size=257, dropout_rate=0.0, decoder_start_token_id=0,
)  # fmt: skip
BART = BartConfig(
    architectures=["BartForConditionalGeneration"], d_model=32, encoder_layers=2, decoder_layers=3, vocab_size=257,
    encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=40, decoder_ffn_dim=48, dropout=0.0,
    decoder_start_token_id=0, max_position_embeddings=256,
)  # fmt: skip
BERT = BertConfig(
    architectures=["BertForMaskedLM"], hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=257,
    intermediate_size=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
LORA = LoraConfig(rank=2)


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True, 2, "selective"])
@pytest.mark.parametrize(
    ("config", "adapter"),
    [
        (llama_config(), AdapterConfig()),
        (llama_config(tied=False, layers=3), LORA),
        (mixture_config("mixtral"), AdapterConfig()),
        (mixture_config("qwen3_moe"), LoraConfig(rank=2, target_modules=["q_proj", "v_proj"])),
        (GPT2, AdapterConfig()),
        (BLOOM, AdapterConfig()),
        (T5, AdapterConfig()),
        (BART, AdapterConfig()),
    ],
    ids=["llama", "llama with lora", "mixtral", "qwen3_moe with lora", "gpt2", "bloom", "t5", "bart"],
)
def test_flops_are_those_of_a_real_step(config: Any, adapter: AdapterConfig, checkpointing: Any) -> None:
    target_length = 20 if config.is_encoder_decoder else LENGTH
    shard = Fsdp2Config(param_dtype="float32", activation_checkpointing=checkpointing)
    facts = measured(config, shard, adapter)
    assert facts.problem is None
    assert facts.costs is not None
    run = PlannedRun(ModelConfig(path="x"), shard, TrainConfig(global_batch_size=1), AdamWConfig(), LENGTH, 1, adapter)
    run = replace(run, target_length=target_length if config.is_encoder_decoder else None)
    planned = step_cost(facts, run).flops
    assert planned is not None
    costs = facts.costs
    recomputed = {True: list(costs.blocks), 2: list(costs.blocks)[1::2]}.get(checkpointing, [])
    passes = [costs.outside.forward, costs.outside.backward]
    for fqn, block in costs.blocks.items():
        passes += [block.forward, block.backward, *([block.recomputed] if fqn in recomputed else [])]
    hidden = sum(hidden_flops(cost, LENGTH, target_length) for cost in passes)
    real = counted(config, shard, adapter, target_length)
    print(f"planned {planned + hidden}, counted {real}, of which masks hide {hidden}")
    assert planned + hidden == real


@pytest.mark.long
def test_chunks_of_mamba_2_are_counted_beyond_the_first() -> None:
    """It pads a sequence to whole chunks, of 256 tokens."""
    config = Mamba2Config(
        architectures=["Mamba2ForCausalLM"], hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=2,
        state_size=16, vocab_size=257, chunk_size=256,
    )  # fmt: skip
    facts = measured(config)
    assert facts.costs is not None
    model = AutoModelForCausalLM.from_config(deepcopy(config))
    for length in (256, 512, 1024):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros((1, length), dtype=torch.long), use_cache=False)
        planned = sum(part.forward.at(length) for part in [facts.costs.outside, *facts.costs.blocks.values()])
        assert planned == counter.get_total_flops()


def masked_flops(config: PretrainedConfig, num_masked: int) -> int:
    """FLOPs of a real step of a masked language model whose head computes the loss."""
    model: Any = AutoModelForMaskedLM.from_config(deepcopy(config)).train()
    assert use_loss_head(model, True)
    tokens, chosen = torch.randint(0, 250, (1, LENGTH)), torch.arange(num_masked)
    labels = torch.full((1, LENGTH), IGNORE_INDEX)
    labels[0, chosen] = tokens[0, chosen]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        with head_returns_loss(model, labels, 1.0, chosen):
            loss = model(input_ids=tokens, use_cache=False).logits
        loss.backward(torch.ones_like(loss))
    of_weight_gradient = 2 * num_masked * model.get_output_embeddings().weight.numel()  # torch counts no addmm_
    return int(counter.get_total_flops()) + of_weight_gradient


@pytest.mark.parametrize("num_masked", [12, LENGTH])
def test_a_masked_model_computes_logits_of_what_is_masked_only(num_masked: int) -> None:
    model = ModelConfig(path="x", task="masked_lm", chunked_loss=True)
    facts = measured(BERT, model=model)
    cost = cost_of(BERT, facts, model=model, mask_fraction=num_masked / LENGTH)
    assert cost.flops == masked_flops(BERT, num_masked)
    assert cost.tokens == num_masked
    whole = replace(model, chunked_loss=False)
    all_logits = cost_of(BERT, measured(BERT, model=whole), model=whole, mask_fraction=num_masked / LENGTH).flops
    assert all_logits == masked_flops(BERT, LENGTH)


@pytest.mark.long
def test_a_mixture_whose_experts_are_adapted_can_be_measured() -> None:
    """peft asks for the device of a factor, which must be one that computes."""
    facts, plain = (measured(mixture_config("qwen3_moe"), FLOAT32, adapter) for adapter in (LORA, AdapterConfig()))
    assert facts.problem is None
    assert (cost_of(plain.config, facts).model_flops or 0) > 0
    assert facts.costs is not None
    assert plain.costs is not None
    for fqn, block in facts.costs.blocks.items():
        assert block.forward.at(LENGTH) > plain.costs.blocks[fqn].forward.at(LENGTH)


def test_a_mask_hides_what_no_query_attends_to() -> None:
    pairs = [(query, key) for query in range(10) for key in range(10)]
    causal = sum(key <= query for query, key in pairs)
    window = sum(query - 4 < key <= query for query, key in pairs)
    sizes = (2, 1), (8, 8)
    assert Attention(3, True, None, None, *sizes).flops(10, 10) == 3 * causal
    assert Attention(3, True, 4, None, *sizes).flops(10, 10) == 3 * window
    chunks = sum(key <= query and key // 4 == query // 4 for query, key in pairs)
    assert Attention(3, True, None, 4, *sizes).flops(10, 10) == 3 * chunks
    assert Attention(3, True, None, 40, *sizes).flops(10, 10) == 3 * causal
    assert Attention(3, True, 40, None, *sizes).flops(10, 10) == 3 * causal
    assert Attention(3, False, None, None, *sizes).flops(10, 10) == 300
    assert Attention(3, False, 4, None, *sizes).flops(10, 10) == 3 * sum(abs(query - key) < 4 for query, key in pairs)
    assert Attention(3, False, 40, None, *sizes).flops(10, 10) == 300
    assert Attention(3, False, None, None, *sizes, in_decoder=(True, False)).flops(10, 4) == 120
    assert Attention(3, True, None, None, *sizes, in_decoder=(True, True)).flops(10, 4) == 30


SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
MISTRAL: dict[str, Any] = SHAPE | {"architectures": ["MistralForCausalLM"]}
MODERN_BERT: dict[str, Any] = SHAPE | {
    "architectures": ["ModernBertForMaskedLM"],
    "intermediate_size": 48,
    "global_attn_every_n_layers": 2,
}
LLAMA4: dict[str, Any] = SHAPE | {
    "architectures": ["Llama4ForCausalLM"], "intermediate_size_mlp": 64, "num_local_experts": 2,
    "layer_types": ["full_attention", "chunked_attention"],
}  # fmt: skip
# Model -> configs of little attention and of all, in its second layer or in every layer.
MASKED_LAYERS: dict[str, tuple[PretrainedConfig, PretrainedConfig]] = {
    "window": (MistralConfig(sliding_window=8, **MISTRAL), MistralConfig(sliding_window=None, **MISTRAL)),
    "window on both sides": (
        ModernBertConfig(local_attention=8, **MODERN_BERT), ModernBertConfig(local_attention=2 * LENGTH, **MODERN_BERT),
    ),
    "chunks": (Llama4TextConfig(attention_chunk_size=8, **LLAMA4), Llama4TextConfig(attention_chunk_size=48, **LLAMA4)),
}  # fmt: skip


def test_a_block_counts_as_often_as_it_is_called() -> None:
    """ALBERT has one block in place of its layers."""
    sizes: dict[str, Any] = {"hidden_size": 32, "embedding_size": 16, "num_attention_heads": 4, "vocab_size": 257}
    flops = []
    for num_layers in (1, 3):
        config = AlbertConfig(architectures=["AlbertForMaskedLM"], num_hidden_layers=num_layers, **sizes)
        costs = measured(config).costs
        assert costs is not None
        (block,) = costs.blocks.values()
        flops.append((block.forward.at(LENGTH), block.backward.at(LENGTH)))
    assert flops[1] == tuple(3 * number for number in flops[0])


@pytest.mark.parametrize("name", MASKED_LAYERS)
def test_layers_with_masks_count_the_pairs_they_allow(name: str) -> None:
    flops = []
    for config in MASKED_LAYERS[name]:
        costs = measured(config).costs
        assert costs is not None
        flops.append([costs.blocks[f"model.layers.{number}"].forward.at(LENGTH) for number in range(2)])
    (first, second), (first_of_all, second_of_all) = flops
    assert second < second_of_all
    assert (first < first_of_all) == (name == "window"), "the first layer of the others attends to all"


def test_flops_follow_the_batch_and_the_ranks() -> None:
    config, facts = llama_config(), measured(llama_config())
    one = cost_of(config, facts).flops or 0
    assert cost_of(config, facts, train=TrainConfig(global_batch_size=8, micro_batch_size=2)).flops == 8 * one
    assert cost_of(config, facts, train=TrainConfig(global_batch_size=8), num_ranks=4).flops == 2 * one
    pairs: Any = OBJECTIVES["dpo"]
    both = cost_of(config, facts, objective=pairs(reference="sharded"))
    alone = cost_of(config, facts, objective=pairs())
    assert (alone.flops, alone.tokens) == (2 * one, 2 * LENGTH)
    assert facts.costs is not None
    passes = [facts.costs.outside, *facts.costs.blocks.values()]
    forward = sum(block.forward.at(LENGTH) for block in passes)
    assert (both.flops or 0) - 2 * one == 2 * forward
    labeled: Any = OBJECTIVES["kto"]  # which runs another answer of each sample without gradients
    assert cost_of(config, facts, objective=labeled()).flops == one + forward
    compared = cost_of(config, facts, objective=labeled(reference="sharded"))
    assert (compared.flops, compared.model_flops) == (one + 3 * forward, one)
    divided = cost_of(config, facts, shard=Fsdp2Config(param_dtype="float32", context_parallel=2), num_ranks=2)
    assert (divided.flops, divided.tokens) == (one // 2, LENGTH)


def test_of_packed_documents_the_least_is_counted() -> None:
    """Their lengths are not known: documents of one token attend to least."""
    config = llama_config()
    facts = measured(config)
    packed, whole = cost_of(config, facts, is_packed=True), cost_of(config, facts)
    tokens = TrainConfig(global_batch_size=LENGTH, micro_batch_size=LENGTH)
    apart = cost_of(config, facts, train=tokens, sequence_length=1)
    assert (packed.flops, packed.model_flops) == (apart.flops, apart.model_flops)
    assert (packed.flops or 0) < (whole.flops or 0)
    texts = [step_report(cost, preset("h100")) for cost in (packed, whole)]
    assert ["FLOPs on each rank, as attention keeps" in text for text in texts] == [True, False]


def test_a_checkpoint_and_what_moves() -> None:
    config, facts = llama_config(tied=False), measured(llama_config(tied=False))
    numbers = sum(param.numel() for param in facts.model.parameters())
    plain = cost_of(config, facts).checkpoint
    steps = 4 * len(facts.params)
    assert (plain.weights_bytes, plain.optimizer_bytes, plain.average_bytes) == (4 * numbers, 8 * numbers + steps, 0)
    averaged = cost_of(config, facts, train=TrainConfig(global_batch_size=1, ema_decay=0.9)).checkpoint
    assert averaged.average_bytes == 4 * numbers
    assert cost_of(config, facts, optim=OPTIONS["optim"]["adafactor"]()).checkpoint.optimizer_bytes < numbers
    adapted = cost_of(config, None, adapter=LORA).checkpoint
    trained = adapted.weights_bytes // 4
    assert trained == 2 * 2 * (72 + 48 + 48 + 72 + 3 * 121)
    assert adapted.base_bytes == 4 * numbers
    offloaded = Fsdp2Config(param_dtype="float32", cpu_offload=True)
    moved = cost_of(config, facts, shard=offloaded, num_ranks=1)
    layer = 2 * (36 * 36 * 2 + 12 * 36 * 2 + 3 * 85 * 36 + 72)
    assert moved.to_device_bytes == 4 * (numbers + layer)  # layers are gathered twice, the root once
    assert moved.to_host_bytes == 4 * numbers
    assert moved.memory_bytes < cost_of(config, facts).memory_bytes
    again = Fsdp2Config(param_dtype="float32", activation_checkpointing=True)
    assert cost_of(config, facts, shard=again).memory_bytes > cost_of(config, facts).memory_bytes
    kept = Fsdp2Config(param_dtype="float32", activation_offload=True)
    whole = cost_of(config, facts, shard=kept)
    inputs = cost_of(config, facts, shard=replace(kept, activation_checkpointing=True))
    assert whole.to_host_bytes == whole.to_device_bytes > inputs.to_host_bytes >= 2 * LENGTH * 36 * 4


def test_torch_logs_no_traceback_of_a_model_that_cannot_run() -> None:
    """What is wrong is in the plan."""
    handler = BufferingHandler(1000)

    def build() -> PreTrainedModel:
        model = build_on_meta(llama_config(), "float32")
        model.get_submodule("model.layers.0.mlp.down_proj").weight = nn.Parameter(torch.empty(3, 3, device="meta"))
        return model

    logger = logging.getLogger(FakeTensorMode.__module__)
    logger.addHandler(handler)
    try:
        costs, problem = measured_costs(build)
    finally:
        logger.removeHandler(handler)
    assert (costs, problem is None, handler.buffer) == (None, False, [])


def test_what_cannot_run_on_text_has_no_flops() -> None:
    config = ViTConfig(
        architectures=["ViTForImageClassification"], hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=40, image_size=32, patch_size=8,
    )  # fmt: skip
    cost = cost_of(config, num_ranks=2)
    assert (cost.flops, step_time(cost, preset("h100"))) == (None, None)
    assert cost.sent_bytes > 0
    assert "FLOPs could not be counted" in step_report(cost, preset("h100"))


# The figures of a made-up device are round numbers, so that each bound can be seen.
DEVICE = Hardware(
    fp32_flops=1e9, bf16_flops=2e9, tf32_flops=4e9, memory_bandwidth="1GB", link_bandwidth="1GB",
    network_bandwidth="100MB", host_bandwidth="1GB", num_per_machine=2, disk_write_bandwidth="1MB",
    disk_read_bandwidth="2MB",
)  # fmt: skip


def test_the_slowest_part_is_the_bound() -> None:
    config, facts = llama_config(tied=False), measured(llama_config(tied=False))
    one = cost_of(config, facts)
    found = step_time(one, DEVICE)
    assert found is not None
    assert (found.bound_by, found.seconds) == ("compute", (one.flops or 0) / 1e9)
    assert found.hardware_flops_utilization == 1.0
    assert found.tokens_per_second == LENGTH / found.seconds
    assert found.tokens_per_day == 86_400 * found.tokens_per_second
    assert found.run_days == pytest.approx(100 * found.seconds / 86_400)
    assert found.write_seconds == one.checkpoint.total_bytes / 1e6
    assert found.resume_seconds == one.checkpoint.total_bytes / 2e6
    assert {name for name, seconds in found.parts.items() if seconds} == {"compute", "memory"}
    four = cost_of(config, facts, num_ranks=4, train=TrainConfig(global_batch_size=4))
    for figure, name in (("network_bandwidth", "network"), ("link_bandwidth", "links"), ("memory_bandwidth", "memory")):
        changed: dict[str, Any] = {figure: "10kB"}
        slow = step_time(four, replace(DEVICE, **changed))
        assert slow is not None
        assert slow.bound_by == name
        assert slow.hardware_flops_utilization < 0.1
    halves = step_time(four, DEVICE)
    assert halves is not None
    assert halves.write_seconds == pytest.approx(found.write_seconds / 2)
    ddp = step_time(
        cost_of(config, facts, num_ranks=4, shard=DdpConfig(), train=TrainConfig(global_batch_size=4)), DEVICE
    )
    assert ddp is not None
    assert ddp.write_seconds == pytest.approx(found.write_seconds / 2), "ranks divide the writing"
    assert ddp.resume_seconds == found.resume_seconds, "and each machine reads all"
    with_tf32 = step_time(cost_of(config, facts, train=TrainConfig(global_batch_size=1, tf32=True)), DEVICE)
    assert with_tf32 is not None
    assert with_tf32.parts["compute"] == found.parts["compute"] / 4
    epochs = step_time(cost_of(config, facts, train=TrainConfig(global_batch_size=1, epochs=1.0)), DEVICE)
    assert epochs is not None
    assert epochs.run_days is None


def test_what_is_not_known_gives_no_time() -> None:
    config, facts = llama_config(tied=False), measured(llama_config(tied=False))
    unknown = Hardware()
    assert missing_figures(cost_of(config, facts), unknown) == ["fp32_flops", "memory_bandwidth"]
    four = cost_of(config, facts, num_ranks=4, train=TrainConfig(global_batch_size=4))
    assert missing_figures(four, replace(DEVICE, network_bandwidth=None)) == ["network_bandwidth"]
    assert missing_figures(four, replace(DEVICE, network_bandwidth=None, num_per_machine=4)) == []
    offloaded = cost_of(config, facts, shard=Fsdp2Config(param_dtype="float32", cpu_offload=True))
    assert missing_figures(offloaded, replace(DEVICE, host_bandwidth=None)) == ["host_bandwidth"]
    text = step_report(four, unknown)
    assert "too little is known of the device (device.fp32_flops, device.memory_bandwidth, " in text
    assert "tokens/s" not in text
    assert "all-gather" in text
    assert step_figures(four, unknown)["time"] is None


LLAMA_8B = LlamaConfig(
    architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
)  # fmt: skip
MPT_70B = GPT2Config(
    architectures=["GPT2LMHeadModel"], n_embd=8192, n_layer=80, n_head=64, vocab_size=50368, n_positions=2048
)
# Name, model, length, GPUs, global and micro batch, recomputation; tokens per second and GPU, and the MFU, from to.
# Of torchtitan (benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, and what is said above them), and of
# llm-foundry (scripts/train/benchmarking/README.md, table H100 80GB BF16).
PUBLISHED: list[tuple[str, PretrainedConfig, int, int, int, int, Any, int, tuple[float, float]]] = [
    ("torchtitan, Llama 3.1 8B", LLAMA_8B, 8192, 8, 16, 2, "selective", 5762, (0.33, 0.39)),
    ("torchtitan, compiled", LLAMA_8B, 8192, 8, 16, 2, "selective", 6667, (0.33, 0.39)),
    ("torchtitan, 128 GPUs", LLAMA_8B, 8192, 128, 256, 2, "selective", 5605, (0.33, 0.39)),
    ("torchtitan, 128 GPUs, compiled", LLAMA_8B, 8192, 128, 256, 2, "selective", 6514, (0.33, 0.39)),
    ("llm-foundry, MPT 70B", MPT_70B, 2048, 64, 2048, 8, True, 1039, (0.4257, 0.4257)),
    ("llm-foundry, MPT 70B, 32 GPUs", MPT_70B, 2048, 32, 1024, 2, True, 882, (0.3615, 0.3615)),
]


@pytest.mark.long
@pytest.mark.parametrize("published", PUBLISHED, ids=lambda row: row[0])
def test_no_published_measurement_is_faster_than_the_bound(published: Any) -> None:
    name, config, length, num_ranks, batch, micro_batch, checkpointing, tokens_per_second, (least, most) = published
    facts = measured(config, Fsdp2Config())
    cost = cost_of(
        config,
        facts,
        shard=Fsdp2Config(activation_checkpointing=checkpointing),
        train=TrainConfig(global_batch_size=batch, micro_batch_size=micro_batch),
        sequence_length=length,
        num_ranks=num_ranks,
    )
    found = step_time(cost, preset("h100"))
    assert found is not None
    ratio = found.tokens_per_second / num_ranks / tokens_per_second
    # Of what was published, attention counts all pairs of tokens.
    assert facts.costs is not None
    of_tokens = sum(
        hidden_flops(each, length, length)
        for block in facts.costs.blocks.values()
        for each in (block.forward, block.backward)
    )
    assert cost.model_flops is not None
    all_pairs = 1 + of_tokens * batch / num_ranks / cost.model_flops
    ours = all_pairs * found.model_flops_utilization / ratio
    print(f"{name}: bound {ratio:.2f} x what was measured; MFU {ours:.4f}, published {least} to {most}")
    assert 1.0 < ratio < 4.0
    assert 0.99 * least < ours < 1.01 * most


def test_a_search_can_ask_for_thousands() -> None:
    """Not of the clock: no measurement is repeated, and a cost of 4,096 ranks has no more terms than one of 8."""
    facts = measured(LLAMA_8B, Fsdp2Config())
    few, many = (
        cost_of(LLAMA_8B, facts, shard=Fsdp2Config(), num_ranks=ranks, train=TrainConfig(global_batch_size=ranks))
        for ranks in (8, 4096)
    )
    assert len(few.traffic) == len(many.traffic)
    assert facts.units(Fsdp2Config()) is facts.units(Fsdp2Config(reshard_after_forward=False))
    start = time.perf_counter()
    cost_of(LLAMA_8B, facts, shard=Fsdp2Config(), num_ranks=64, train=TrainConfig(global_batch_size=64))
    print(f"{1e3 * (time.perf_counter() - start):.1f} ms")


@pytest.mark.parametrize("length", [64, 8192])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapter", [AdapterConfig(), LORA], ids=["full", "lora"])
def test_no_share_of_the_peak_is_more_than_all_of_it(length: int, checkpointing: bool, adapter: AdapterConfig) -> None:
    """However long the sequences are: what a causal mask hides is in no time, and so in no utilization either."""
    shard, train = replace(FLOAT32, activation_checkpointing=checkpointing), TrainConfig(global_batch_size=1, steps=1)
    cost = cost_of(llama_config(), shard=shard, adapter=adapter, sequence_length=length, train=train)
    found = step_time(cost, DEVICE)
    assert found is not None
    assert found.bound_by == "compute"
    assert 0.0 < found.model_flops_utilization <= found.hardware_flops_utilization == 1.0
    assert (found.model_flops_utilization == 1.0) is not checkpointing
    lines = step_report(cost, DEVICE).splitlines()
    assert lines[-3].endswith(f"MFU {found.model_flops_utilization:.0%}, HFU 100%.")
    assert lines[-2].startswith("The step takes at least")
