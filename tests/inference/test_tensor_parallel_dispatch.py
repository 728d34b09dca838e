"""A model whose layers are divided over ranks says what it says whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fsdp_shard.checkpoint import convert, locate
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.inference.config import DispatchConfig
from fsdp_shard.inference.dispatch import dispatch_model
from fsdp_shard.models import load_config
from tests.support.ranks import on_ranks
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import byte_tokenizer, llama_config

IDS = torch.tensor([[5, 9, 13, 17, 2, 40, 7], [1, 2, 3, 4, 5, 6, 8]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank files of 3 ranks of a tied Llama, whose heads two ranks can share."""
    root = tmp_path_factory.mktemp("divided")
    config = llama_config()
    config.num_attention_heads, config.num_key_value_heads = 6, 2
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "whole")
    byte_tokenizer().save_pretrained(root / "whole")
    convert(root / "whole", root / "ranks", format="sharded", ranks=3)
    return root / "ranks"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms inside the heads, and a head of its own for the logits."""
    root = tmp_path_factory.mktemp("qwen")
    config = Qwen3Config(
        vocab_size=300, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(root)
    return root


def _logits(context: DistributedContext, path: Path) -> tuple[torch.Tensor, int]:
    source = locate(path)
    model = dispatch_model(source, load_config(source.config_directory), DispatchConfig(), context=context)
    held = sum(param.to_local().nbytes if hasattr(param, "to_local") else param.nbytes for param in model.parameters())
    with torch.inference_mode():
        return model(IDS).logits, held


@pytest.mark.parametrize("name", ["checkpoint", "qwen"])
def test_logits_are_those_of_the_whole_model(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    source = locate(path)
    whole = dispatch_model(source, load_config(source.config_directory), DispatchConfig())
    with torch.inference_mode():
        expected = whole(IDS).logits
    num_bytes = sum(param.nbytes for param in whole.parameters())
    found = on_ranks(2, _logits, path, tensor_parallel=2)
    for logits, held in found:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert held < 0.75 * num_bytes
    assert torch.equal(found[0][0], found[1][0])  # else they could draw different tokens


@pytest.mark.long
def test_groups_of_ranks_share_the_prompts(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nde\na longer one\nfgh\nx\n")
    settings = (f"checkpoint={checkpoint}", f"prompts={prompts}", "generation.do_sample=true")
    alone = _generate(tmp_path / "alone", *settings)
    divided = _generate(tmp_path / "divided", *settings, "tensor_parallel=2", "launch.ranks=2", "launch.device=cpu")
    groups = _generate(tmp_path / "groups", *settings, "tensor_parallel=2", "launch.ranks=4", "launch.device=cpu")
    assert (alone.status, divided.status, groups.status) == (0, 0, 0), alone.err + divided.err + groups.err
    expected = (tmp_path / "alone/completions.jsonl").read_text()
    for ended, run in (divided, "divided"), (groups, "groups"):
        assert (tmp_path / run / "completions.jsonl").read_text() == expected
        assert ended.result["num_new_tokens"] == alone.result["num_new_tokens"]
        assert ended.out.count("each layer is divided over 2 ranks") == 1
        assert ended.out.count("completions, ") == 1


@pytest.mark.long
def test_what_cannot_be_divided_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "gpt2"
    )
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    two = ("tensor_parallel=2", "launch.ranks=2", "launch.device=cpu")
    for settings, message in (
        ((f"checkpoint={tmp_path / 'gpt2'}", *two), "tensor_parallel=2: transformers has no tensor-parallel plan"),
        ((f"checkpoint={checkpoint}", "tensor_parallel=2"), "tensor_parallel=2 needs that many ranks or a multiple"),
        ((f"checkpoint={checkpoint}", *two, "dispatch.device_map=disk"), "dispatch.device_map=disk has no effect"),
        ((f"checkpoint={checkpoint}", *two, "dispatch.quantize=int8"), "dispatch.quantize=int8 has no effect"),
    ):
        ended = _generate(tmp_path / "refused", *settings, "prompt=a")
        assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
        assert message in ended.err


def _generate(run_dir: Path, *overrides: str) -> Ended:
    sizes = ("generation.max_new_tokens=5", "generation.batch_size=2")
    return run_recipe("generate", run_dir, *sizes, *overrides)
