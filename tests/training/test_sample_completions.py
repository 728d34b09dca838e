"""Completions by a model in training: against `generate` of transformers, under each wrapper, and from the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import DataConfig, encode_prompts
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training.config import TrainConfig, check_held_out
from fsdp_shard.training.held_out.evaluator import eval_mode
from fsdp_shard.training.held_out.sample_completions import complete_greedily
from fsdp_shard.utils import check
from tests.support.commands import fsdp_shard
from tests.support.ranks import on_ranks
from tests.support.sharded import sharded
from tests.support.tiny import byte_tokenizer, llama, save_model
from tests.training.conftest import Plain

PROMPTS = [[1, 2, 3, 4, 5], [200, 7], [9] * 11]
NUM_NEW = 12


def generated(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **options)
    return list(output[0, len(prompt) :].tolist())


def complete(context: DistributedContext, wrapper: str, settings: dict[str, Any]) -> dict[str, Any]:
    model = sharded(WRAPPERS[wrapper](param_dtype="float32", **settings), context)
    model.module.train()
    rows = torch.tensor([PROMPTS[0]])
    loss = model.module(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plans: list[bool] = []
    model.module.register_forward_pre_hook(lambda *_: plans.append(torch.backends.cuda.cudnn_sdp_enabled()))
    with eval_mode(model):
        found = complete_greedily(model, PROMPTS, NUM_NEW, {}, context)
    assert plans
    assert not any(plans), "cuDNN makes a plan for each length"
    assert graphs == torch._dynamo.utils.counters["stats"]["unique_graphs"], "a graph for each length"
    return {"found": found, "training": model.module.training}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's
@pytest.mark.parametrize(
    ("wrapper", "world_size", "settings"),
    [
        ("fsdp2", 2, {}),
        ("fsdp2", 2, {"activation_checkpointing": True}),
        ("fsdp2", 2, {"compile": "aot_eager"}),
        ("fsdp1", 2, {}),
        ("ddp", 4, {}),
    ],
)
def test_completions_are_those_of_transformers(wrapper: str, world_size: int, settings: dict[str, Any]) -> None:
    expected = [generated(llama(), prompt, max_new_tokens=NUM_NEW, eos_token_id=None) for prompt in PROMPTS]
    for result in on_ranks(world_size, complete, wrapper, settings):
        assert result["found"] == expected
        assert result["training"]


def test_tensor_parallel_ranks_work_on_one_prompt() -> None:
    model = {"vocab_size": 256, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    expected, *found = on_ranks(2, _complete_divided, model, tensor_parallel=2)[0]
    assert found == [expected]


def _complete_divided(context: DistributedContext, sizes: dict[str, int]) -> list[Any]:
    from fsdp_shard.sharding import shard

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", intermediate_size=64, num_hidden_layers=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    expected = [generated(model, prompt, max_new_tokens=NUM_NEW, eos_token_id=None) for prompt in PROMPTS]
    divided = shard(model, context, tensor_parallel=2, param_dtype="float32")
    with eval_mode(divided):
        return [expected, complete_greedily(divided, PROMPTS, NUM_NEW, {}, context)]


@pytest.mark.parametrize("family", ["gpt2", "mamba", "gemma3_text", "opt", "qwen2_moe", "rwkv"])
def test_families(family: str, alone: DistributedContext) -> None:
    sizes = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    own: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1},
        "qwen2_moe": {
            "num_key_value_heads": 4,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
        "gemma3_text": {"sliding_window": 4, "head_dim": 8, "intermediate_size": 64},
        "rwkv": {"attention_hidden_size": 32},
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **own.get(family, {}))).eval()
    expected = [generated(model, prompt, max_new_tokens=NUM_NEW, eos_token_id=None) for prompt in PROMPTS]
    plain: Any = Plain(model)
    with eval_mode(plain):
        assert complete_greedily(plain, PROMPTS, NUM_NEW, {}, alone) == expected


def test_an_end_token_ends_a_completion(alone: DistributedContext) -> None:
    plain: Any = Plain(llama())
    with eval_mode(plain):
        whole = complete_greedily(plain, PROMPTS[:1], NUM_NEW, {}, alone)[0]
        end = whole[3]
        assert complete_greedily(plain, PROMPTS[:1], NUM_NEW, {end}, alone)[0] == whole[: whole.index(end) + 1]


def test_prompts_are_written_as_rows_are() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )

    def text(**settings: Any) -> str:
        return str(tokenizer.decode(encode_prompts(DataConfig(**settings), ["hi"], tokenizer)[0]))

    assert text(kind="text") == "hi"
    assert text(kind="chat") == "<user>hi<a>"
    assert text(kind="pairs") == "hi\n"
    assert text(kind="instruction", prompt_no_input="Q: {instruction} A:") == "Q: hi A:"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(DataError, match=r"The chat template of .* fails with a single user's message: no"):
        text(kind="chat")


def test_settings_without_effect_are_errors() -> None:
    model, data = ModelConfig(path="x"), DataConfig(path="x")
    with pytest.raises(ConfigError, match=r"sample_tokens=3 has no effect without train\.sample_prompts"):
        check(FinetuneConfig(model=model, data=data, train=TrainConfig(sample_tokens=3)))
    with pytest.raises(ConfigError, match="has an empty prompt"):
        check(FinetuneConfig(model=model, data=data, train=TrainConfig(sample_prompts=["a", " "])))
    check_held_out(TrainConfig(eval_every=2, sample_prompts=["a"]), DataConfig())
    with pytest.raises(ConfigError, match="eval_every=2 needs held-out text"):
        check_held_out(TrainConfig(eval_every=2), DataConfig())


@pytest.mark.long
def test_a_run_shows_and_keeps_them(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("abcabcabcabc" * 100)
    settings = ["model.path=model", "data.path=text.txt", "data.sequence_length=16", "launch.device=cpu", "run_dir=run"]
    settings += ["train.sample_prompts=[ab,'ca\\n']", "train.sample_tokens=6", "train.eval_every=30", "optim.lr=0.02"]
    done = fsdp_shard("finetune", *settings, "train.steps=60", "launch.ranks=2", "checkpoint.every=30", cwd=tmp_path)
    assert done.status == 0, done
    rows = _samples(tmp_path)
    assert [(row["step"], row["prompt"]) for row in rows] == [
        (n, text) for n in (0, 30, 60) for text in ("ab", "ca\\n")
    ]
    assert rows[4]["completion"] == "cabcab", "what it was trained on"
    assert f'sample after step 60: "ab" -> {json.dumps(rows[4]["completion"])}' in done.out + done.err

    (tmp_path / "run/result.json").unlink()  # as if killed before it
    same = fsdp_shard("finetune", *settings, "train.steps=60", cwd=tmp_path)
    assert (same.status, _samples(tmp_path)) == (0, rows), "once each"
    (tmp_path / "run/result.json").unlink()
    again = fsdp_shard("finetune", *settings, "train.steps=62", cwd=tmp_path)
    assert again.status == 0, again
    assert _samples(tmp_path)[:6] == rows
    assert [row["step"] for row in _samples(tmp_path)[6:]] == [62, 62]

    long = fsdp_shard("doctor", *settings[:-3], "train.sample_prompts=[ab]", "train.sample_tokens=127", cwd=tmp_path)
    assert (
        "train.sample_prompts[0] has 2 tokens, which with train.sample_tokens=127 exceeds the model's context"
        in long.out + long.err
    )


def _samples(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "run/samples.jsonl").read_text().splitlines()]
