"""The planned memory of dispatched generation against what tensors take while it runs, 0 to +5 %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

from fsdp_shard.inference import (
    DispatchConfig,
    KVCacheBudget,
    inject_adapters,
    load_dispatched,
    locate_adapters,
    model_from_config,
    plan_dispatch,
)
from fsdp_shard.planning.generation_plan import plan_generation
from tests.support.live_bytes import LiveBytes
from tests.support.runs import run_recipe
from tests.support.tiny import save_adapter

_HEADS: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 320, "head_dim": 32,
    "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
_MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(num_hidden_layers=6, **_HEADS),
    "gpt2": GPT2Config(n_embd=128, n_layer=5, n_head=4, vocab_size=600, n_positions=512),
    "gemma3": Gemma3TextConfig(num_hidden_layers=14, sliding_window=32, **_HEADS),
    "mixtral": MixtralConfig(num_hidden_layers=5, num_local_experts=4, num_experts_per_tok=2, **_HEADS),
    "t5": AutoConfig.for_model(
        "t5", d_model=128, d_kv=32, d_ff=256, num_layers=5, num_heads=4, vocab_size=512, decoder_start_token_id=0
    ),
    "t5 of many words": AutoConfig.for_model(
        "t5", d_model=128, d_kv=32, d_ff=256, num_layers=5, num_heads=4, vocab_size=8000, decoder_start_token_id=0
    ),
}


def saved(name: str, directory: Path) -> PretrainedConfig:
    """Save a model with random weights; return its config."""
    kind = AutoModelForSeq2SeqLM if name.startswith("t5") else AutoModelForCausalLM
    kind.from_config(_MODELS[name]).float().save_pretrained(directory)
    return AutoConfig.from_pretrained(directory)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "device_map", "dtype", "rows", "length"),
    [
        ("llama", "cpu", "keep", 2, 128),
        pytest.param("llama", "cpu", "keep", 1, 256, marks=pytest.mark.slow),
        ("llama", "disk", "bfloat16", 2, 128),  # whose blocks are cast into buffers
        pytest.param("gpt2", "cpu", "keep", 4, 128, marks=pytest.mark.slow),
        pytest.param("gemma3", "cpu", "keep", 2, 100, marks=pytest.mark.slow),
        ("t5", "cpu", "keep", 2, 24),
        ("t5 of many words", "cpu", "keep", 4, 64),
        ("mixtral", "cpu", "keep", 2, 128),
        pytest.param("mixtral", "cpu", "bfloat16", 2, 128, marks=pytest.mark.slow),
        pytest.param("mixtral", "disk", "bfloat16", 2, 128, marks=pytest.mark.slow),
    ],
)
def test_generation_takes_what_was_planned(
    name: str, device_map: str, dtype: str, rows: int, length: int, tmp_path: Path
) -> None:
    config = saved(name, tmp_path / "model")
    budgets = {"cpu": "1GB"} if device_map == "disk" else None
    settings, budget = DispatchConfig(device_map, budgets, dtype), KVCacheBudget(rows, length)
    devices = plan_dispatch(model_from_config(config, settings), settings, budget)[1]
    planned = plan_generation(model_from_config(config, settings), devices, budget)
    assert planned.problem is None
    new = length if name.startswith("t5") else 4
    ids = torch.randint(5, 500, (rows, length if name.startswith("t5") else length - new))
    mask = torch.ones_like(ids)
    mask[1:, : 7 if not name.startswith("t5") else 0] = 0
    model = load_dispatched(tmp_path / "model", device_map, budgets, dtype)
    with LiveBytes() as live:
        model.generate(ids[:, :8], max_new_tokens=2)  # so that all weights are known
        live.reset()
        model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new)
    assert 1.0 <= planned.peak_bytes["cpu"] / live.most <= 1.05, (planned.peaks, live.most)


@pytest.mark.long
def test_the_command_shows_the_peak_of_generation(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model")
    given = [f"model.path={tmp_path / 'model'}", "data.sequence_length=64", "dispatch.device_map=cpu"]
    ended = run_recipe("plan", tmp_path / "run", *given)
    assert ended.status == 0, ended.err
    generation = ended.result["dispatch"]["generation"]
    assert [snapshot["phase"] for snapshot in generation["peaks"]["cpu"]] == ["load", "prefill", "logits", "decode"]
    assert generation["peak_bytes"]["cpu"] == max(sum(m["terms"].values()) for m in generation["peaks"]["cpu"])
    assert "Generation of 1 text of 64 tokens takes up to" in ended.out
    assert "adapters" not in ended.out
    less = f"dispatch.max_memory={{cpu: {generation['peak_bytes']['cpu'] - 1}}}"
    limited = run_recipe("plan", tmp_path / "limited", *given, less)
    assert "of dispatch.max_memory on cpu." in limited.out
    save_adapter(tmp_path / "adapter", tmp_path / "model")
    adapted = run_recipe("plan", tmp_path / "adapted", *given, f"adapters={{one: {tmp_path / 'adapter'}}}")
    assert adapted.status == 0, adapted.err
    (before, *_), (load, *_) = generation["peaks"]["cpu"], adapted.result["dispatch"]["generation"]["peaks"]["cpu"]
    assert load["terms"] == before["terms"] | {"adapters": 4 * 6 * 2 * (128 + 128 + 320 + 128)}
    peak = adapted.result["dispatch"]["generation"]["peak_bytes"]["cpu"]
    for budget, is_enough in ((peak, True), (peak - 1, False)):
        limits = [f"adapters={{one: {tmp_path / 'adapter'}}}", f"dispatch.max_memory={{cpu: {budget}}}"]
        planned = run_recipe("plan", tmp_path / f"of-{budget}", *given, *limits)
        assert ("of dispatch.max_memory on cpu." not in planned.out) == is_enough, planned.out
    refused = run_recipe("plan", tmp_path / "refused", *given[:2], f"adapters={{one: {tmp_path / 'adapter'}}}")
    assert refused.status == 2
    assert "add dispatch.device_map=auto" in refused.err


def test_the_cache_of_a_vision_language_model_is_where_its_decoder_is() -> None:
    text = {**_HEADS, "num_hidden_layers": 4, "sliding_window": 16}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=1
    )
    config.architectures, config.dtype = ["Gemma3ForConditionalGeneration"], torch.float32
    parts = {"model.vision_tower": 1, "model.multi_modal_projector": 1, "model.language_model": 0, "lm_head": 0}
    settings, budget = DispatchConfig(parts, {0: "4GB", 1: "4GB", "cpu": "4GB"}, "keep"), KVCacheBudget(4, 96)
    devices = plan_dispatch(model_from_config(config, settings), settings, budget)[1]
    assert devices.cache_bytes == {0: 4 * (2 * 2 * 32 * 4 * 4 * 96)}, "of the four layers of the text model"
    planned = plan_generation(model_from_config(config, settings), devices, budget)
    assert planned.problem is None
    caches = {device: max(each.terms.get("KV cache", 0) for each in found) for device, found in planned.peaks.items()}
    assert caches["cuda:0"] > 0
    assert caches["cuda:1"] == 0


def test_a_quantized_plan_says_what_it_lacks() -> None:
    config, budget = _MODELS["llama"], KVCacheBudget(2, 128)
    plans = []
    for quantize in ("none", "int8"):
        settings = DispatchConfig("cpu", {"cpu": "1GB"}, "bfloat16", quantize=quantize)
        devices = plan_dispatch(model_from_config(config, settings), settings, budget)[1]
        plans.append(plan_generation(model_from_config(config, settings), devices, budget, quantize=quantize))
    (load, *others), (quantized, *others_quantized) = (plan.peaks["cpu"] for plan in plans)
    saved = load.terms["weights"] - quantized.terms["weights"]
    per_layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 320
    assert saved == 6 * (per_layer - 2 * (2 * 128 + 2 * 64 + 2 * 320 + 128)) + 512 * 128 - 2 * 512  # and the head
    for one, two in zip(others, others_quantized, strict=True):
        assert one.terms["activations"] == two.terms["activations"]
    text = plans[1].describe(budget)
    assert "the peaks exclude memory for quantizing while weights load, and temporary copies of a weight" in text
    assert "(up to 128 KiB)." in text
    assert "peaks exclude" not in plans[0].describe(budget)


@pytest.mark.parametrize(
    ("device_map", "dtype"),
    [("cpu", "keep"), pytest.param("disk", "bfloat16", marks=pytest.mark.slow)],
)
def test_adapters_take_what_was_planned(device_map: str, dtype: str, tmp_path: Path) -> None:
    config, budget = saved("llama", tmp_path / "model"), KVCacheBudget(2, 128)
    found = {}
    for name in ("one", "two"):
        save_adapter(tmp_path / name, tmp_path / "model")
        found[name] = str(tmp_path / name)
    budgets = {"cpu": "1GB"} if device_map == "disk" else None
    settings = DispatchConfig(device_map, budgets, dtype)
    devices, planned_model = (
        plan_dispatch(model_from_config(config, settings), settings, budget)[1],
        model_from_config(config, settings),
    )
    inject_adapters(planned_model, locate_adapters(found))
    planned = plan_generation(planned_model, devices, budget)
    assert planned.problem is None
    ids = torch.randint(5, 500, (2, 124))
    mask = torch.ones_like(ids)
    mask[1:, :7] = 0
    model = load_dispatched(tmp_path / "model", device_map, budgets, dtype, adapters=found)
    with LiveBytes() as live:
        for name in found:
            model.set_adapter(name)
            model.generate(ids[:, :8], max_new_tokens=2)  # so that all weights are known
        live.reset()
        model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4)
    assert 1.0 <= planned.peak_bytes["cpu"] / live.most <= 1.05, (planned.peaks, live.most)
