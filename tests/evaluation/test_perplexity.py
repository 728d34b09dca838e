"""Perplexity over windows: against plain computations, and against what training says of the same weights and text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM, PreTrainedModel

from fsdp_shard.checkpoint import convert
from fsdp_shard.data import DataConfig, prepare_held_out
from fsdp_shard.errors import DataError, LossError
from fsdp_shard.evaluation.config import check_text
from fsdp_shard.evaluation.perplexity_task.perplexity import Perplexity
from fsdp_shard.evaluation.perplexity_task.scored_text import TextSize, open_windows
from fsdp_shard.evaluation.perplexity_task.strided_windows import window_bounds
from fsdp_shard.inference import load_dispatched
from tests.evaluation.measuring import evaluation, guide_losses, measure, training_losses
from tests.support.runs import run_recipe
from tests.support.tiny import byte_tokenizer

LENGTH = 48


@pytest.fixture
def data(texts: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(path=str(texts / "held_out.txt"), sequence_length=LENGTH, cache_dir=str(tmp_path / "cache"))


def ids_of(model: Path, data: DataConfig) -> list[int]:
    return list(AutoTokenizer.from_pretrained(model)(Path(data.path).read_text())["input_ids"])


@pytest.mark.long
@pytest.mark.parametrize(("batch_size", "device_map"), [(1, "cpu"), (7, "disk")])
def test_it_is_the_mean_over_all_tokens(
    tiny_model: Path, data: DataConfig, tmp_path: Path, batch_size: int, device_map: str
) -> None:
    row = measure(
        tiny_model, data, tmp_path / "run", lambda path: load_dispatched(path, device_map), batch_size=batch_size
    )
    ids = ids_of(tiny_model, data)
    losses = training_losses(tiny_model, ids, LENGTH)
    assert row["num_tokens"] == len(ids) - 1 == len(losses)
    assert row["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert row["num_bytes"] == len(Path(data.path).read_bytes()) - 1, "but for the first token"
    assert row["bits_per_byte"] == pytest.approx(float(losses.sum()) / math.log(2) / row["num_bytes"], rel=1e-6)


def test_packed_text_has_the_size_of_its_documents(data: DataConfig, tmp_path: Path) -> None:
    """Tokens are bytes, and windows cut characters; a first byte that is a character is not scored."""
    texts = ["\u5929\u5730\u7384\u9ec4" * 30, "a\u5929", "\u5929\u5730", "plain " * 20]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    packed = replace(data, path=str(tmp_path / "rows.jsonl"), sequence_length=16, packing=True)
    text = "".join(texts)
    assert open_windows(packed, None, byte_tokenizer()).size == TextSize(len(text.encode()) - 2, len(text) - 2)


@pytest.mark.long
@pytest.mark.parametrize(("length", "stride"), [(48, 48), (48, 24), (48, 17), (48, 5), (16, 1)])
def test_with_a_stride_it_is_that_of_the_guide(
    tiny_model: Path, data: DataConfig, tmp_path: Path, length: int, stride: int
) -> None:
    short = tmp_path / "short.txt"
    short.write_text(Path(data.path).read_text()[:1000])
    data = replace(data, path=str(short), sequence_length=length)
    losses = guide_losses(tiny_model, ids_of(tiny_model, data), length, stride)
    found = [measure(tiny_model, data, tmp_path / f"{size}", stride=stride, batch_size=size) for size in (1, 8, 64)]
    for row in found:
        assert row["num_tokens"] == len(losses)
        assert row["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    assert found[0]["num_unscored_tokens"] == len(ids_of(tiny_model, data)) - len(losses)


@pytest.mark.parametrize("stride", [None, 1, 3, 7, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 8, 9, 16, 17, 40])
def test_every_token_is_scored_once(num_tokens: int, stride: int | None) -> None:
    length, scored = 8, np.zeros(num_tokens, int)
    for begin, end, first in window_bounds(num_tokens, length, stride):
        assert 0 <= begin < end <= min(begin + length + (stride is None), num_tokens)
        assert first > begin, "there is a token before it"
        scored[first:end] += 1
    unscored = range(0, num_tokens, length) if stride == length else range(min(1, num_tokens))
    assert np.flatnonzero(scored == 0).tolist() == list(unscored)
    assert scored.max(initial=0) <= 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "ranks", "device_map"), [("sharded", 2, "cpu"), ("sharded", 3, "disk"), ("dcp", None, "budget")]
)
def test_formats_and_devices_give_the_same(
    tiny_model: Path, data: DataConfig, tmp_path: Path, kind: str, ranks: int | None, device_map: str
) -> None:
    given: dict[str, Any] = {"stride": 20, "batch_size": 5}
    expected = measure(tiny_model, data, tmp_path / "expected", **given)
    layout: dict[str, Any] = {} if ranks is None else {"ranks": ranks}
    convert(tiny_model, tmp_path / "other", format=kind, **layout)

    def load(path: Path) -> PreTrainedModel:
        if device_map == "budget":
            return load_dispatched(path, max_memory={"cpu": "100KB"})
        return load_dispatched(path, device_map)

    row = measure(tmp_path / "other", data, tmp_path / "run", load, **given)
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert row["provenance"]["weights"]["digest"] == expected["provenance"]["weights"]["digest"]
    assert row["provenance"]["data"]["digest"] == expected["provenance"]["data"]["digest"]
    assert row["provenance"]["weights"]["format"] != expected["provenance"]["weights"]["format"]


@pytest.mark.long
def test_result_names_what_the_figures_come_from(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    known = measure(tiny_model, data, tmp_path / "run")["provenance"]
    assert known["seed"] == 0
    assert known["settings"]["sequence_length"] == LENGTH
    # The metadata of PyPI's wheel says 2.13.0 where torch itself says 2.13.0+cu130.
    assert known["versions"]["torch"] == torch.__version__
    changed, model = tmp_path / "changed", AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():  # the digest is of all bytes, so of the last one too
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[-1, -1] += 1.0
    model.save_pretrained(changed)
    byte_tokenizer().save_pretrained(changed)
    other = measure(changed, data, tmp_path / "other")["provenance"]
    assert other["weights"]["digest"] != known["weights"]["digest"]
    assert other["tokenizer"] == known["tokenizer"]


def test_the_held_out_file_is_evaluated_alone(tiny_model: Path, data: DataConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    expected, _ = prepare_held_out(data, tokenizer)
    beside = replace(data, path="", eval_path=data.path)
    check_text(beside)
    check_text(replace(beside, path=data.path))
    with pytest.raises(DataError, match=r"data\.path=./nowhere"):
        check_text(replace(beside, path="./nowhere.txt"))
    assert prepare_held_out(beside, tokenizer)[0].identity == expected.identity
    with pytest.raises(DataError, match=r"data\.eval_path=./nowhere"):
        check_text(replace(data, eval_path="./nowhere.txt"))


def test_a_part_that_is_held_out_is_evaluated_alone(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    ids = ids_of(tiny_model, data)
    data.eval_fraction = 0.25
    row = measure(tiny_model, data, tmp_path / "run")
    windows = -(-(len(ids) - 1) // LENGTH)
    part = ids[(windows - round(windows / 4)) * LENGTH :]
    assert row["num_tokens"] == len(part) - 1
    assert row["loss"] == pytest.approx(float(training_losses(tiny_model, part, LENGTH).mean()), rel=1e-6)


def test_a_loss_that_is_no_number_is_an_error(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    def load(path: Path) -> PreTrainedModel:
        model = load_dispatched(path)
        model.get_parameter("model.norm.weight").data.fill_(float("nan"))
        return model

    with pytest.raises(LossError, match="windows 0 to 3 is nan"):
        measure(tiny_model, data, tmp_path / "run", load, batch_size=4)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    found = Perplexity(math.log(8.0), 6, TextSize(9, 3), 1.0)
    assert found.perplexity == pytest.approx(8.0)
    assert found.bits_per_byte == pytest.approx(2.0)
    assert found.bits_per_character == pytest.approx(6.0)
    assert Perplexity(1.0, 1, TextSize(0, 0), 1.0).bits_per_byte is None


@pytest.mark.long
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


@pytest.mark.long
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
    text = [f"checkpoint={tiny_model}", f"data.path={tmp_path / 'text.txt'}", "data.sequence_length=16"]
    for given, says in (
        (["seed=3"], "seed=3 has no effect"),
        (["stride=17"], "stride=17 and data.sequence_length=16"),
        (["stride=8", "data.packing=true"], "stride=8 is for text that continues"),
        (["perplexity.by=documents", "data.packing=true"], "data.packing=true lays documents into windows"),
        (["perplexity.by=documents", "data.eval_fraction=0.5"], "data.eval_fraction=0.5 holds out windows"),
        (["perplexity.num_resamples=500"], "perplexity.num_resamples=500 is for perplexity.by=documents"),
        (["perplexity.by=lines"], "perplexity.by=lines is not one of windows, documents"),
        (["against=nowhere/at/all"], "nowhere/at/all"),
    ):
        ended = run_recipe("evaluate", tmp_path / "run", *text, *given)
        assert (ended.status, ended.err.count("error: "), says in ended.err) == (2, 1, True), ended.err


def test_windows_are_of_no_single_document(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    opened = evaluation(tiny_model, data, tmp_path / "run")
    row = opened.measure(lambda source: load_dispatched(source.path)).row
    assert row["confidence_interval"] is None
    assert "perplexity.by=documents" in row["confidence_interval_note"]
    assert not (tmp_path / "run" / "documents.jsonl").exists()
