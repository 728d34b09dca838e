"""Layers divided over ranks, by transformers' own plan: trained, saved and resumed like any other run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaForCausalLM, MixtralConfig, PhiConfig

from fsdp_shard.checkpoint import StepContent, StepStore, load_shards, open_checkpoint, save_step, verify
from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import build_on_meta, follows_plans_by_fqn
from fsdp_shard.sharding import check_ranks, check_shardable, tensor_parallel
from fsdp_shard.sharding.registry import DdpConfig, Fsdp1Config, Fsdp2Config
from fsdp_shard.utils import check
from tests.support.ranks import on_ranks
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import byte_tokenizer, llama, llama_config

SETTINGS = [
    "train.steps=6",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "optim.lr=3e-3",
    "shard.param_dtype=float32",
    "data.sequence_length=64",
    "launch.device=cpu",
    "checkpoint.every=3",
    "seed=7",
]


def config(**settings: Any) -> Any:
    """The tiny Llama with heads that two ranks can share; the sizes of its matrices are uneven."""
    found = llama_config()
    found.vocab_size += not follows_plans_by_fqn()  # transformers before 5.23 cannot gather uneven outputs
    for name, value in ({"num_attention_heads": 6, "num_key_value_heads": 2} | settings).items():
        setattr(found, name, value)
    return found


@pytest.fixture(scope="module")
def settings(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    cache = tmp_path_factory.mktemp("tokens")
    return [*SETTINGS, f"model.path={model}", f"data.path={texts}/train.txt", f"data.cache_dir={cache}"]


def run(target: Path, settings: list[str], *overrides: str) -> Ended:
    ended = run_recipe("finetune", target, *settings, *overrides)
    assert ended.status == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def runs(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    root = tmp_path_factory.mktemp("runs")
    two, four = ["shard.tensor_parallel=2", "launch.ranks=2"], ["shard.tensor_parallel=2", "launch.ranks=4"]
    return {
        "plain": run(root / "plain", settings),
        "sharded": run(root / "sharded", settings, *two),
        "gathered": run(root / "gathered", settings, *four, "checkpoint.layout=gathered"),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["sharded", "gathered"])
def test_divided_layers_train_like_whole_ones(runs: dict[str, Ended], name: str) -> None:
    plain, found = runs["plain"], runs[name]
    assert plain.losses[-1] < plain.losses[0] - 0.1
    assert found.losses == pytest.approx(plain.losses, abs=1e-5)
    norms = [[row["grad_norm"] for row in ended.metrics] for ended in (found, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert found.result["tokens"] == plain.result["tokens"], "each prediction is counted once"
    report = verify(found.checkpoint)
    assert report.is_sound, report.problems
    assert report.content_checked
    for part in ("", "optimizer"):
        with open_checkpoint(found.checkpoint / part) as one, open_checkpoint(plain.checkpoint / part) as other:
            assert set(one.names) == set(other.names)
            for tensor in one.names:
                torch.testing.assert_close(one.read(tensor), other.read(tensor), rtol=0, atol=2e-3)


@pytest.mark.long
def test_divided_runs_resume_bit_equal_and_under_other_wrappers(
    runs: dict[str, Ended], settings: list[str], tmp_path: Path
) -> None:
    def rest(source: str, name: str, *overrides: str) -> list[float]:
        half = f"resume={runs[source].run_dir}/checkpoints/step-00000003"
        return run(tmp_path / name, settings, half, *overrides).losses

    assert rest("sharded", "same", "shard.tensor_parallel=2", "launch.ranks=2") == runs["sharded"].losses[3:]
    plain = pytest.approx(runs["plain"].losses[3:], abs=1e-5)
    assert rest("sharded", "flat", "shard=fsdp1", "launch.ranks=2") == plain
    assert rest("gathered", "one") == plain
    replicas = ["shard.tensor_parallel=2", "shard.replicas=2", "launch.ranks=4", "shard.activation_checkpointing=true"]
    assert rest("plain", "replicas", *replicas) == plain


@pytest.mark.long
def test_biases_that_each_tensor_rank_has_are_saved_once(settings: list[str], tmp_path: Path) -> None:
    """A layer that is cut by rows adds its bias after the sum, so every tensor rank has the whole of it."""
    model = tmp_path / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(config(attention_bias=True, mlp_bias=True)).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    given = [*settings, f"model.path={model}"]
    plain = run(tmp_path / "plain", given)
    for layout in ("sharded", "gathered"):
        divided = ["shard.tensor_parallel=2", "launch.ranks=2", f"checkpoint.layout={layout}"]
        found = run(tmp_path / layout, given, *divided)
        assert found.losses == pytest.approx(plain.losses, abs=1e-5)
        norms = [[row["grad_norm"] for row in ended.metrics] for ended in (found, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        assert verify(found.checkpoint).is_sound
        for part in ("", "optimizer"):
            with open_checkpoint(found.checkpoint / part) as one, open_checkpoint(plain.checkpoint / part) as other:
                assert set(one.names) == set(other.names)
                for tensor in one.names:
                    torch.testing.assert_close(one.read(tensor), other.read(tensor), rtol=0, atol=2e-3)
    half = f"resume={found.run_dir}/checkpoints/step-00000003"
    assert run(tmp_path / "again", given, half, *divided).losses == found.losses[3:]


WHOLE = torch.arange(700_000.0).view(700, 1000)


def save_columns(context: DistributedContext, root: Path) -> bool:
    """Save a matrix of three hash chunks of which each rank has uneven columns, and read it back into them."""
    first = 333 * context.rank
    mine = WHOLE[:, first : (333 if context.rank == 0 else 1000)].contiguous()
    shard = LocalShard(mine, mine.view(-1), first, (700, 1000), True, box=((0, first), tuple(mine.shape)))
    for layout in ("sharded", "gathered"):
        directory = save_step(context, StepStore(root / layout), 1, StepContent({"w": shard}, {}), layout=layout)
        empty = replace(shard, data=torch.zeros_like(shard.data))
        with open_checkpoint(directory) as index:
            load_shards(index, {"w": empty})
        assert torch.equal(empty.data, shard.data), layout
    return True


def test_columns_are_saved_and_hashed_in_both_layouts(tmp_path: Path) -> None:
    assert all(on_ranks(2, save_columns, tmp_path))
    for layout in ("sharded", "gathered"):
        directory = StepStore(tmp_path / layout).path(1)
        report = verify(directory)
        assert report.is_sound, report.problems
        assert report.content_checked
        with open_checkpoint(directory) as index:
            assert torch.equal(index.read("w"), WHOLE)
            assert len(index.entry("w").pieces) == (2 if layout == "sharded" else 1)


@pytest.mark.parametrize("tied", [False, True])
def test_an_uneven_vocabulary_is_found_in_a_tied_head_too(tied: bool) -> None:
    """transformers before 5.23 cannot gather it."""
    plan = {"lm_head.weight": "colwise_gather_output", "model.layers.0.mlp.gate_proj.weight": "colwise"}
    assert tensor_parallel._uneven_outputs(llama(tied=tied), plan, 2) == ["lm_head.weight"]


def test_what_cannot_be_divided_is_named() -> None:
    two = Fsdp2Config(tensor_parallel=2)
    for given, said in (
        (config(num_key_value_heads=1), "does not divide the 1 num_key_value_heads of LlamaForCausalLM"),
        (GPT2Config(n_layer=1, n_embd=8, n_head=2), "no tensor-parallel plan for GPT2LMHeadModel"),
        (
            MixtralConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=8, vocab_size=9),
            "the plan of MixtralForCausalLM asks for moe_tp_experts, packed_colwise",
        ),
        (
            PhiConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=8, qk_layernorm=True),
            "PhiForCausalLM has model.layers.0.self_attn.q_layernorm among divided layers",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            check_shardable(build_on_meta(given, "float32"), two)
    check_shardable(build_on_meta(config(), "float32"), two)
    for wrong, said in (
        (Fsdp1Config(tensor_parallel=2), "shard=fsdp1 cannot divide layers"),
        (DdpConfig(tensor_parallel=2), "tensor_parallel=2 has no effect with shard=ddp"),
        (replace(two, compile=True), "compile=true cannot be combined with tensor_parallel=2"),
        (replace(two, reshard_after_forward=2), "reshard_after_forward=2 cannot be combined with tensor_parallel=2"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(wrong)
    with pytest.raises(ConfigError, match=r"shard\.replicas=2 times shard\.tensor_parallel=2 does not divide the 6"):
        check_ranks(replace(two, replicas=2), 6, on_gpu=False)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("adapter=lora", "adapter=lora cannot be combined with shard.tensor_parallel=2"),
        ("model.chunked_loss=true", "model.chunked_loss=true cannot be combined with shard.tensor_parallel=2"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_rank_starts(
    settings: list[str], tmp_path: Path, argument: str, said: str
) -> None:
    ended = run_recipe("finetune", tmp_path, *settings, "shard.tensor_parallel=2", "launch.ranks=2", argument)
    assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
    assert said in ended.err
    assert not (tmp_path / "config.yaml").exists()
