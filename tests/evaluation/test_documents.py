"""perplexity.by=documents: each document against a plain loop over it, what is left out, and two models compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from fsdp_shard.data import DataConfig
from fsdp_shard.errors import ConfigError, DataError, LossError
from fsdp_shard.inference import load_dispatched
from tests.evaluation.measuring import guide_losses, measure, training_losses
from tests.support.runs import run_recipe
from tests.support.tiny import byte_tokenizer, save_model

LENGTH = 32
TEXTS = ["A short one.", "", "Wie schön, 漢字!", "x", "One that is longer than a window. " * 5, " \n", "Another one"]
USED = [0, 2, 4, 6]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    rows = [{"id": f"row-{number}", "text": text} for number, text in enumerate(TEXTS)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return DataConfig(path=str(path), sequence_length=LENGTH, cache_dir=str(tmp_path / "cache"))


def beginning_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of bytes, which begins each text with <|end|>."""
    plain = byte_tokenizer()
    plain.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", pair="<|end|> $A $B", special_tokens=[("<|end|>", 256)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>"
    )


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "documents.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("stride", [None, 20, 1])
@pytest.mark.parametrize("begins", [False, True])
def test_each_document_is_scored_alone(
    tiny_model: Path, data: DataConfig, tmp_path: Path, stride: int | None, begins: bool
) -> None:
    model = tiny_model
    if begins:
        model = tmp_path / "begins"
        AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(model)
        beginning_tokenizer().save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = {size: measure(model, data, tmp_path / f"{size}", by="documents", stride=stride, batch_size=size)
             for size in (1, 3, 64)}  # fmt: skip
    used = [*USED[:2], 3, *USED[2:]] if begins else USED
    losses = {}
    for index in used:
        ids = list(tokenizer(TEXTS[index])["input_ids"])
        losses[index] = (
            training_losses(model, ids, LENGTH) if stride is None else guide_losses(model, ids, LENGTH, stride)
        )
        assert len(losses[index]) == len(ids) - 1
    everything = torch.cat(list(losses.values()))
    for size, row in found.items():
        assert row["num_tokens"] == len(everything)
        assert row["loss"] == pytest.approx(float(everything.mean()), rel=1e-6)
        assert row["num_documents"] == len(used)
        lines = rows_of(tmp_path / f"{size}")
        assert [line["index"] for line in lines] == list(range(len(TEXTS))), "in the order of the data"
        assert [line["name"] for line in lines] == [f"row-{number}" for number in range(len(TEXTS))]
        for index, expected in losses.items():
            assert lines[index]["loss_sum"] == pytest.approx(float(expected.sum()), rel=1e-6)
            assert lines[index]["num_tokens"] == len(expected)
            assert lines[index]["perplexity"] == pytest.approx(math.exp(float(expected.mean())), rel=1e-6)
        for index in set(range(len(TEXTS))) - set(used):
            assert (lines[index]["num_tokens"], lines[index]["perplexity"]) == (0, None)
            assert lines[index]["left_out"]
    first = found[1]
    size = sum(len(TEXTS[index].encode()) for index in used) - (0 if begins else len(used))
    assert first["num_bytes"] == size, "the first tokens, all a byte, are not scored unless there is one before"
    assert first["bits_per_byte"] == pytest.approx(float(everything.sum()) / math.log(2) / size, rel=1e-6)
    assert first["num_unscored_tokens"] == (0 if begins else len(used) + 1)
    assert sum(first["left_out"].values()) == len(TEXTS) - len(used)
    low, high = first["confidence_interval"]["loss"]
    assert low < first["loss"] < high


def test_what_is_left_out_is_named(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    given = [f"checkpoint={tiny_model}", f"data.path={data.path}", f"data.cache_dir={data.cache_dir}"]
    ended = run_recipe("evaluate", tmp_path / "run", *given, "perplexity.by=documents", "data.sequence_length=32")
    assert ended.status == 0, ended.err
    assert "left out: 2 documents empty" in ended.out
    assert "rows.jsonl, line 2, " in ended.out
    assert "left out: 1 document without a token that has one before it" in ended.out
    assert "5 tokens not scored" in ended.out
    assert "95 % interval: perplexity" in ended.out
    assert ended.result["num_documents"] == len(USED)


def test_documents_that_cannot_be_read(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    data.path = str(write_rows(tmp_path / "other.jsonl", [{"words": "a text"}]))
    with pytest.raises(DataError, match=r"other\.jsonl, line 1 has no column 'text'"):
        measure(tiny_model, data, tmp_path / "run", by="documents")
    data.path = str(write_rows(tmp_path / "short.jsonl", [{"text": "a"}, {"text": "b"}]))
    with pytest.raises(DataError, match="no token to score"):
        measure(tiny_model, data, tmp_path / "run", by="documents")


def test_a_document_whose_loss_is_no_number_is_named(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    def load(path: Path) -> PreTrainedModel:
        model = load_dispatched(path)
        model.get_parameter("model.norm.weight").data.fill_(float("nan"))
        return model

    with pytest.raises(LossError, match=r"The loss of .*rows\.jsonl, line 5 is nan"):
        measure(tiny_model, data, tmp_path / "run", load, by="documents", batch_size=1)


@pytest.mark.long
def test_chats_are_masked_as_in_training(tiny_model: Path, tmp_path: Path) -> None:
    turns = [("Hi", "Hello!"), ("How?", "Like this."), ("Why", "")]
    rows = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in turns
    ]
    rows.append({"messages": [{"role": "user", "content": "nobody answers"}]})
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    data = DataConfig(path=str(write_rows(tmp_path / "chats.jsonl", rows)), kind="chat", chat_template=str(template))
    data.sequence_length, data.cache_dir = 64, str(tmp_path / "cache")
    alone = measure(tiny_model, data, tmp_path / "alone", by="documents")
    trained = measure(tiny_model, data, tmp_path / "trained")
    assert alone["num_tokens"] == trained["num_tokens"] == sum(len(answer) + 1 for _, answer in turns if answer)
    assert alone["loss"] == pytest.approx(trained["loss"], rel=1e-6)
    assert alone["num_bytes"] == trained["num_bytes"] == sum(len(answer) for _, answer in turns), "without <|end|>"
    assert alone["left_out"] == {"empty or without anything to predict": 2}, "nor is an answer without text trained"
    data.sequence_length = 25
    assert any("cut to 25" in note for note in measure(tiny_model, data, tmp_path / "cut")["notes"]), "no silent cut"
    longer = measure(tiny_model, data, tmp_path / "longer", by="documents", stride=8)
    assert longer["num_tokens"] == alone["num_tokens"], "nothing is cut"


@pytest.mark.long
def test_a_tuned_model_against_its_base(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", seed=1)
    given: dict[str, Any] = {"by": "documents", "batch_size": 2}
    own, other = (measure(model, data, tmp_path / model.name, **given) for model in (tiny_model, base))
    row = measure(tiny_model, data, tmp_path / "both", **given, against=str(base))
    assert row["loss"] == own["loss"]
    assert row["against"]["loss"] == other["loss"]
    assert row["against"]["weights"]["digest"] == other["provenance"]["weights"]["digest"]
    difference = row["against"]["difference"]
    assert difference["loss"] == pytest.approx(own["loss"] - other["loss"], rel=1e-9)
    low, high = difference["interval"]
    assert low <= difference["loss"] <= high
    assert 0 < difference["p_value"] <= 1
    lines = rows_of(tmp_path / "both")
    sums = np.array([[line["loss_sum"], line["against"]["loss_sum"]] for line in lines]).sum(axis=0)
    assert sums == pytest.approx(np.array([own["loss"], other["loss"]]) * row["num_tokens"])
    same = measure(tiny_model, data, tmp_path / "same", **given, against=str(tiny_model))["against"]["difference"]
    assert (same["loss"], same["interval"], same["p_value"]) == (0.0, [0.0, 0.0], 1.0)


@pytest.mark.long
def test_the_comparison_is_said_in_a_sentence(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", seed=1)
    given = [f"checkpoint={tiny_model}", f"data.path={data.path}", f"data.cache_dir={data.cache_dir}"]
    given += ["data.sequence_length=32", f"against={base}"]
    ended = run_recipe("evaluate", tmp_path / "run", *given, "perplexity.by=documents")
    assert ended.status == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if f"than that of {base}" in line]
    assert line.startswith("loss ")
    assert "p = " in line
    ended = run_recipe("evaluate", tmp_path / "windows", *given)
    assert ended.status == 0, ended.err
    assert "no test: it needs two documents" in ended.out
    assert ended.result["against"]["difference"]["p_value"] is None


def test_models_with_other_tokens_do_not_compare(tiny_model: Path, data: DataConfig, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", seed=1)
    document = json.loads((base / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (base / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"have different tokenizers.* is 'A' in the first and 'B' in the second"):
        measure(tiny_model, data, tmp_path / "run", against=str(base))
    document["pre_tokenizer"]["add_prefix_space"] = True
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (base / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="they divide text in different ways"):
        measure(tiny_model, data, tmp_path / "run", against=str(base))
