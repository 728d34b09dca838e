"""The plan as people read it, and as `fsdp-shard plan` leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import fsdp_shard as fs
from fsdp_shard.planning.report import plan_report
from fsdp_shard.sharding import Fsdp2Config
from tests.support.plans import plan
from tests.support.runs import run_recipe
from tests.support.tiny import llama, llama_config


def test_equal_blocks_and_equal_ranks_share_a_row() -> None:
    text = plan_report(plan(llama_config(layers=5), num_ranks=4), 80 * 10**9)
    lines = text.splitlines()
    (layers,) = [line for line in lines if "LlamaDecoderLayer" in line]
    assert layers.startswith("model.layers.0 ... model.layers.4")
    assert layers.split()[4] == "5"
    (head,) = [line for line in lines if line.startswith("lm_head")]
    assert head.split()[-1] == "tied"
    ranks = [line.split()[0] for line in lines[lines.index("") :] if line.strip()[:1].isdigit()]
    assert ranks == ["0", "3"]  # ranks 0 to 2 have the same
    assert "Fits in 74.5 GiB" in lines[-1]


def test_the_tree_of_units_is_there_when_asked_for() -> None:
    trees = [plan_report(plan(num_ranks=2, shard=Fsdp2Config(explain=asked)), None) for asked in (False, True)]
    assert ["model.layers.0-1  LlamaDecoderLayer" in tree for tree in trees] == [False, True]


def test_what_does_not_fit_says_by_how_much() -> None:
    found = plan()
    assert found.peak_bytes is not None
    last = plan_report(found, found.peak_bytes - 1024**2).splitlines()[-1]
    assert "Does NOT fit" in last
    assert "1.00 MiB too much" in last
    assert "Try" not in last, "what would fit is searched, see test_search.py"
    assert "Set device.memory, such as device.memory=80GiB" in plan_report(found, None)


def test_the_recipe_needs_only_a_config(tmp_path: Path) -> None:
    model = tmp_path / "model"
    llama_config().save_pretrained(model)
    ended = run_recipe(
        "plan", tmp_path / "run", f"model.path={model}", "launch.ranks=3", "device.memory=1GB", "shard=fsdp1",
        "launch.device=cpu", "data.sequence_length=32",
    )  # fmt: skip
    assert ended.status == 0, ended.err
    result = ended.result
    assert result["num_params"] == sum(param.numel() for param in llama().parameters())
    assert len(result["per_rank"]) == 3
    assert result["per_rank"][0].keys() >= {
        "parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "peak_bytes",
    }  # fmt: skip
    assert result["fits"] is True
    assert result["balance"] >= 1.0
    assert "Asynchronous saves copy up to" in ended.out
    assert [block["fqn"] for block in result["blocks"]][:2] == ["model.embed_tokens", "model.layers.0"]
    assert "LlamaForCausalLM: 34.7 K parameters" in ended.out


def test_bad_input_is_one_error(tmp_path: Path) -> None:
    for overrides, says in (
        ([f"model.path={tmp_path}"], "has no config.json"),
        (["model.path=x", "device.memory=much"], "device.memory=much is not a size"),
        (["model.path=x", "device.memory=80"], "device.memory=80 is 80 bytes; write a unit, such as 80GB"),
    ):
        ended = run_recipe("plan", tmp_path / "run", *overrides)
        assert (ended.status, ended.err.count("error: ")) == (2, 1)
        assert says in ended.err


@pytest.mark.long
def test_a_device_map_is_shown_without_loading(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    settings = [f"model.path={tmp_path / 'model'}", "data.sequence_length=32", "train.micro_batch_size=2"]
    wanted = ["dispatch.device_map=auto", "dispatch.max_memory={0: 70kB, cpu: 110kB}"]
    ended = run_recipe("plan", tmp_path / "run", *settings, *wanted)
    assert ended.status == 0, ended.err
    assert ended.result["device_map"] == {
        "model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "disk", "model.norm": "cpu",
        "lm_head": "cpu",
    }  # fmt: skip
    plain = run_recipe(
        "plan", tmp_path / "plain", *settings, "adapter=lora", "adapter.rank=4", "checkpoint.asynchronous=false"
    )
    assert "device_map" not in plain.result
    assert "Asynchronous saves" not in plain.out
    assert (plain.result["num_trained_params"], "4.82 K are trained" in plain.out) == (4824, True)
    said = "The devices are those of this machine"
    here = run_recipe("plan", tmp_path / "here", *settings, "dispatch.device_map=auto")
    assert (said in here.out, said in ended.out) == (True, False)
    useless = run_recipe("plan", tmp_path / "useless", *settings, "dispatch.max_memory={cpu: 60kB}")
    assert (useless.status, "add dispatch.device_map=auto" in useless.err) == (2, True)


@pytest.mark.long
def test_saves_of_the_best_step_are_in_the_peak(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path / "model")
    given = [f"model.path={tmp_path / 'model'}", "data.sequence_length=8", "launch.ranks=2", "launch.device=cpu"]
    peaks = [
        fs.plan([*given, *settings])["peak_bytes"]
        for settings in (
            ["train.eval_every=2"], ["checkpoint.every=2"], [], ["train.eval_every=2", "checkpoint.save_best=false"],
        )
    ]  # fmt: skip
    assert peaks[0] == peaks[1] > peaks[2] == peaks[3]


@pytest.mark.long
def test_settings_that_training_would_refuse_are_said(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path / "model")
    typed = [f"model.path={tmp_path / 'model'}", "data.sequence_length=32", "launch.ranks=2"]
    odd = run_recipe("plan", tmp_path / "odd", *typed, "train.global_batch_size=7")
    assert "finetune would refuse these settings: train.global_batch_size=7" in odd.out
    assert odd.result["refused"].startswith("train.global_batch_size=7 is not")
    even = run_recipe("plan", tmp_path / "even", *typed, "train.global_batch_size=8")
    assert ("would refuse" in even.out, even.result["refused"]) == (False, None)
    narrow = run_recipe("plan", tmp_path / "narrow", *typed, "model.dtype=float16")
    assert "finetune would refuse these settings: model.dtype=float16 is too narrow" in narrow.out, narrow.err
    muon = run_recipe("plan", tmp_path / "muon", *typed, "optim=muon", "optim.not_muon=[*embed*,foo]")
    assert "finetune would refuse these settings: optim.not_muon has foo" in muon.out, muon.err
    divided = run_recipe("plan", tmp_path / "divided", *typed, "adapter=lora", "shard.tensor_parallel=2")
    assert (divided.status, "adapter=lora cannot be combined" in divided.err) == (2, True), divided.err
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=64)).save_pretrained(tmp_path / "gpt2")
    gpt2 = [f"model.path={tmp_path / 'gpt2'}", *typed[1:], "optim=muon", "shard.tensor_parallel=2"]
    both = run_recipe("plan", tmp_path / "both", *gpt2)
    assert (both.status, "cannot gather with shard.tensor_parallel=2" in both.err) == (2, True), (
        "as finetune says first"
    )
    reward = run_recipe("plan", tmp_path / "reward", *typed, "objective=reward")
    assert (reward.status, "model.labels=[reward]" in reward.err) == (2, True), reward.err


@pytest.mark.long
def test_devices_with_a_memory_are_gpus_unless_said_otherwise(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path / "model")
    typed = [f"model.path={tmp_path / 'model'}", "data.sequence_length=32", "device.memory=8GB"]
    gpu = run_recipe("plan", tmp_path / "gpu", *typed)
    cpu = run_recipe("plan", tmp_path / "cpu", *typed, "launch.device=cpu")
    assert gpu.result["overhead_bytes"]["CUDA context"] > 0
    assert cpu.result["overhead_bytes"] == {}
    assert ("Planned for ranks on CPUs" in gpu.out, "Planned for ranks on CPUs" in cpu.out) == (False, True)
