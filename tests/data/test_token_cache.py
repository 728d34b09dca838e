"""Text to token files: the stream is what was written, the cache is found again, and nothing half-made stays."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PhobertTokenizer, PreTrainedTokenizerFast, ProphetNetTokenizer

from fsdp_shard.data.config import DataConfig, kind_of
from fsdp_shard.data.kinds.kind import plain_ids
from fsdp_shard.data.kinds.plain_text import TextKind
from fsdp_shard.data.kinds.running_text import RunningText
from fsdp_shard.data.sources.row import Row
from fsdp_shard.data.sources.source import DatasetSource, open_source
from fsdp_shard.data.tokenized.encoder import tokenizer_state
from fsdp_shard.data.tokenized.token_cache import tokenize
from fsdp_shard.data.tokenized.token_file import TokenFile
from fsdp_shard.errors import DataError
from tests.data.conftest import END, byte_tokenizer
from tests.data.data_files import write
from tests.support.prepared_data import prepare_data

KIND = TextKind("text", 9)


def file_of(config: DataConfig, tokenizer: Any, cache: Path) -> TokenFile:
    return tokenize(
        open_source(config, False), RunningText.of(config.text_column, tokenizer), tokenizer, cache, config.workers
    )


def ids(file: TokenFile) -> list[int]:
    found: list[int] = np.asarray(file.tokens()).tolist()
    return found


def tokens_of(config: DataConfig, tokenizer: Any, cache: Path) -> list[int]:
    return ids(file_of(config, tokenizer, cache))


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
    file = file_of(config, tokenizer, tmp_path / "cache")
    assert (file.num_rows, file.num_dropped, file.num_tokens) == (4, 1, len(STREAM))
    assert np.asarray(file.tokens()).dtype == np.uint16


def test_text_that_begins_with_many_empty_documents(tmp_path: Path, tokenizer: Any) -> None:
    """More than the digest takes together: the first document that is left has no separator before it."""
    lines = [json.dumps({"text": text}) + "\n" for text in [*[" "] * 300, "one", "two"]]
    path = write(tmp_path / "a.jsonl", "".join(lines))
    file = file_of(DataConfig(path=path), tokenizer, tmp_path / "cache")
    assert ids(file) == [*b"one", END, *b"two"]
    path = write(tmp_path / "b.jsonl", "".join(lines[300:]))
    assert file_of(DataConfig(path=path), tokenizer, tmp_path / "cache").digest == file.digest


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


def test_a_text_longer_than_the_csv_limit(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.csv", "text\n" + "x" * 200_000 + "\n")
    assert tokens_of(DataConfig(path=path), tokenizer, tmp_path / "cache") == [ord("x")] * 200_000


def test_hub_source_reads_through_datasets(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_dataset` takes a directory as it takes a hub name."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    write(tmp_path / "set" / "train.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    source = DatasetSource("data.path=a/set", str(tmp_path / "set"), None, "train")
    assert [row.values["text"] for row in source.rows(["text"])] == ROWS
    file = made(source, tokenizer, tmp_path / "cache")
    assert ids(file) == STREAM
    assert made(source, tokenizer, tmp_path / "cache") == file
    with pytest.raises(DataError, match="split=nothing"):
        next(DatasetSource("data.path=a/set", str(tmp_path / "set"), None, "nothing").rows(["text"]))
    with pytest.raises(DataError, match=r"data\.path=a/set has no column 'body'; it has text"):
        tokenize(source, TextKind("body", 9), tokenizer, tmp_path / "cache")


class OneRead:
    """A source that is to be read once."""

    name = "it"

    def __init__(self) -> None:
        self.num_reads = 0

    def rows(self, columns: Any) -> Iterator[Row]:
        self.num_reads += 1
        yield Row("row 0", {"text": "text"})

    def fingerprint(self) -> str:
        return "x"


def made(source: Any, tokenizer: Any, cache: Path) -> TokenFile:
    return tokenize(source, RunningText.of("text", tokenizer), tokenizer, cache)


def test_the_cache_is_found_again(tmp_path: Path, tokenizer: Any) -> None:
    source = OneRead()
    first = made(source, tokenizer, tmp_path)
    assert made(source, tokenizer, tmp_path) == first
    assert source.num_reads == 1
    assert [path.name for path in tmp_path.iterdir()] == [Path(first.directory).name], "nothing temporary is left"
    assert {path.name for path in Path(first.directory).iterdir()} == {"meta.json", *first.sizes}, "but the rows"


@pytest.mark.parametrize("damage", ["cut", "meta", "gone", "old"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, tokenizer: Any, damage: str) -> None:
    source = OneRead()
    found = made(source, tokenizer, tmp_path)
    meta, tokens = Path(found.directory) / "meta.json", Path(found.directory) / next(iter(found.sizes))
    if damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif damage == "meta":
        meta.write_text("{")
    elif damage == "gone":
        tokens.unlink()
    else:
        meta.write_text(meta.read_text().replace('"format_version": 4', '"format_version": 3'))
    assert ids(made(source, tokenizer, tmp_path)) == [*b"text"]
    assert source.num_reads == 2


def test_what_the_fingerprint_covers(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.txt", "some text")

    def name(tokenizer: Any = tokenizer, **settings: Any) -> str:
        return file_of(DataConfig(path=path, **settings), tokenizer, tmp_path / "cache").directory

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
        def rows(self, columns: Any) -> Iterator[Row]:
            yield Row("row 0", {"text": "x" * (2 << 20)})
            raise DataError("later")

    with pytest.raises(DataError, match="later"):
        made(Broken(), tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_worker_is_its_own_and_leaves_nothing(tmp_path: Path, tokenizer: Any, workers: int) -> None:
    """The template refuses a row, which is found when that is tokenized."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no ' + messages[0]['content']) }}"
    rows = [{"messages": [{"role": "assistant", "content": str(number)}]} for number in range(600)]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=path, kind="chat")
    with pytest.raises(DataError, match=r"a\.jsonl, line \d+: the chat template of .* rejects the conversation: no \d"):
        tokenize(open_source(config, False), kind_of(config), tokenizer, tmp_path / "cache", workers)
    assert list((tmp_path / "cache").iterdir()) == []


class Deadly(PreTrainedTokenizerFast):
    """Kills the process that tokenizes a certain text, as the out-of-memory killer does."""

    def _encode_plus(self, text: Any, *arguments: Any, **settings: Any) -> Any:
        if isinstance(text, list) and any("kill" in one for one in text):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._encode_plus(text, *arguments, **settings)


def test_a_killed_worker_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    rows = [{"text": f"{number} " + "word " * 2000} for number in range(600)] + [{"text": "kill"}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"One of the data\.workers=2 processes that tokenize was killed"):
        file_of(DataConfig(path=path, workers=2), framed(Deadly), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.long
def test_nothing_of_a_killed_writer_is_taken_for_complete(tmp_path: Path, tokenizer: Any) -> None:
    """The process is killed while it tokenizes; the next one makes the same tokens, in a directory of its own."""
    rows = [{"text": f"{number} " + "word " * 2000} for number in range(600)] + [{"text": "kill"}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=path)
    child = os.fork()
    if child == 0:
        file_of(config, framed(Deadly), tmp_path / "cache")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.endswith(".partial")
    file = file_of(config, tokenizer, tmp_path / "cache")
    assert ids(file) == tokens_of(config, tokenizer, tmp_path / "another")
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {left.name, Path(file.directory).name}


def test_workers_leave_this_process_as_it_was(
    tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    environment, before = os.environ, dict(os.environ)
    config = DataConfig(path=write(tmp_path / "a.txt", ("x" * 3000 + "\n") * 700), sample_by="line", workers=2)
    file = file_of(config, tokenizer, tmp_path / "two")
    assert len(file.sizes) == 2
    assert os.environ is environment
    assert dict(os.environ) == before
    assert os.getenv("TOKENIZERS_PARALLELISM") == before.get("TOKENIZERS_PARALLELISM")
    assert not datasets.are_progress_bars_disabled()
    assert capfd.readouterr() == ("", ""), "no bar in a file"
    one = file_of(replace(config, workers=1), tokenizer, tmp_path / "one")
    assert (one.digest, ids(one)) == (file.digest, ids(file))


@pytest.mark.long
def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    import pty
    import termios

    path = write(tmp_path / "a.txt", "some text")
    main, other = pty.openpty()
    termios.tcsetwinsize(main, (24, 250))
    code = (
        "from tests.data.conftest import byte_tokenizer; from tests.data.test_token_cache import *;"
        f"file_of(DataConfig(path={path!r}), byte_tokenizer(), Path({str(tmp_path)!r}) / 'cache')"
    )
    subprocess.run([sys.executable, "-c", code], stderr=other, stdout=other, check=True)
    os.close(other)
    printed = ""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(main, 1 << 16):
            printed += part.decode()
    assert f"tokenizing data.path={path}: 100%" in printed
    assert "Warning" not in printed


def test_slices_of_tokens_are_those_of_an_array(tmp_path: Path, tokenizer: Any) -> None:
    """Over the bounds of the batches in which they were written; nothing is read into memory before."""
    words = [f"{number}" * 3000 for number in range(700)]
    path = write(tmp_path / "a.txt", "\n".join(words))
    tokens: Any = file_of(DataConfig(path=path, sample_by="line"), tokenizer, tmp_path).tokens()  # of Arrow
    whole = np.asarray(tokens)
    expected = [*words[0].encode()]
    for word in words[1:]:
        expected += [END, *word.encode()]
    assert whole.tolist() == expected
    ends = np.cumsum([len(chunk) for chunk in tokens.chunks])
    assert len(ends) > 3
    for start, stop in [
        (0, 5),
        (0, 0),
        (7, 7),
        *((int(end) - 3, int(end) + 3) for end in ends),
        (5, len(whole)),
        (9, 3),
    ]:
        assert np.asarray(tokens[start:stop]).tolist() == whole[start:stop].tolist()
        assert np.asarray(tokens[2:][start:stop][1:]).tolist() == whole[2:][start:stop][1:].tolist()
    assert np.asarray(tokens[3:9], np.int64).dtype == np.int64


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
    tokens = np.asarray(file_of(config, tokenizer, tmp_path / "cache").tokens())
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [ord("a"), 257 + 65_999]


def test_equal_streams_have_equal_digests_whatever_they_came_from(tmp_path: Path, tokenizer: Any) -> None:
    files = make_files(tmp_path)
    found = [file_of(DataConfig(path=path), tokenizer, tmp_path / "c") for path in files.values()]
    assert len({file.directory for file in found}) == 3
    assert len({file.digest for file in found}) == 1


def test_an_unseen_cache_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"every rank must see the token cache.*data\.cache_dir"):
        TokenFile(str(tmp_path / "none"), {"tokens.arrow": 3}, 1, 0, 3, "", 1).tokens()


def test_a_cache_that_cannot_be_written(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written .*data\.cache_dir"):
        made(OneRead(), tokenizer, tmp_path / "file" / "cache")


def test_tokens_are_mapped(tmp_path: Path, tokenizer: Any) -> None:
    file = made(OneRead(), tokenizer, tmp_path)
    before = pyarrow.total_allocated_bytes()
    tokens = file.tokens()
    assert len(tokens) == 4
    assert pyarrow.total_allocated_bytes() == before


def test_what_changes_tokens_changes_their_name(tmp_path: Path) -> None:
    source = open_source(DataConfig(path=write(tmp_path / "a.txt", "ab")), False)

    def name(**changes: Any) -> str:
        tokenizer = byte_tokenizer()
        for key, value in changes.items():
            setattr(tokenizer, key, value)
        return made(source, tokenizer, tmp_path / "cache").directory

    class Targets(PreTrainedTokenizerFast):
        """As those of translation models, with a language before a target."""

        def _switch_to_target_mode(self) -> None:
            self.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<|end|> $A", special_tokens=[("<|end|>", END)]
            )

        def _switch_to_input_mode(self) -> None:
            self.backend_tokenizer.post_processor = None

    targets = Targets(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|end|>")
    names = [
        name(),
        name(split_special_tokens=True),
        name(bos_token="a"),
        made(source, targets, tmp_path / "cache").directory,
    ]
    assert len(set(names)) == 4
    assert name() == names[0]


def test_what_a_tokenizer_in_python_was_made_with_changes_its_name(tmp_path: Path) -> None:
    """The vocabulary alone does not say what becomes of a text: the case of letters, or the order of merges."""
    letters = [chr(number) for first in "aA" for number in range(ord(first), ord(first) + 26)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[X_SEP]"]
    words = write(tmp_path / "words.txt", "\n".join([*special, *letters, *(f"##{letter}" for letter in letters)]))
    vocabulary = write(tmp_path / "vocab.txt", "".join(f"{piece} 1\n" for piece in ("a@@", "c", "ab@@", "bc")))
    made: dict[str, Callable[[], Any]] = {
        "lower": lambda: ProphetNetTokenizer(words, do_lower_case=True),
        "as it is": lambda: ProphetNetTokenizer(words, do_lower_case=False),
    }
    for name, merges in (("a, b", "a b 1\nab c</w> 1\n"), ("b, c", "b c</w> 1\na b 1\n")):
        merged = write(tmp_path / name, merges)
        made[name] = lambda merged=merged: PhobertTokenizer(vocabulary, merged)  # type: ignore[misc]  # with a default
    path, cache = write(tmp_path / "a.jsonl", '{"text": "abc ABC"}\n'), tmp_path / "cache"
    config = DataConfig(path=path, sequence_length=8)
    found = {}
    for name, make in made.items():
        found[name] = ids(file_of(config, make(), cache))
        states = []
        for directory in (tmp_path / f"{name} first", tmp_path / f"{name} second"):
            make().save_pretrained(directory)
            loaded = AutoTokenizer.from_pretrained(directory)
            assert ids(file_of(config, loaded, cache)) == found[name]
            states.append(json.dumps(tokenizer_state(loaded)))
        assert states[0] == states[1], "wherever it is"
    assert found["lower"] != found["as it is"]
    assert found["a, b"] != found["b, c"]


def test_others_may_read_the_cache(tmp_path: Path, tokenizer: Any) -> None:
    before = os.umask(0o022)
    try:
        directory = made(OneRead(), tokenizer, tmp_path).directory
    finally:
        os.umask(before)
    assert Path(directory).stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000], ids=["digits", "depth"])
def test_json_that_python_does_not_read(tmp_path: Path, value: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": {value}\n')
    with pytest.raises(DataError, match="line 1 is not JSON"):
        list(open_source(DataConfig(path=path), False).rows(["text"]))


VALUES = {"bytes": b"ab", "date": datetime.date(2020, 1, 2), "Decimal": decimal.Decimal("1.50")}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("type_name", VALUES)
def test_values_that_are_no_text(tmp_path: Path, tokenizer: Any, type_name: str, streaming: bool) -> None:
    """Only the first rows are looked at before, and optional columns may be null in them."""
    values = [None, VALUES[type_name]]
    table = pyarrow.table({"instruction": ["q", "q"], "input": values, "output": ["a", "a"], "unused": values})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    given: dict[str, Any] = {"path": f"{tmp_path}/a.parquet", "sequence_length": 99, "streaming": streaming}
    config = DataConfig(**given, kind="instruction", shuffle_buffer=1)
    wrong = rf"a\.parquet, row 1: column 'input' holds {type_name}, expected text\. Set data\.input_column"
    with pytest.raises(DataError, match=wrong):
        prepare_data(config, tokenizer, tmp_path / "cache").train.batch([0, 1])
    with pytest.raises(DataError, match=rf"row 1: column 'unused' holds {type_name}, expected text"):
        prepare_data(replace(config, kind="text", text_column="unused"), tokenizer, tmp_path / "cache").train.batch([0])
    pairs = replace(config, kind="pairs", source_column="instruction", target_column="output")
    assert prepare_data(pairs, tokenizer, tmp_path / "cache").train.batch([0, 1]).num_predictions


TWO_DAYS = 2 * 24 * 3600


def left(directory: Path, *, file_age: float, age: float = TWO_DAYS) -> Path:
    directory.mkdir(parents=True)
    (directory / "part").write_text("half")
    now = time.time()
    os.utime(directory / "part", (now - file_age, now - file_age))
    os.utime(directory, (now - age, now - age))
    return directory


def test_what_a_killed_run_has_left_goes_with_the_next_one_that_writes(tmp_path: Path, tokenizer: Any) -> None:
    old = left(tmp_path / ".old.partial", file_age=TWO_DAYS)
    in_use = left(tmp_path / ".in-use.partial", file_age=5)
    new = left(tmp_path / ".new.partial", file_age=5, age=5)
    other = left(tmp_path / "of-somebody-else", file_age=TWO_DAYS)
    elsewhere = left(tmp_path / "elsewhere" / "kept", file_age=TWO_DAYS)
    (tmp_path / ".link.partial").symlink_to(elsewhere)
    os.utime(tmp_path / ".link.partial", (0, 0), follow_symlinks=False)
    made = tokens_of(DataConfig(path=write(tmp_path / "a.txt", "words")), tokenizer, tmp_path)
    assert made == [*b"words"]
    assert not old.exists()
    assert all(kept.exists() for kept in (in_use, new, other)), "another machine may be writing it"
    assert (elsewhere / "part").exists()
