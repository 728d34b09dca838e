"""Text to token files: the stream is what was written, the cache is found again, and nothing half-made stays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.kinds.kind import plain_ids
from fsdp_shard.data.sources.readers import read_rows
from fsdp_shard.data.sources.source import HubSource, open_source
from fsdp_shard.data.tokenized.token_cache import TokenFile, fingerprint, tokenize
from fsdp_shard.errors import DataError
from tests.data.conftest import END, byte_tokenizer
from tests.data.test_config import write


def tokens_of(config: DataConfig, tokenizer: Any, cache: Path) -> list[int]:
    return [int(token) for token in tokenize(open_source(config, False), tokenizer, cache).open()]


NAMES = ["a", "b", "c", "d"]
ROWS = ["one", "zwei\n\ndrei ä", "", "four"]
STREAM = [*b"one", END, *"zwei\n\ndrei ä".encode(), END, *b"four"]


def make_files(root: Path) -> dict[str, str]:
    """The same rows in every format that has columns."""
    import csv

    import pyarrow
    import pyarrow.parquet

    write(
        root / "a.jsonl",
        "".join(json.dumps({"name": name, "text": row}) + "\n" for name, row in zip(NAMES, ROWS, strict=True)),
    )
    with (root / "a.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["name", "text"], *zip(NAMES, ROWS, strict=True)])
    pyarrow.parquet.write_table(pyarrow.table({"name": NAMES, "text": ROWS}), root / "a.parquet")
    return {kind: str(root / f"a.{kind}") for kind in ("jsonl", "csv", "parquet")}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_formats_with_columns_give_the_same_stream(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    path = make_files(tmp_path)[kind]
    config = DataConfig(path=path)
    assert tokens_of(config, tokenizer, tmp_path / "cache") == STREAM
    file = tokenize(open_source(config, False), tokenizer, tmp_path / "cache")
    assert (file.num_documents, file.num_empty_documents, file.num_tokens) == (3, 1, len(STREAM))
    assert file.dtype == "<u2"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_another_column(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    config = DataConfig(path=make_files(tmp_path)[kind], text_column="name")
    assert tokens_of(config, tokenizer, tmp_path / "cache") == [*b"a", END, *b"b", END, *b"c", END, *b"d"]


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", [*b"a\nb\n\n\nc\n"]),
        ("paragraph", [*b"a\nb", END, *b"c"]),
        ("line", [*b"a", END, *b"b", END, *b"c"]),
    ],
)
def test_documents_of_plain_text(tmp_path: Path, tokenizer: Any, sample_by: str, expected: list[int]) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfa\r\nb\r\n\r\n\r\nc\r\n")  # as Windows writes it
    assert tokens_of(DataConfig(path=path, sample_by=sample_by), tokenizer, tmp_path / "cache") == expected


def test_a_directory_is_read_in_the_order_of_names(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("b.txt", "a/z.md", "c.jsonl", "ignored.bin"):
        write(tmp_path / "d" / name, '{"text": "c"}' if name == "c.jsonl" else Path(name).stem)
    config = DataConfig(path=str(tmp_path / "d"))
    assert tokens_of(config, tokenizer, tmp_path / "cache") == [*b"z", END, *b"b", END, *b"c"]


def test_hidden_files_are_no_data(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", ".b.txt"):
        write(tmp_path / "d" / name, "ab")
    assert tokens_of(DataConfig(path=str(tmp_path / "d")), tokenizer, tmp_path / "cache") == [*b"ab"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text\nok\nHello, world\n", "line 3: it has 2 fields, but the first line names 1"),
        ("name,text\na,b\nc\n", "line 3: it has 1 fields, but the first line names 2"),
        ('text\nok\n"open\nand more\n', "is not CSV"),
    ],
)
def test_rows_of_csv_that_would_be_cut(tmp_path: Path, content: str, words: str) -> None:
    file = Path(write(tmp_path / "a.csv", content))
    with pytest.raises(DataError, match=words):
        list(read_rows(file, "document", None))


def test_a_text_longer_than_the_csv_limit(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.csv", "text\n" + "x" * 200_000 + "\n")
    assert tokens_of(DataConfig(path=path), tokenizer, tmp_path / "cache") == [ord("x")] * 200_000


def test_hub_source_reads_through_datasets(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_dataset` takes a directory as it takes a hub name."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    write(tmp_path / "set" / "train.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    source = HubSource(f"data.path={tmp_path / 'set'}", str(tmp_path / "set"), None, "train", "text")
    source.check()
    assert list(source.documents()) == ROWS
    file = tokenize(source, tokenizer, tmp_path / "cache")
    assert file.open().tolist() == STREAM
    assert tokenize(source, tokenizer, tmp_path / "cache") == file
    with pytest.raises(DataError, match="split=nothing"):
        HubSource(f"data.path={tmp_path / 'set'}", str(tmp_path / "set"), None, "nothing", "text").check()
    with pytest.raises(DataError, match="no column 'body'"):
        HubSource(f"data.path={tmp_path / 'set'}", str(tmp_path / "set"), None, "train", "body").check()


class OneRead:
    """A source that may be read once."""

    name = "it"

    def __init__(self) -> None:
        self.num_reads = 0

    def documents(self) -> Iterator[str]:
        self.num_reads += 1
        yield "text"

    def fingerprint(self) -> str:
        return "x"

    def check(self) -> None: ...


def test_the_cache_is_found_again(tmp_path: Path, tokenizer: Any) -> None:
    source = OneRead()
    first = tokenize(source, tokenizer, tmp_path)
    assert tokenize(source, tokenizer, tmp_path) == first
    assert source.num_reads == 1
    assert [path.name for path in tmp_path.iterdir()] == [Path(first.directory).name], "nothing temporary is left"


@pytest.mark.parametrize("damage", ["cut", "meta", "gone"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, tokenizer: Any, damage: str) -> None:
    source = OneRead()
    directory = Path(tokenize(source, tokenizer, tmp_path).directory)
    if damage == "cut":
        (directory / "tokens.bin").write_bytes(b"\0")
    elif damage == "meta":
        (directory / "meta.json").write_text("{")
    else:
        (directory / "tokens.bin").unlink()
    assert tokenize(source, tokenizer, tmp_path).open().tolist() == [*b"text"]
    assert source.num_reads == 2


def test_what_the_fingerprint_covers(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.txt", "some text")

    def name(tokenizer: Any = tokenizer, **settings: Any) -> str:
        return fingerprint(open_source(DataConfig(path=path, **settings), False), tokenizer)

    before = name()
    assert name(sequence_length=7, eval_fraction=0.5) == before, "windows are views"
    tokenizer("some text", truncation=True, max_length=2)
    assert name() == before, "what a tokenizer keeps of its last call does not matter"
    assert len({before, name(sample_by="line"), name(byte_tokenizer("<|stop|>")), name(byte_tokenizer(None))}) == 4
    write(tmp_path / "a.txt", "some test")
    assert name() != before


class Shouting(PreTrainedTokenizerFast):
    """Has something of its own to do with a text, as some models' tokenizers have."""

    def _encode_plus(self, text: Any, *arguments: Any, **settings: Any) -> Any:
        texts = [one.upper() for one in text] if isinstance(text, list) else text.upper()
        return super()._encode_plus(texts, *arguments, **settings)


def framed(cls: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **settings: Any) -> PreTrainedTokenizerFast:
    """Puts its end-of-text token after each text that it frames."""
    backend = byte_tokenizer().backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", END)])
    return cls(tokenizer_object=backend, eos_token="<|end|>", **settings)


@pytest.mark.parametrize("make", [byte_tokenizer, framed, partial(framed, split_special_tokens=True)])
def test_ids_are_those_that_a_call_of_the_tokenizer_gives(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer, texts = make(), ["one", "", "zwei ä <|end|> drei", "x" * 600]
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(texts, truncation=True, padding=True, max_length=4)  # what it keeps of that is not asked for again
    found = plain_ids(texts, tokenizer)
    assert found == make()(texts, add_special_tokens=False)["input_ids"]
    assert (END in found[2]) != tokenizer.split_special_tokens


def test_what_a_tokenizer_does_by_itself_is_done() -> None:
    assert plain_ids(["a b"], framed(Shouting)) == [[*b"A B"]]


def test_a_failure_leaves_nothing(tmp_path: Path, tokenizer: Any) -> None:
    class Broken(OneRead):
        def documents(self) -> Iterator[str]:
            yield "x" * (2 << 20)
            raise DataError("later")

    with pytest.raises(DataError, match="later"):
        tokenize(Broken(), tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_text(tmp_path: Path, tokenizer: Any) -> None:
    config = DataConfig(path=write(tmp_path / "a.txt", "x"))
    with pytest.raises(DataError, match="1 token in 1 document"):
        tokens_of(config, tokenizer, tmp_path / "cache")


def test_several_documents_need_an_end_token(tmp_path: Path) -> None:
    config = DataConfig(path=write(tmp_path / "a.txt", "x\ny\n"), sample_by="line")
    with pytest.raises(DataError, match="no end-of-text token"):
        tokens_of(config, byte_tokenizer(None), tmp_path / "cache")


def test_beginning_token_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    template = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 257)])
    path = write(tmp_path / "a.txt", "x\ny\n")
    config = DataConfig(path=path, sample_by="line")
    assert tokens_of(config, tokenizer, tmp_path / "cache") == [*b"x", END, *b"y"]
    tokenizer.backend_tokenizer.post_processor = template
    assert tokens_of(config, tokenizer, tmp_path / "cache") == [257, *b"x", END, 257, *b"y"]


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(66_000)])
    config = DataConfig(path=write(tmp_path / "a.txt", "a<65999>"))
    file = tokenize(open_source(config, False), tokenizer, tmp_path / "cache")
    assert file.dtype == "<u4"
    assert file.open().tolist() == [ord("a"), 257 + 65_999]


def test_equal_streams_have_equal_digests_whatever_they_came_from(tmp_path: Path, tokenizer: Any) -> None:
    files = make_files(tmp_path)
    made = [tokenize(open_source(DataConfig(path=p), False), tokenizer, tmp_path / "c") for p in files.values()]
    assert len({file.directory for file in made}) == 3
    assert len({file.digest for file in made}) == 1


def test_an_unseen_cache_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"every rank must see the token cache.*data\.cache_dir"):
        TokenFile(str(tmp_path / "none"), "<u2", 3, 1, 0, "").open()


def test_a_cache_that_cannot_be_written(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written .*data\.cache_dir"):
        tokenize(OneRead(), tokenizer, tmp_path / "file" / "cache")


def test_tokens_are_mapped_and_read_only(tmp_path: Path, tokenizer: Any) -> None:
    tokens = tokenize(OneRead(), tokenizer, tmp_path).open()
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_what_changes_tokens_changes_their_name(tmp_path: Path) -> None:
    source = open_source(DataConfig(path=write(tmp_path / "a.txt", "a")), False)

    def name(**changes: Any) -> str:
        tokenizer = byte_tokenizer()
        for key, value in changes.items():
            setattr(tokenizer, key, value)
        return fingerprint(source, tokenizer)

    class Targets(PreTrainedTokenizerFast):
        """As those of translation models, with a language before a target."""

        def _switch_to_target_mode(self) -> None:
            self.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<|end|> $A", special_tokens=[("<|end|>", END)]
            )

        def _switch_to_input_mode(self) -> None:
            self.backend_tokenizer.post_processor = None

    targets = Targets(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|end|>")
    names = [name(), name(split_special_tokens=True), name(bos_token="a"), fingerprint(source, targets)]
    assert len(set(names)) == 4
    assert name() == names[0]


def test_others_may_read_the_cache(tmp_path: Path, tokenizer: Any) -> None:
    before = os.umask(0o022)
    try:
        directory = tokenize(OneRead(), tokenizer, tmp_path).directory
    finally:
        os.umask(before)
    assert Path(directory).stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000], ids=["digits", "depth"])
def test_json_that_python_does_not_read(tmp_path: Path, value: str) -> None:
    file = Path(write(tmp_path / "a.jsonl", f'{{"text": {value}\n'))
    with pytest.raises(DataError, match="line 1 is not JSON"):
        list(read_rows(file, "document", None))
