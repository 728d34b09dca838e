"""Perplexity: against a plain computation, and against what training says of the same weights and text."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

from fsdp_shard.data import DataConfig, prepare_held_out
from fsdp_shard.errors import DataError, LossError
from fsdp_shard.evaluation.config import check_text
from fsdp_shard.evaluation.perplexity import Perplexity, perplexity
from fsdp_shard.inference import load_dispatched
from tests.support.runs import run_recipe
from tests.support.tiny import byte_tokenizer

LENGTH = 48


@pytest.fixture
def data(texts: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(path=str(texts / "held_out.txt"), sequence_length=LENGTH, cache_dir=str(tmp_path / "cache"))


def plain_loss(path: Path, text: str) -> tuple[float, int]:
    """Every token but the first, each from those before it in its window, by transformers and a loop."""
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor(AutoTokenizer.from_pretrained(path)(text)["input_ids"])
    total = 0.0
    for start in range(0, len(ids) - 1, LENGTH):
        window, targets = ids[start : start + LENGTH], ids[start + 1 : start + LENGTH + 1]
        with torch.no_grad():
            logits = model(input_ids=window[None, : len(targets)]).logits[0]
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
    return total, len(ids) - 1


@pytest.mark.parametrize(("batch_size", "device_map"), [(1, "cpu"), (7, "disk")])
def test_it_is_the_mean_over_all_tokens(tiny_model: Path, data: DataConfig, batch_size: int, device_map: str) -> None:
    windows = prepare_held_out(data, AutoTokenizer.from_pretrained(tiny_model))
    assert windows.num_padded, "the last window should be short"
    seen: list[int] = []
    found = perplexity(load_dispatched(tiny_model, device_map), windows, batch_size, seen.append)
    total, num_tokens = plain_loss(tiny_model, Path(data.path).read_text())
    assert sum(seen) == len(windows)
    assert found.num_tokens == num_tokens
    assert found.loss == pytest.approx(total / num_tokens, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_the_held_out_file_is_evaluated_alone(tiny_model: Path, data: DataConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    expected = prepare_held_out(data, tokenizer)
    beside = replace(data, path="never/looked/at.txt", eval_path=data.path)
    check_text(beside)
    assert prepare_held_out(beside, tokenizer).identity == expected.identity
    with pytest.raises(DataError, match=r"data\.eval_path=./nowhere"):
        check_text(replace(data, eval_path="./nowhere.txt"))


def test_a_part_that_is_held_out_is_evaluated_alone(tiny_model: Path, data: DataConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    whole = prepare_held_out(data, tokenizer)
    data.eval_fraction = 0.25
    part = prepare_held_out(data, tokenizer)
    assert len(part) == round(len(whole) / 4)
    assert np.array_equal(part.tokens, whole.tokens[len(whole.tokens) - len(part.tokens) :])


def test_a_loss_that_is_no_number_is_an_error(tiny_model: Path, data: DataConfig) -> None:
    model = load_dispatched(tiny_model)
    model.get_submodule("model.norm").weight.data.fill_(float("nan"))
    windows = prepare_held_out(data, AutoTokenizer.from_pretrained(tiny_model))
    with pytest.raises(LossError, match="windows 0 to 3 is nan"):
        perplexity(model, windows, 4)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert Perplexity(math.log(7.0), 3, 1.0).perplexity == pytest.approx(7.0)


def test_the_recipe_agrees_with_training(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    text = [f"data.sequence_length={LENGTH}", f"data.cache_dir={tmp_path}/cache", f"data.path={texts}/train.txt"]
    text.append(f"data.eval_path={texts}/held_out.txt")
    trained = run_recipe(
        "finetune", tmp_path / "run", f"model.path={tiny_model}", "train.steps=3", "train.global_batch_size=2",
        "shard.param_dtype=float32", "launch.device=cpu", "optim.lr=1e-3", *text,
    )  # fmt: skip
    assert trained.status == 0, trained.err
    for checkpoint, expected in ((tmp_path / "run", "perplexity"), (tiny_model, "perplexity_before")):
        where = tmp_path / expected
        ended = run_recipe("evaluate", where, f"checkpoint={checkpoint}", "dispatch.device_map=disk", *text)
        assert ended.status == 0, ended.err
        assert ended.result["perplexity"] == pytest.approx(trained.result[expected], rel=1e-6)
        assert ended.result.keys() >= {"status", "loss", "num_tokens", "seconds"}


def test_bad_input_is_one_error(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for name, says in (("none.txt", "no such file"), ("empty.txt", "empty.txt")):
        ended = run_recipe("evaluate", tmp_path / "run", f"checkpoint={tiny_model}", f"data.path={tmp_path / name}")
        assert ended.status == 2
        assert ended.err.count("error: ") == 1
        assert says in ended.err
    OPTForCausalLM(OPTConfig(
        hidden_size=8, ffn_dim=8, word_embed_proj_dim=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=257,
    )).save_pretrained(tmp_path / "opt")  # fmt: skip
    byte_tokenizer().save_pretrained(tmp_path / "opt")
    (tmp_path / "text.txt").write_text("some text\n" * 20)
    ended = run_recipe(
        "evaluate", tmp_path / "run", f"checkpoint={tmp_path / 'opt'}", f"data.path={tmp_path / 'text.txt'}",
        "data.packing=true",
    )  # fmt: skip
    assert (ended.status, "OPTForCausalLM" in ended.err, "data.packing" in ended.err) == (2, True, True), ended.err
    ended = run_recipe("evaluate", tmp_path / "run", f"checkpoint={tiny_model}", "data.path=x", "task=lm_evil")
    assert (ended.status, "task=lm_evil" in ended.err) == (2, True)
