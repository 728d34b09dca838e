"""Rows to examples: what is predicted is the answer, the assistant's words, and nothing else, whatever the template."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_shard.data.config import DataConfig, kind_of
from fsdp_shard.data.samples.batch import IGNORE_INDEX, NO_WINDOW
from fsdp_shard.data.samples.protocol import SourceDataset
from fsdp_shard.data.sources.row import Row
from fsdp_shard.data.sources.source import open_source
from fsdp_shard.data.tokenized.token_cache import tokenize
from fsdp_shard.data.tokenized.token_file import TokenFile
from fsdp_shard.data.validate import check_data, check_tokenizer
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.utils import check
from tests.data.chat_templates import CHATML, TRIMS
from tests.data.chat_tokenizers import chat_tokenizer
from tests.data.conftest import END, byte_tokenizer, predicted_texts
from tests.data.data_files import write
from tests.support.prepared_data import in_order, prepare_data

# ChatML with marks; Qwen3's way of changing with the last turn; two that no answer can be found in.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
)
SHOUTS = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
FORGETS = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a? yes"},
    {"role": "assistant", "content": " yes "},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": "no"},
]


def learnt(config: DataConfig, values: dict[str, Any], tokenizer: Any) -> list[str]:
    """The stretches of text that are predicted, each as it is written."""
    ((example,),) = kind_of(config).encode([Row("row 0", values)], tokenizer)
    return predicted_texts(example, tokenizer)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, [" yes <|im_end|>", "no<|im_end|>"]),
        (MARKED, [" yes <|im_end|>", "no<|im_end|>"]),
        (THINKS, [" yes <|im_end|>", "no<|im_end|>"]),
        (TRIMS, ["yes <|end|>", "no <|end|>"]),
    ],
    ids=["chatml", "marked", "thinks", "trims"],
)
def test_the_assistants_words_alone_are_learnt(template: str, expected: list[str]) -> None:
    tokenizer = chat_tokenizer(template)
    chat = CHAT[1:] if template == TRIMS else CHAT
    assert learnt(DataConfig(kind="chat"), {"messages": chat}, tokenizer) == expected
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [{"from": names[m["role"]], "value": m["content"]} for m in chat]
    assert learnt(DataConfig(kind="chat"), {"conversations": shared}, tokenizer) == expected
    ids = kind_of(DataConfig(kind="chat")).encode([Row("row 0", {"messages": chat})], tokenizer)[0][0].ids
    assert ids == tokenizer.apply_chat_template(chat, return_dict=False)


@pytest.mark.parametrize("words", ["yes", "yes ", " yes", "yes\n", " yes "])
def test_blanks_around_words_that_the_template_trims(words: str) -> None:
    chat = [*CHAT[1:2], {"role": "assistant", "content": words}, *CHAT[3:]]
    assert learnt(DataConfig(kind="chat"), {"messages": chat}, chat_tokenizer(TRIMS)) == ["yes <|end|>", "no <|end|>"]


def test_a_column_without_a_conversation_is_passed_over() -> None:
    row = {"messages": None, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert learnt(DataConfig(kind="chat"), row, chat_tokenizer(CHATML)) == ["b<|im_end|>"]


@pytest.mark.parametrize(("template", "words"), [(SHOUTS, "row 0.*changes"), (FORGETS, "drops the assistant's text")])
def test_templates_that_change_the_words_are_refused(template: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        learnt(DataConfig(kind="chat"), {"messages": CHAT}, chat_tokenizer(template))


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(DataError, match="the model's tokenizer has none"):
        check_tokenizer(DataConfig(kind="chat"), chat_tokenizer(None))
    check_tokenizer(DataConfig(kind="chat"), chat_tokenizer(CHATML))
    with pytest.raises(DataError, match=r"eos_token"):
        check_tokenizer(DataConfig(kind="pairs"), byte_tokenizer(end=None))


def test_instructions() -> None:
    config = DataConfig(kind="instruction", prompt="{instruction} ({input}) -> ", prompt_no_input="{instruction}: ")
    tokenizer = byte_tokenizer()
    row = {"instruction": "Say {input}", "input": "{instruction}", "output": "it"}
    ((example,),) = kind_of(config).encode([Row("r", row)], tokenizer)
    assert bytes(example.ids[:-1]) == b"Say {input} ({instruction}) -> it", "braces in a value stay"
    assert learnt(config, row, tokenizer) == ["it<|end|>"]
    ((example,),) = kind_of(config).encode([Row("r", row | {"input": None})], tokenizer)
    assert bytes(example.ids[:-1]) == b"Say {input}: it"


def test_pairs_for_causal_models() -> None:
    config = DataConfig(kind="pairs", source_column="de", target_column="en")
    ((example,),) = kind_of(config).encode([Row("r", {"de": "ja", "en": "yes"})], byte_tokenizer())
    assert example.ids == [*b"ja\nyes", END]
    assert example.predicted == [False] * 3 + [True] * 4


def rows_file(path: Path, num_rows: int = 700) -> str:
    rows = [{"source": f"number {n}", "target": "" if n % 100 == 7 else "x" * (n % 30)} for n in range(num_rows)]
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def encoded(config: DataConfig, cache: Path) -> TokenFile:
    tokenizer = byte_tokenizer()
    return tokenize(open_source(config, False), kind_of(config), tokenizer, cache, config.workers)


def test_any_number_of_workers_makes_the_same_examples(tmp_path: Path) -> None:
    files = []
    for workers in (1, 3):
        config = DataConfig(path=rows_file(tmp_path / "a.jsonl"), kind="pairs", workers=workers)
        files.append(encoded(config, tmp_path / str(workers)))
    one, three = (file.examples() for file in files)
    for name in ("tokens", "predicted", "ends", "first", "labels"):
        assert np.asarray(getattr(one, name)).tolist() == np.asarray(getattr(three, name)).tolist()
    assert [len(file.sizes) for file in files] == [1, 3]
    assert files[0].digest == files[1].digest
    assert files[0].num_dropped == 31, "every 30th and seven others have no target"
    assert len(one) == files[0].num_examples == 700 - 31
    again = encoded(DataConfig(path=str(tmp_path / "a.jsonl"), kind="pairs"), tmp_path / "1")
    assert again == files[0]
    assert len(list((tmp_path / "1").iterdir())) == 1


def test_rows_that_are_too_long_are_cut_and_counted(tmp_path: Path) -> None:
    rows = [("a" * 9, "b"), ("a" * 3, "bcdefgh"), ("a", "b"), ("aa", "")]
    path = write(tmp_path / "a.csv", "source,target\n" + "".join(f"{a},{b}\n" for a, b in rows))
    config = DataConfig(path=path, kind="pairs", sequence_length=8, cache_dir=str(tmp_path / "cache"))
    samples = prepare_data(config, byte_tokenizer())
    assert samples.notes == (
        "train: 4 rows, 28 tokens, 1 row dropped with nothing to learn, 1 dropped with nothing to learn in the "
        "first 8 tokens, 1 cut to 8 tokens, each in a window of up to 8",
    )
    batch = in_order(samples.train).batch([0, 1, NO_WINDOW])
    assert batch.input_ids[:2].tolist() == [[*b"aaa\nbcde"], [*b"a\nb", 0, 0, 0, 0, 0]]
    ignored = IGNORE_INDEX
    assert batch.labels.tolist() == [
        [ignored] * 3 + [*b"bcdef"],
        [ignored, ord("b"), END, *[ignored] * 5],
        [ignored] * 8,
    ]
    assert in_order(samples.train).num_predictions == 7
    with pytest.raises(DataError, match=r"nothing is left to train on. Increase data\.sequence_length"):
        prepare_data(dataclasses.replace(config, sequence_length=1), byte_tokenizer())


def test_held_out_rows(tmp_path: Path) -> None:
    config = DataConfig(path=rows_file(tmp_path / "a.jsonl", 50), kind="pairs", sequence_length=64, eval_fraction=0.2)
    samples = prepare_data(config, byte_tokenizer(), tmp_path / "cache")
    assert isinstance(samples.held_out, SourceDataset)
    assert (len(in_order(samples.train)), len(samples.held_out)) == (38, 9)
    assert len({samples.train.identity, samples.held_out.identity, samples.held_out.head(3).identity}) == 3
    whole = prepare_data(
        DataConfig(path=config.path, kind="pairs", sequence_length=64), byte_tokenizer(), tmp_path / "cache"
    )
    expected = in_order(whole.train).batch(np.arange(38, 47))
    assert samples.held_out.batch(range(9)).labels.tolist() == expected.labels.tolist()


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("chat", '{"prompt": "x"}', "Set data.messages_column, or data.kind=instruction if"),
        ("chat", '{"messages": "x"}', "not a list of messages"),
        ("chat", '{"messages": [{"who": "x"}]}', "a message has who; expected role and content"),
        ("chat", '{"messages": [{"role": "user", "content": "x"}]}', "it has 1 row, none with anything to learn"),
        ("instruction", '{"instruction": "x"}', "no column 'output'"),
        ("instruction", '{"instruction": "x", "output": 3}', "holds int, expected text. Set data.response_column"),
        ("instruction", '{"instruction": "x", "output": "y", "history": [["a", "b"]]}', "set data.kind=chat"),
        ("pairs", '{"source": "x", "targe": "y"}', "no column 'target' (did you mean targe?); it has source, targe"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, kind: str, content: str, words: str) -> None:
    path = write(tmp_path / "a.jsonl", content + "\n")
    with pytest.raises(DataError) as caught:
        check_data(DataConfig(path=path, kind=kind))
    assert words in str(caught.value)


def test_plain_text_has_no_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"plain text, but data\.kind=chat needs rows"):
        check_data(DataConfig(path=write(tmp_path / "a.txt", "x"), kind="chat"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "chat", "prompt": "{instruction}{input}"}, "prompt=.* is for kind=instruction, not chat"),
        ({"source_format": "{source}"}, "source_format=.* is for kind=pairs, not text"),
        ({"kind": "instruction", "prompt": "{instruction}"}, r"prompt does not contain \{input\}"),
        ({"kind": "pairs", "source_format": "x"}, r"source_format=x does not contain \{source\}"),
        ({"workers": -1}, "workers=-1"),
    ],
)
def test_settings_that_would_do_nothing(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(DataConfig(path="x", **values))
