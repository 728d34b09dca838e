"""Runs whose sequences are divided over ranks: like those of one rank, resumed under another number, and refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from fsdp_shard.checkpoint import open_checkpoint
from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import ModelConfig, build_on_meta
from fsdp_shard.planning import plan_memory
from fsdp_shard.sharding import Fsdp2Config, check_context_parallel
from tests.support.plans import planned
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import byte_tokenizer, llama_config

SETTINGS = [
    "train.steps=4",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "optim.lr=3e-3",
    "shard.param_dtype=float32",
    "data.sequence_length=50",
    "launch.device=cpu",
    "checkpoint.every=2",
    "seed=7",
]


@pytest.fixture(scope="module")
def settings(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = llama_config()
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    LlamaForCausalLM(config).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    cache = tmp_path_factory.mktemp("tokens")
    held_out = [
        f"data.eval_path={texts}/held_out.txt",
        "train.eval_every=2",
        "train.eval_windows=3",
        "train.sample_prompts=[The]",
        "train.sample_tokens=5",
    ]
    return [*SETTINGS, f"model.path={model}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}", *held_out]


def run(target: Path, settings: list[str], *overrides: str) -> Ended:
    ended = run_recipe("finetune", target, *settings, *overrides)
    assert ended.status == 0, ended.err
    return ended


def evaluations(ended: Ended) -> list[float]:
    return [json.loads(line)["loss"] for line in (ended.run_dir / "evaluations.jsonl").read_text().splitlines()]


def assert_alike(found: Ended, plain: Ended) -> None:
    assert plain.losses[-1] < plain.losses[0] - 0.01
    assert found.losses == pytest.approx(plain.losses, abs=1e-5)
    assert evaluations(found) == pytest.approx(evaluations(plain), abs=1e-5)
    norms = [[row["grad_norm"] for row in ended.metrics] for ended in (found, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert found.result["tokens"] == plain.result["tokens"], "each prediction is counted once"


@pytest.fixture(scope="module")
def plain(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(tmp_path_factory.mktemp("plain") / "run", settings)


@pytest.mark.long
def test_runs_are_those_of_one_rank_and_checkpoints_do_not_know_of_it(
    plain: Ended, settings: list[str], tmp_path: Path
) -> None:
    """Ulysses, and then the rest of the run by one rank, in a ring of four, and by another wrapper."""
    two = ["shard.context_parallel=2", "launch.ranks=2"]
    found = run(tmp_path / "two", settings, *two)
    assert "2 cpu ranks (sequences divided over 2)" in found.out + found.err
    assert "with ulysses attention" in found.out + found.err
    assert_alike(found, plain)
    samples = [(ended.run_dir / "samples.jsonl").read_text() for ended in (found, plain)]
    assert samples[0] == samples[1], "each rank generates with whole sequences"
    with open_checkpoint(found.checkpoint) as one, open_checkpoint(plain.checkpoint) as other:
        assert set(one.names) == set(other.names)
    half = f"resume={found.run_dir}/checkpoints/step-00000002"
    rest = pytest.approx(plain.losses[2:], abs=1e-5)
    assert run(tmp_path / "one", settings, half).losses == rest
    ring = ["shard.context_parallel=4", "shard.context_method=ring", "launch.ranks=4"]
    assert run(tmp_path / "four", settings, half, *ring).losses == rest
    assert run(tmp_path / "ddp", settings, half, *two, "shard=ddp", "shard.context_method=ring").losses == rest


@pytest.mark.long
def test_a_ring_in_each_of_two_replicas_under_fsdp1(plain: Ended, settings: list[str], tmp_path: Path) -> None:
    ring = ["shard.context_parallel=2", "shard.context_method=ring", "shard.replicas=2", "launch.ranks=4"]
    given = [*ring, "shard=fsdp1", "shard.activation_checkpointing=true", "model.chunked_loss=true"]
    assert_alike(run(tmp_path / "run", settings, *given), plain)


@pytest.mark.long
def test_packed_documents_and_an_adapter(settings: list[str], tmp_path: Path) -> None:
    rows = [{"text": "All work and no play makes Jack a dull boy. "[: 9 + number % 31]} for number in range(120)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed = [f"data.path={tmp_path}/rows.jsonl", "data.eval_path=null", "data.packing=true", "data.eval_fraction=0.1"]
    given = [*settings, *packed, "adapter=lora", "adapter.rank=4", "train.max_grad_norm=null"]
    whole = run(tmp_path / "whole", given)
    for method in ("ulysses", "ring"):
        divided = ["shard.context_parallel=2", "launch.ranks=2", f"shard.context_method={method}"]
        assert_alike(run(tmp_path / method, given, *divided), whole)


def refused(settings: list[str], target: Path, *overrides: str) -> str:
    """What a run says that is refused before any rank starts."""
    ended = run_recipe("finetune", target, *settings, "shard.context_parallel=2", "launch.ranks=2", *overrides)
    assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
    assert not (target / "config.yaml").exists()
    return ended.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["shard.context_parallel=3", "launch.ranks=3", "shard.context_method=ulysses"],
            "does not divide the 4 num_at",
        ),
        (["data.sequence_length=3"], "cuts each sequence into 4 parts, but data.sequence_length=3 is shorter"),
        (["launch.ranks=3"], "shard.replicas=1 times shard.context_parallel=2 does not divide the 3 ranks"),
        (["model.attention=eager"], "model.attention=eager cannot be combined with shard.context_parallel=2"),
        (["shard.context_method=ring", "shard.activation_checkpointing=selective"], "selective cannot be combined"),
        (["shard.tensor_parallel=2"], "shard.tensor_parallel=2 cannot be combined with shard.context_parallel=2"),
        (["shard.compile=true"], "shard.compile=true cannot be combined with shard.context_parallel=2"),
        (["shard.context_parallel=1", "shard.context_method=ring"], "shard.context_method=ring has no effect without"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_before_any_rank_starts(
    settings: list[str], tmp_path: Path, overrides: list[str], said: str
) -> None:
    assert said in refused(settings, tmp_path / "run", *overrides)


SMALL: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 131, "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("mamba", SMALL, "MambaForCausalLM: it has layers without attention (linear_attention)"),
        ("lfm2", SMALL | {"layer_types": ["conv", "full_attention"]}, "it has layers without attention (conv)"),
        ("rwkv", SMALL, "RwkvForCausalLM: it takes no position_ids"),
        ("bloom", {"n_layer": 2, "n_head": 4, "hidden_size": 32}, "BloomForCausalLM: it takes no position_ids"),
        ("gptj", {"n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4}, "GPTJForCausalLM does not use the atten"),
        ("bert", SMALL, "attends in both directions"),
        (
            "gpt2",
            {"n_layer": 2, "n_head": 3, "n_embd": 36},
            "does not support dropout in attention, but config.json of",
        ),
        (
            "llama",
            SMALL | {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "cannot be combined with data.sequence_length=64: the rotary frequencies",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.islower() and " " not in value else "",
)
def test_models_that_cannot_be_divided_are_named(kind: str, values: dict[str, Any], said: str) -> None:
    config = AutoConfig.for_model(kind, **values)
    model, settings = build_on_meta(config, "float32"), ModelConfig(path="model")
    check_context_parallel(config, model, settings, Fsdp2Config(), 64)
    with pytest.raises((ConfigError, ModelError), match=re.escape(said)):
        check_context_parallel(config, model, settings, Fsdp2Config(context_parallel=2), 64)


def test_other_tasks_are_refused() -> None:
    config = llama_config()
    settings = ModelConfig(path="model", task="sequence_classification")
    with pytest.raises(
        ConfigError, match=r"shard\.context_parallel=2 is for model\.task=causal_lm, not sequence_class"
    ):
        check_context_parallel(config, build_on_meta(config, "float32"), settings, Fsdp2Config(context_parallel=2), 64)


def test_a_plan_has_the_activations_of_a_part_and_the_batch_of_a_group() -> None:
    config = llama_config()
    run = planned(shard=Fsdp2Config(), num_ranks=4)
    plans = [plan_memory(config, replace(run, shard=Fsdp2Config(context_parallel=ranks))) for ranks in (1, 4)]
    whole, part = (plan.per_rank[0].activations_bytes or 0 for plan in plans)
    assert part == pytest.approx(whole / 4, rel=0.05)
    assert replace(run, shard=Fsdp2Config(context_parallel=4)).num_micro_batches == 4 * run.num_micro_batches
