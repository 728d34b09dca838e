"""`diff --logits`: what two checkpoints predict, against transformers' own logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from fsdp_shard.checkpoint import convert, locate
from fsdp_shard.cli import run_command
from fsdp_shard.errors import ConfigError, DataError, DifferenceError, ModelError
from fsdp_shard.inference.compare_logits import diff_logits
from tests.support.tiny import llama_config, save_model

_PROMPT = "To be, or not"


def logits(path: Path) -> torch.Tensor:
    """[num_tokens, vocabulary] after each token of the prompt, by transformers alone."""
    ids = AutoTokenizer.from_pretrained(path)(_PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits[0].double()
    return found


@pytest.mark.long
def test_a_copy_in_another_format_predicts_the_same(tmp_path: Path) -> None:
    one = save_model(tmp_path / "one")
    convert(one, tmp_path / "ranks", format="sharded", ranks=2)
    report = diff_logits(locate(one), locate(tmp_path / "ranks"), _PROMPT)
    assert report.is_equal
    assert (report.num_tokens, report.max_divergence) == (len(_PROMPT), 0)
    assert all(report.top_agrees)


def test_a_model_without_a_token_of_the_prompt_is_named(tmp_path: Path) -> None:
    one, few = save_model(tmp_path / "one"), tmp_path / "few"
    config = llama_config()
    config.vocab_size = 60
    AutoModelForCausalLM.from_config(config).save_pretrained(few)
    with pytest.raises(ModelError, match=r"few.*has a vocabulary of 60 tokens, but the tokenizer makes token"):
        diff_logits(locate(one), locate(few), _PROMPT)


def test_figures_are_those_of_transformers(tmp_path: Path) -> None:
    one, two = save_model(tmp_path / "one"), save_model(tmp_path / "two", seed=1)
    report = diff_logits(locate(one), locate(two), _PROMPT)
    a, b = logits(one), logits(two)
    assert report.max_difference == pytest.approx(float((a - b).abs().max()), rel=1e-5)
    each = torch.nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    assert report.mean_divergence == pytest.approx(float(each.mean()), rel=1e-4)
    assert report.max_divergence == pytest.approx(float(each.max()), rel=1e-4)
    assert report.top_agrees == tuple((a.argmax(-1) == b.argmax(-1)).tolist())
    assert [place[0] for place in report.disagreements] == [n for n, same in enumerate(report.top_agrees) if not same]
    assert f"most likely next token is the same at {sum(report.top_agrees)} of {len(_PROMPT)}" in str(report)


@pytest.mark.long
def test_a_prompt_beyond_the_context(tmp_path: Path) -> None:
    one = save_model(tmp_path / "one")
    said = str(diff_logits(locate(one), locate(one), "a" * 129))
    assert f"warning: {one}: --logits, with 129 tokens, exceeds the model's context of 128 tokens" in said
    assert "warning" not in str(diff_logits(locate(one), locate(one), "a" * 128))
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=64, vocab_size=257)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"context of 64 tokens, and it has no positions beyond; shorten it\."):
        diff_logits(locate(one), locate(tmp_path / "two"), "a" * 65)


def _diff(one: Path, two: Path, *arguments: str) -> None:
    """`fsdp-shard diff ONE TWO --logits PROMPT ...`, in this process, which has loaded transformers already."""
    run_command(["diff", str(one), str(two), "--logits", _PROMPT, *arguments])


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = save_model(tmp_path / "one"), save_model(tmp_path / "two", seed=1)
    with pytest.raises(DifferenceError, match="differ in"):
        _diff(one, two)
    assert "KL divergence of B from A: " in capsys.readouterr().out
    with pytest.raises(DifferenceError):
        _diff(one, two, "--json")
    assert json.loads(capsys.readouterr().out)["logits"]["num_tokens"] == len(_PROMPT)
    config = json.loads((two / "config.json").read_text())
    (two / "model.safetensors").write_bytes((one / "model.safetensors").read_bytes())
    _diff(one, two)
    (two / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(DifferenceError, match="have the same tensors but predict differently"):
        _diff(one, two)


@pytest.mark.long
def test_what_cannot_be_compared(tmp_path: Path) -> None:
    one, other = save_model(tmp_path / "one"), tmp_path / "other"
    with pytest.raises(DataError, match="--logits '' has no tokens"):
        diff_logits(locate(one), locate(one), "")
    config = llama_config()
    config.vocab_size = 300
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    with pytest.raises(ModelError, match=r"predicts 257 tokens, but .*other predicts 300"):
        diff_logits(locate(one), locate(other), _PROMPT)
    model = AutoModelForCausalLM.from_pretrained(one)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(other)
    with pytest.raises(ModelError, match=r"A logit of .*other is NaN"):
        diff_logits(locate(one), locate(other), _PROMPT)
