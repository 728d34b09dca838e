"""The parent's check of the data settings: each mistake is one clear error, and nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.data.config import DataConfig, cache_directory
from fsdp_shard.data.sources.source import open_source
from fsdp_shard.data.validate import check_data
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.utils import check
from tests.data.data_files import write


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "some text"),
        ("a.md", "# text"),
        ("a.jsonl", '{"text": ""}\n{"text": null}\n{"text": "x"}\n'),
        ("a.jsonl", '{"text": "\\ud83d\\ude00"}\n'),
        ("a.csv", 'text,n\n"one, two",1\n'),
    ],
)
def test_good_files_pass(tmp_path: Path, name: str, content: str) -> None:
    check_data(DataConfig(path=write(tmp_path / name, content)))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", "is empty: it has 1 row, none with anything to learn"),
        ("a.txt", " \n\n ", "it has 1 row, none"),
        ("a.jsonl", "", "it has 0 rows"),
        ("a.jsonl", '{"text": ""}\n', "it has 1 row, none"),
        ("a.jsonl", '{"texts": "x"}\n', "no column 'text' (did you mean texts?); it has texts"),
        ("a.jsonl", '{"text": "x"\n', "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is a JSON list"),
        ("a.jsonl", '{"text": ""}\n{"text": "half \\ud83d"}\n', "line 2 has half of a surrogate pair"),
        ("a.jsonl", '\n{"text": ["x"]}\n', "line 2: column 'text' holds list"),
        ("a.csv", "", "is empty"),
        ("a.csv", "body\nx\n", "no column 'text'; it has body"),
        ("a.parquet", "no parquet", "cannot be read as Parquet"),
        ("a.txt", b"\xff\xfe\xff", "is not UTF-8"),
        ("a.pdf", "x", "expected .txt, .md, .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        check_data(DataConfig(path=path))
    assert path in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("path", ["missing.txt", "/no/such/directory", "./data", "a/b/c", "train.jsonl"])
def test_missing_file(path: str) -> None:
    with pytest.raises(DataError, match="no such file or directory") as caught:
        check_data(DataConfig(path=path))
    assert f"data.path={path}" in str(caught.value)


def test_held_out_text_is_checked_too(tmp_path: Path) -> None:
    good = write(tmp_path / "a.txt", "text")
    with pytest.raises(DataError, match=r"data\.eval_path=missing\.txt"):
        check_data(DataConfig(path=good, eval_path="missing.txt"))


def test_settings_of_texts_that_no_source_has(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "text")
    rows = write(tmp_path / "a.jsonl", '{"text": "a", "content": "b"}\n')
    cases: list[tuple[str, dict[str, Any], str]] = [
        (text, {"text_column": "content"}, "text_column=content is for rows with columns"),
        (rows, {"sample_by": "line"}, "sample_by=line is for plain text files"),
    ]
    for path, given, said in cases:
        with pytest.raises(ConfigError, match=f"data.{said}, and data.path="):
            check_data(DataConfig(path=path, **given))
    # One of several sources is enough.
    check_data(DataConfig(path=text, eval_path=rows, text_column="content"))
    check_data(DataConfig(path=str(tmp_path), text_column="content", sample_by="line"))
    mixture = {"a": {"path": text}, "b": {"path": rows}}
    check_data(DataConfig(path="", mixture=mixture, text_column="content", sample_by="line"))
    with pytest.raises(ConfigError, match=r"data\.sample_by=line is for plain text files, and data\.mixture\.b\.path="):
        check_data(DataConfig(path="", mixture={"a": {"path": text}, "b": {"path": rows, "sample_by": "line"}}))


def test_directories(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    write(tmp_path / "none" / "a.bin", "x")
    with pytest.raises(DataError, match="without text"):
        check_data(DataConfig(path=str(tmp_path / "none")))
    write(tmp_path / "some" / "deep" / "b.txt", "x")
    check_data(DataConfig(path=str(tmp_path / "some")))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match="not a regular file"):
        check_data(DataConfig(path=str(tmp_path / "a.txt")))


def test_unknown_hub_name_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"data\.path=nobody/nothing is neither a local file nor a dataset"):
        check_data(DataConfig(path="nobody/nothing"))


def test_an_empty_path_is_no_directory() -> None:
    with pytest.raises(DataError, match=r"path is empty; give a text file"):
        check_data(DataConfig(path=""))
    with pytest.raises(ConfigError, match=r"^data\.mixture\.a\.path is null, expected a str\.$"):
        check_data(DataConfig(path="", mixture={"a": {"path": None}}))


def test_a_subset_is_of_what_is_on_the_hub(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text")
    open_source(DataConfig(path="owner/name", subset="raw", eval_path=path), held_out=True)
    open_source(DataConfig(path=path, subset="raw", eval_path="owner/name"), held_out=False)
    with pytest.raises(ConfigError, match=r"data\.subset=raw is for datasets on the hub"):
        open_source(DataConfig(path=path, subset="raw", eval_path=path), held_out=True)


@pytest.mark.parametrize("extra", [{"subset": "raw"}, {"split": "test"}])
def test_hub_settings_are_refused_for_local_paths(tmp_path: Path, extra: dict[str, Any]) -> None:
    path = write(tmp_path / "a.txt", "text")
    with pytest.raises(ConfigError, match=f"data.{next(iter(extra))}="):
        check_data(DataConfig(path=path, **extra))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DataConfig(), "path is not set"),
        (DataConfig(path="x", sequence_length=0), "sequence_length=0"),
        (DataConfig(path="x", eval_fraction=0.6), "eval_fraction=0.6"),
        (DataConfig(path="x", kind="chats"), "kind=chats is not one of text"),
        (DataConfig(path="x", sample_by="page"), "sample_by=page"),
        (DataConfig(path="x", eval_path="y", eval_fraction=0.1), "both say what to hold out"),
    ],
)
def test_settings_out_of_range(config: DataConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(config)


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory(DataConfig(path="a")) == Path("/x/fsdp-shard/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory(DataConfig(path="a")) == Path.home() / ".cache/fsdp-shard/tokens"
    assert cache_directory(DataConfig(path="a", cache_dir="/y")) == Path("/y")


def test_config_modules_and_the_check_import_nothing_heavy(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n')
    code = (
        "import sys; from fsdp_shard.data import DataConfig, check_data; from fsdp_shard.training import AdamWConfig;"
        f"check_data(DataConfig(path={path!r}));"
        "print([m for m in ('torch', 'transformers', 'datasets', 'numpy', 'pyarrow') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
