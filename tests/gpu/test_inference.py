"""Inference on one GPU: models that come and go, weights that are streamed from the CPU, and the speed of tokens."""

from __future__ import annotations

import gc
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import fsdp_shard as fs
from fsdp_shard.inference import (
    Decoder,
    DispatchConfig,
    GenerateSettings,
    GenerationSettings,
    KVCacheBudget,
    complete_prompts,
    device_name,
    load_dispatched,
    model_from_config,
    plan_dispatch,
)
from fsdp_shard.models import build_on_meta, kv_cache_of
from fsdp_shard.planning import plan_generation
from fsdp_shard.utils import empty_pages, lock_pages
from tests.gpu.child import Bench, in_turn
from tests.gpu.device import IS_REHEARSAL, Device, open_device, resident_bytes
from tests.gpu.models import config_of, loaded_by_transformers, random_model, written
from tests.support.tiny import byte_tokenizer

check = pytest.mark.check
MB = 1_000_000
_HERE: Any = "cpu" if IS_REHEARSAL else 0  # where the model computes
_THERE = "disk" if IS_REHEARSAL else "cpu"  # from where weights are streamed to it


def _streaming(layers: range) -> dict[str, Any]:
    return {"*": _HERE, **{f"model.layers.{number}": _THERE for number in layers}}


def _prompt(device: Device, rows: int = 1, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(0)).to(device.torch_device)


def come_and_go(path: str, times: int) -> tuple[float, float]:
    """Load a model that is on the GPU and the CPU, use and delete it, `times` times: growth of both memories, bytes."""
    device = open_device()
    marks = []
    for number in range(times):
        model = load_dispatched(path, _streaming(range(2, 4)))
        with torch.inference_mode():
            assert bool(model(_prompt(device)).logits.isfinite().all())
        del model
        gc.collect()
        device.reset()
        if number in (times // 4, times - 1):  # libraries allocate in the first ones
            marks.append((device.used_bytes, resident_bytes()))
    (used, resident), (used_later, resident_later) = marks
    return used_later - used, resident_later - resident


@check(seconds=60, concurrent="none")
def test_models_on_gpu_and_cpu_come_and_go(bench: Bench) -> None:
    path = str(written(bench.directory, "1.2B", 4, bench.device.torch_device))
    times = bench.size(20, 4)
    on_gpu, on_cpu = come_and_go(path, times)
    bench.record(f"GPU memory kept after {times} models", on_gpu / MB, "MB", at_most=200)
    bench.record(f"CPU memory kept after {times} models", on_cpu / MB, "MB", at_most=200)


def greedy(path: str, device_map: dict[str, Any], num_tokens: int) -> list[int]:
    """Most likely tokens; before each pass, memory that is free on the GPU is filled with NaN."""
    device = open_device()
    model = load_dispatched(path, device_map)
    ids, cache, tokens = _prompt(device), dict[str, Any](), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(ids, **cache, use_cache=True)
            cache, ids = kv_cache_of(output), output.logits[:, -1].argmax(-1, keepdim=True)
            del output
            tokens.append(ids)
            _refill(device)
    return torch.cat(tokens, 1)[0].tolist()


def _refill(device: Device) -> None:
    """What was freed too early has other values from now on."""
    sizes = [1 << power for power in range(10, 13 if IS_REHEARSAL else 28)]
    blocks = [torch.full((size // 4,), float("nan"), device=device.torch_device) for size in sizes for _ in range(2)]
    del blocks


@check(seconds=150, concurrent="all")
def test_tokens_of_streamed_weights_are_right(bench: Bench) -> None:
    path, count = str(bench.directory / "1.2B-8"), bench.size(200, 6)
    streamed = _streaming(range(1, bench.size(7, 3)))
    write = (written, bench.directory, "1.2B", 8, bench.device.torch_device)
    _, expected, found = in_turn(write, (greedy, path, {"*": _HERE}, count), (greedy, path, streamed, count))
    wrong = sum(one != other for one, other in zip(found, expected, strict=True))
    bench.record(f"wrong tokens of {count} streamed ones", wrong, "tokens", at_most=0, exact=True)


_KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {}),
    "top-p batch 8": (8, {"do_sample": True, "top_p": 0.9, "top_k": 0}),
}


def generation_speeds(directory: str, num_tokens: int) -> dict[str, tuple[float, float]]:
    """Tokens per second of each of `_KINDS`: by transformers, before and after ours, and ours.

    Each side has generated before, but from prompts of another length, as those of users are.
    """
    device = open_device()
    model = random_model(config_of("8B"), torch.bfloat16, device.torch_device)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 256

    def by_transformers(rows: int, options: dict[str, Any], length: int) -> float:
        ids = _prompt(device, rows, length)
        device.synchronize()
        began = time.perf_counter()
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **options)
        device.synchronize()
        return float(rows * (found.shape[1] - ids.shape[1]) / (time.perf_counter() - began))

    path = Path(directory) / "8B-whole"
    warm, *lengths = (128 * number for number in range(1, 5))
    for each in _KINDS.values():
        by_transformers(*each, warm)
    before = {kind: by_transformers(*each, lengths[0]) for kind, each in _KINDS.items()}
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    ours = {}
    prompts = path / "prompts.jsonl"
    for kind, length in itertools.product(_KINDS, (warm, lengths[1])):
        rows, options = _KINDS[kind]
        prompts.write_text("".join(json.dumps({"prompt": f"{number}" * length}) + "\n" for number in range(rows)))
        settings = GenerateSettings(
            checkpoint=str(path),
            prompts=str(prompts),
            dispatch=DispatchConfig(device_map={"*": _HERE}),
            generation=GenerationSettings(max_new_tokens=num_tokens, batch_size=rows, **options),
        )
        ours[kind] = float(complete_prompts(settings, None, 0)["tokens_per_second"])
        gc.collect()
        device.reset()
    after = {kind: by_transformers(*each, lengths[2]) for kind, each in _KINDS.items()}
    return {kind: ((before[kind] + after[kind]) / 2, ours[kind]) for kind in _KINDS}


@check(seconds=150)
def test_tokens_per_second_beside_transformers(bench: Bench) -> None:
    speeds = generation_speeds(str(bench.directory), bench.size(64, 4))
    for kind, (theirs, ours) in speeds.items():
        note = f"{ours:.1f} tokens/s"
        bench.record(f"8B {kind}: tokens/s of transformers", ours / theirs, "x", at_least=0.95, note=note)


_PLANNED: dict[str, tuple[dict[str, Any], str]] = {
    "resident": ({"*": _HERE}, "none"),
    "streamed": (_streaming(range(1, 3 if IS_REHEARSAL else 7)), "none"),
    "int8": ({"*": _HERE}, "int8"),
    "int4": ({"*": _HERE}, "int4"),
}


def generation_peak(path: str, device_map: dict[str, Any], quantize: str, budget: KVCacheBudget) -> tuple[int, int]:
    """The planned and the measured peak of loading a model and drawing tokens with it, bytes on the GPU."""
    device = open_device()
    before = device.reset()
    memory = {_HERE: "8GB"} | ({_THERE: "8GB"} if _THERE in device_map.values() and _THERE != "disk" else {})
    settings = DispatchConfig(device_map, memory, "bfloat16", quantize=quantize)
    config = AutoConfig.from_pretrained(path)
    devices = plan_dispatch(model_from_config(config, settings), settings, budget)[1]
    plan = plan_generation(model_from_config(config, settings), devices, budget, quantize=quantize)
    assert plan.problem is None, plan.problem
    model = load_dispatched(path, device_map, memory, "bfloat16", quantize=quantize)
    new = budget.num_tokens // 8
    ids = _prompt(device, budget.batch_size, budget.num_tokens - new)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_p": 0.9}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return plan.peak_bytes[device_name(_HERE)], device.peak_bytes - before


@check(seconds=150, concurrent="all")
def test_the_plan_of_generation_beside_the_measured_peak(bench: Bench) -> None:
    path = str(written(bench.directory, "1.2B", 8, bench.device.torch_device))
    budget = KVCacheBudget(bench.size(4, 2), bench.size(1024, 64))
    for name, (device_map, quantize) in _PLANNED.items():
        if quantize != "none" and not bench.has(f"plan of generation, {name}", "torchao"):
            continue
        ((planned, measured),) = in_turn((generation_peak, path, device_map, quantize, budget))
        note = f"{measured / 1e9:.3f} GB measured"
        label = f"plan of generation, {name}: planned / measured peak"
        bench.record(label, planned / max(measured, 1), "x", at_least=1.0, at_most=1.07, note=note)


def copy_bandwidth(is_locked_later: bool) -> float:
    """Bytes per second of copies to the GPU from memory of the driver, or from some that was locked later."""
    device = open_device()
    num_bytes = 1 << (20 if IS_REHEARSAL else 30)
    if is_locked_later and not IS_REHEARSAL:
        source = empty_pages(num_bytes).zero_()
        assert lock_pages(source, device.torch_device)
    else:
        source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not IS_REHEARSAL)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    return num_bytes / device.seconds(lambda: target.copy_(source, non_blocking=True), 10)


def offloaded_speed(side: str, path: str, num_tokens: int) -> float:
    """Tokens per second of a model whose blocks are all in CPU memory, by us or by accelerate."""
    device = open_device()
    layers = range(config_of("8B", 8).num_hidden_layers)
    if side == "ours":
        model = load_dispatched(path, _streaming(layers))
    else:
        here = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), _HERE)
        model = loaded_by_transformers(Path(path), {**here, **{f"model.layers.{number}": "cpu" for number in layers}})
    ids = _prompt(device)
    model.generation_config.eos_token_id = model.config.vocab_size - 1  # which random weights hardly ever choose

    def run(count: int) -> int:
        if side == "ours":
            decoder = Decoder(model, byte_tokenizer(), GenerationSettings(max_new_tokens=count))
            return len(decoder.run(ids.tolist())[0].tokens)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return int(found.shape[1] - ids.shape[1])

    run(2)
    device.synchronize()
    began = time.perf_counter()
    count = run(num_tokens)
    device.synchronize()
    return count / (time.perf_counter() - began)


@check(seconds=90)
def test_weights_in_cpu_memory_come_at_full_speed(bench: Bench) -> None:
    path = str(bench.directory / "8B-8")
    _, bandwidth, locked, ours, theirs = in_turn(
        (written, bench.directory, "8B", 8, bench.device.torch_device),
        (copy_bandwidth, False),
        (copy_bandwidth, True),
        (offloaded_speed, "ours", path, bench.size(32, 2)),
        (offloaded_speed, "accelerate", path, bench.size(4, 1)),
    )
    model = build_on_meta(config_of("8B", 8), torch.bfloat16)
    num_bytes = sum(param.nbytes for param in model.model.layers.parameters())
    note = f"{ours * num_bytes / 1e9:.1f} of {bandwidth / 1e9:.1f} GB/s"
    bench.record(
        "copy bandwidth of memory that is locked later", locked / bandwidth, "x", note=f"{locked / 1e9:.1f} GB/s"
    )
    bench.record("offloaded blocks: copy bandwidth used", ours * num_bytes / bandwidth, at_least=0.85, note=note)
    bench.record(
        "offloaded blocks: tokens/s of accelerate", ours / theirs, "x", at_least=2.0, note=f"{ours:.1f} tokens/s"
    )


def perplexity(path: str, text: str, settings: list[str]) -> float:
    """The perplexity of a text, in float32, by the command of that name."""
    found = fs.evaluate([f"checkpoint={path}", f"data.path={text}", "data.sequence_length=128", *settings])
    return float(found["perplexity"])


_FLOAT32 = "dispatch.dtype=float32"
_EVALUATIONS: dict[str, tuple[list[str], float]] = {
    "resident": ([f"dispatch.device_map={{*: {_HERE}}}", _FLOAT32], 1e-4),
    "streamed from the CPU": (
        [f"dispatch.device_map={{*: {_HERE}, model.layers.1: {_THERE}, model.layers.2: {_THERE}}}", _FLOAT32],
        1e-4,
    ),
    "layer by layer": (
        [
            f"dispatch.device_map={{*: {_HERE}, model.layers.1: disk, model.layers.2: disk}}",
            "dispatch.schedule=layer_major",
            _FLOAT32,
        ],
        1e-4,
    ),
    "int8": ([f"dispatch.device_map={{*: {_HERE}}}", "dispatch.quantize=int8", _FLOAT32], 5e-2),
    "int4": ([f"dispatch.device_map={{*: {_HERE}}}", "dispatch.quantize=int4", "dispatch.dtype=bfloat16"], 2e-1),
}


@check(seconds=150, concurrent="all")
def test_perplexity_is_that_of_the_cpu(bench: Bench) -> None:
    if not all(bench.has("perplexity", package) for package in ("hydra", "omegaconf", "datasets", "pyarrow", "pandas")):
        return
    path, text = str(bench.directory / "100M-4"), bench.directory / "evaluated.txt"
    text.write_text(" ".join(f"line {number} of a text." for number in range(400)), encoding="utf-8")
    has_torchao = bench.has("perplexity of quantized weights", "torchao")
    tried = {name: each for name, each in _EVALUATIONS.items() if has_torchao or "int" not in name}
    _, expected, *found = in_turn(
        (written, bench.directory, "100M", 4, bench.device.torch_device),
        (perplexity, path, str(text), ["dispatch.device_map=cpu", "dispatch.dtype=float32"]),
        *((perplexity, path, str(text), settings) for settings, _ in tried.values()),
    )
    for (name, (_, limit)), each in zip(tried.items(), found, strict=True):
        label = f"perplexity, {name}: beside the CPU"
        bench.record(label, abs(each - expected) / expected, "relative", at_most=limit, exact=True)
