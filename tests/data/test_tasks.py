"""Samples of models that are not causal, and what does not fit a task."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers.processors import RobertaProcessing
from transformers import BertConfig, GPT2Config, T5Config

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.labeled_texts import open_labeled_texts
from fsdp_shard.data.pipeline import Samples, open_samples, tokenize_all
from fsdp_shard.data.samples.batch import IGNORE_INDEX, NO_WINDOW
from fsdp_shard.data.samples.protocol import ShuffledDataset
from fsdp_shard.data.samples.windows import MaskedWindows
from fsdp_shard.data.sources.datasets_private import quiet_datasets
from fsdp_shard.data.task import SpecialTokens, Task, check_task
from fsdp_shard.data.validate import check_data
from fsdp_shard.distributed import OnlyRank
from fsdp_shard.errors import ConfigError, DataError, ModelError
from fsdp_shard.evaluation import check_text
from fsdp_shard.models import check_model_task
from tests.data.conftest import byte_tokenizer
from tests.data.data_files import write
from tests.support import tiny
from tests.support.prepared_data import in_order

SPECIAL = SpecialTokens(mask=300, begin=(301,), end=(302,), vocabulary=256)


def opened(config: DataConfig, cache: Path, task: Task, tokenizer: Any = None) -> Samples:
    tokenized = tokenize_all(replace(config, cache_dir=str(cache)), tokenizer or byte_tokenizer(), task.name)
    return open_samples(config, tokenized, task, seed=3)


def test_pairs_for_seq2seq_models(tmp_path: Path) -> None:
    rows = [{"source": "abc", "target": "xy"}, {"source": "abcdefghi", "target": "uvwxyz"}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=path, kind="pairs", sequence_length=6, target_length=4, source_format="to: {source}")
    samples = opened(config, tmp_path / "cache", Task("seq2seq", decoder_start=9))
    line = "train: 2 rows, 28 tokens, 2 cut to 6 tokens, sources of up to 6 and targets of up to 4"
    assert samples.notes[-1] == line
    batch = in_order(samples.train).batch([0, 1, NO_WINDOW])
    assert batch.input_ids.tolist() == [[*b"to: ab"], [*b"to: ab"], [0] * 6]
    assert batch.labels.tolist() == [[*b"xy", IGNORE_INDEX, IGNORE_INDEX], [*b"uvwx"], [IGNORE_INDEX] * 4]
    assert batch.inputs["decoder_input_ids"].tolist() == [[9, *b"xy", 9], [9, *b"uvw"], [9] * 4]
    assert batch.inputs["attention_mask"].sum(1).tolist() == [6, 6, 1]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("ends", "target"), [(True, "xy"), (False, "xy<|end|>"), (False, "xy")])
def test_targets_without_an_end(ends: bool, target: str, streaming: bool, tmp_path: Path) -> None:
    """Tokenizers of encoder-decoder models end targets themselves; if nothing does, the model never stops."""
    tokenizer = tiny.byte_tokenizer(ends=ends)
    path = write(tmp_path / "a.jsonl", json.dumps({"source": "abc", "target": target}) + "\n")
    config = DataConfig(path=path, kind="pairs", sequence_length=6, streaming=streaming)
    config = replace(config, cache_dir=str(tmp_path / "cache"))
    tokens = tokenize_all(config, tokenizer, "seq2seq")
    samples = open_samples(config, tokens, Task("seq2seq"), seed=3, open_tokenizer=lambda: tokenizer)
    has_end = ends or "end" in target
    assert any("no target has <|end|>" in note for note in samples.notes) is not has_end
    if not streaming:
        assert (tokenizer.eos_token_id in in_order(samples.train).batch([0]).labels) is has_end


def test_texts_with_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\nabc,good\nde,bad\nf,\n,bad\nghijklmno,good\n")
    config = DataConfig(path=path, sequence_length=4)
    task = Task("sequence_classification", num_labels=3, label_numbers={"bad": 2, "good": 1}, padding=7)
    samples = opened(config, tmp_path / "cache", task)
    assert "5 documents" in samples.notes[0]
    assert "2 documents dropped with nothing to learn, 1 cut to 4 tokens, 2 classes" in samples.notes[0]
    batch = in_order(samples.train).batch([2, 1, NO_WINDOW])
    assert batch.labels.tolist() == [1, 2, IGNORE_INDEX]
    assert batch.input_ids[:, :4].tolist() == [[*b"ghij"], [*b"de", 7, 7], [*b"abc", 7]], "nothing counts of the last"
    assert batch.num_predictions == 2
    text = DataConfig(path=write(tmp_path / "a.txt", "abc"), sequence_length=4)
    with pytest.raises(DataError, match=r"is plain text, but model\.task=sequence_classification needs rows"):
        check_data(text, "sequence_classification")
    with pytest.raises(DataError, match="has a class 'bad', but the model has 2 classes"):
        opened(config, tmp_path / "cache", Task("sequence_classification", num_labels=2))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (["1", "3", "2"], ["1", "2", "3"], [0, 2, 1]),
        (["1", "0", " 1 "], ["1", "0"], [0, 1, 0]),
        (["1", "0", "01"], ["bad", "good"], [1, 0, 1]),
        ([1, "0", 0], ["0", "1"], [1, 0, 0]),
    ],
)
def test_classes_whose_names_are_numbers(
    tmp_path: Path, labels: list[str | int], names: list[str], expected: list[int], streaming: bool
) -> None:
    rows = "".join(json.dumps({"text": "abc", "label": label}) + "\n" for label in labels)
    given: dict[str, Any] = {"path": write(tmp_path / "a.jsonl", rows), "cache_dir": str(tmp_path / "cache")}
    config = DataConfig(**given, sequence_length=4, streaming=streaming, shuffle_buffer=1)
    numbers = {name: number for number, name in enumerate(names)}
    task = Task("sequence_classification", num_labels=len(names), label_numbers=numbers)
    tokenizer = byte_tokenizer()
    tokenized = tokenize_all(config, tokenizer, task.name)
    train = open_samples(config, tokenized, task, seed=3, open_tokenizer=lambda: tokenizer).train
    batch = (train if streaming else in_order(train)).batch(range(len(labels)))
    assert batch.labels.tolist() == expected


@pytest.mark.parametrize("label", [1, 3, "01"])
def test_a_number_that_is_the_name_of_another_class(tmp_path: Path, label: str | int) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "abc", "label": label}))
    task = Task("sequence_classification", num_labels=3, label_numbers={"1": 0, "2": 1, "3": 2})
    number = int(label)
    with pytest.raises(DataError, match=f"stands for index {number}, but .* named '{number}' has index {number - 1}"):
        opened(DataConfig(path=path, sequence_length=4), tmp_path / "cache", task)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("saved", ["a.parquet", "directory"])
def test_names_of_classes_in_another_order(tmp_path: Path, saved: str, streaming: bool) -> None:
    features = datasets.Features(text=datasets.Value("string"), kind=datasets.ClassLabel(names=["pos", "neg"]))
    rows = datasets.Dataset.from_dict({"text": ["abc", "de"], "kind": [0, 1]}, features)
    with quiet_datasets():
        (rows.to_parquet if saved == "a.parquet" else rows.save_to_disk)(tmp_path / saved)
    given: dict[str, Any] = {"path": f"{tmp_path / saved}", "sequence_length": 4, "label_column": "kind"}
    given |= {"cache_dir": str(tmp_path / "cache")}
    config, tokenizer = DataConfig(**given, streaming=streaming, shuffle_buffer=1), byte_tokenizer()
    tokenized = tokenize_all(config, tokenizer, "sequence_classification")
    for names in (["pos", "neg"], ["LABEL_0", "LABEL_1"]):
        task = Task("sequence_classification", num_labels=2, label_numbers=dict(zip(names, (0, 1), strict=True)))
        train = open_samples(config, tokenized, task, 3, lambda: tokenizer).train
        assert sorted(train.batch([0, 1]).labels.tolist()) == [0, 1]
    task = Task("sequence_classification", num_labels=2, label_numbers={"pos": 1, "neg": 0})
    wrong = "in another order: class 0 is 'pos' in the data, and 'neg' in the model"
    with pytest.raises(DataError, match=f"data.path=.*{wrong}"):
        open_samples(config, tokenized, task, 3, lambda: tokenizer)
    if not streaming:
        with pytest.raises(DataError, match=f"data.path=.*{wrong}"):
            open_labeled_texts(config, tokenizer, task, OnlyRank())


def test_other_labels_are_another_data_set(tmp_path: Path) -> None:
    task = Task("sequence_classification", num_labels=2)
    found = []
    for name, labels in (("a", "0101"), ("b", "1010"), ("c", "0101")):
        path = write(tmp_path / f"{name}.csv", "text,label\n" + "".join(f"word,{label}\n" for label in labels))
        found.append(opened(DataConfig(path=path, sequence_length=4), tmp_path / "cache", task).train.identity)
    assert found[0] == found[2] != found[1]


def windows(num_tokens: int = 400) -> MaskedWindows:
    return MaskedWindows(np.arange(num_tokens) % 250, 32, "n", SPECIAL, 0.15, seed=3)


def test_hidden_tokens() -> None:
    data = windows()
    assert len(data) == -(-400 // 30)
    batch = data.batch(range(len(data)))
    whole = batch.labels != IGNORE_INDEX
    tokens = np.where(whole, batch.labels, batch.input_ids)
    framed = [row[mask == 1] for row, mask in zip(tokens, batch.inputs["attention_mask"], strict=True)]
    assert all(row[0] == 301 and row[-1] == 302 for row in framed)
    assert np.concatenate([row[1:-1] for row in framed]).tolist() == (np.arange(400) % 250).tolist()
    assert 0.08 < whole.sum() / 400 < 0.25
    shown = batch.input_ids[whole]
    assert (shown == 300).mean() > 0.6, "most become the mask"
    assert (batch.labels == IGNORE_INDEX)[batch.inputs["attention_mask"] == 0].all()
    assert whole.any(axis=1).all(), "each has something to predict"


def test_hiding_is_a_function_of_seed_epoch_and_sample() -> None:
    data, again = windows(), windows()
    order, again_order = ShuffledDataset(data, 7), ShuffledDataset(again, 7)
    assert order.batch(range(40)).input_ids.tolist() == again_order.batch(range(40)).input_ids.tolist()
    place = next(place for place in range(len(data), 2 * len(data)) if order.index_of(place) == 4)
    assert order.sample(place).labels.tolist() == data.sample(4, epoch=1).labels.tolist()
    assert data.sample(4).labels.tolist() != data.sample(4, epoch=1).labels.tolist(), "another epoch hides others"


@pytest.mark.parametrize("streaming", [False, True])
def test_random_tokens_are_tokens_of_the_model(tmp_path: Path, streaming: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    first_new = len(tokenizer)
    tokenizer.add_tokens([f"<{number}>" for number in range(700)])
    path = write(tmp_path / "a.txt", "abcdefgh" * 200)
    given: dict[str, Any] = {"mask_fraction": 0.9, "cache_dir": str(tmp_path / "cache")}
    config = DataConfig(path=path, sequence_length=1600, streaming=streaming, **given)
    tokens = tokenize_all(config, tokenizer, "masked_lm")
    shown = {}
    for vocabulary in (None, first_new, len(tokenizer), len(tokenizer) + 64):
        task = Task("masked_lm", vocabulary=vocabulary)
        train = open_samples(config, tokens, task, seed=3, open_tokenizer=lambda: tokenizer).train
        shown[vocabulary] = train.batch([0]).input_ids.tolist()
    assert max(shown[None][0]) >= first_new > max(shown[first_new][0])
    assert shown[None] == shown[len(tokenizer)] == shown[len(tokenizer) + 64]


def test_special_tokens_are_never_hidden() -> None:
    tokens = np.where(np.arange(400) % 7 == 3, 302, np.arange(400) % 250)
    special = replace(SPECIAL, all=(300, 301, 302))
    data = MaskedWindows(tokens, 32, "n", special, 0.9, seed=3)
    batch = data.batch(range(len(data)))
    assert not np.isin(batch.labels, special.all).any()
    assert (batch.labels != IGNORE_INDEX).sum() > 0.8 * (400 - 57)
    assert MaskedWindows(np.full(9, 302), 32, "n", special, 0.15, seed=3).batch([0]).num_predictions == 0


def test_windows_of_a_masked_model_begin_once(tmp_path: Path) -> None:
    """RoBERTa's tokenizer begins each text with what each window has as well."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"bos_token": "<s>", "cls_token": "<s>", "sep_token": "<|end|>", "mask_token": "<mask>"}
    )
    begin, end, mask = (tokenizer.get_vocab()[token] for token in ("<s>", "<|end|>", "<mask>"))
    tokenizer.backend_tokenizer.post_processor = RobertaProcessing(("<|end|>", end), ("<s>", begin))
    assert tokenizer("a")["input_ids"] == [begin, *b"a", end]
    path = write(tmp_path / "a.jsonl", '{"text": "abc"}\n{"text": "de"}\n')
    task = Task("masked_lm")
    samples = opened(DataConfig(path=path, sequence_length=10), tmp_path / "cache", task, tokenizer)
    stream = DataConfig(path=path, sequence_length=8, streaming=True)
    batch = in_order(samples.train).batch([0])
    whole = np.where(batch.labels == IGNORE_INDEX, batch.input_ids, batch.labels)[batch.inputs["attention_mask"] == 1]
    assert whole.tolist() == [begin, *b"abc", end, *b"de", end]
    windows = in_order(samples.train)
    assert isinstance(windows, MaskedWindows)
    assert windows.special.all == tuple(sorted((begin, end, mask)))
    streamed = open_samples(stream, tokenize_all(stream, tokenizer, "masked_lm"), task, 3, lambda: tokenizer)
    batch = streamed.train.batch([0])
    assert np.where(batch.labels == IGNORE_INDEX, batch.input_ids, batch.labels)[0].tolist().count(begin) == 1


def open_narrow_windows(directory: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"cls_token": "<s>", "sep_token": "<|end|>", "mask_token": "<mask>"})
    path = write(Path(directory, "a.txt"), "abc" * 40)
    opened(DataConfig(path=path, sequence_length=2), Path(directory, "cache"), Task("masked_lm"), tokenizer)


@pytest.mark.long
def test_windows_without_space_for_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sequence_length=2"):
        open_narrow_windows(str(tmp_path))
    program = f"from tests.data.test_tasks import open_narrow_windows; open_narrow_windows({str(tmp_path)!r})"
    ended = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=False)
    assert "DataError: data.sequence_length=2" in ended.stderr, "asserts are left out"


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    config = DataConfig(path=write(tmp_path / "a.txt", "abc" * 40), sequence_length=8)
    with pytest.raises(DataError, match="needs a mask token"):
        opened(config, tmp_path / "cache", Task("masked_lm"))


@pytest.mark.parametrize(
    ("task", "values", "words"),
    [
        ("seq2seq", {}, "data.kind=text does not fit model.task=seq2seq.*instruction or pairs"),
        ("masked_lm", {"kind": "chat"}, "data.kind=chat does not fit"),
        ("masked_lm", {"packing": True}, "data.packing=true is for model.task=causal_lm"),
        ("causal_lm", {"mask_fraction": 0.3}, "mask_fraction=0.3 is for model.task=masked_lm"),
        (
            "seq2seq",
            {"mixture": {"a": {"path": "x", "kind": "pairs"}}, "path": "", "eval_path": "y"},
            "data.kind=text does not fit model.task=seq2seq",
        ),
        ("causal_lm", {"target_length": 3}, "target_length=3 is for model.task=seq2seq"),
        ("seq2seq", {"kind": "pairs", "label_column": "x"}, "label_column=x is for"),
    ],
)
def test_data_that_does_not_fit_the_task(task: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_task(task, DataConfig(**{"path": "x", **values}))


def test_an_evaluation_refuses_what_it_has_no_use_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text")
    check_text(DataConfig(path=path))
    with pytest.raises(ConfigError, match=r"data\.mask_fraction=0\.3 is for model\.task=masked_lm"):
        check_text(DataConfig(path=path, mask_fraction=0.3))


def test_models_that_are_not_for_the_task() -> None:
    bert = BertConfig(architectures=["BertForMaskedLM"])
    check_model_task(bert, "masked_lm")
    check_model_task(T5Config(architectures=["T5ForConditionalGeneration"]), "seq2seq")
    check_model_task(GPT2Config(architectures=["GPT2LMHeadModel"]), "causal_lm")
    for config, task, words in (
        (T5Config(architectures=["T5ForConditionalGeneration"]), "causal_lm", "model.task=seq2seq"),
        (T5Config(), "causal_lm", "model.task=seq2seq"),
        (bert, "causal_lm", "Set model.task=masked_lm, which fits a BertForMaskedLM."),
        (bert, "sequence_classification", "needs a BertForSequenceClassification. Convert it with transformers'"),
        (bert, "seq2seq", "none of type bert"),
        (T5Config(architectures=["T5ForConditionalGeneration"]), "causal_lm", "encoder-decoder"),
    ):
        with pytest.raises(ModelError, match=words):
            check_model_task(config, task)
