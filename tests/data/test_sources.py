"""Rows of every kind of file, compressed or not, here or elsewhere: the same rows, from any position, or one error."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.sources import readers
from fsdp_shard.data.sources.datasets_private import quiet_datasets
from fsdp_shard.data.sources.row import document_of
from fsdp_shard.data.sources.source import FileSource, Source, open_source
from fsdp_shard.data.validate import check_data
from fsdp_shard.errors import CheckpointError, ConfigError, DataError
from tests.data.data_files import write
from tests.support.web import served

ROWS = [{"text": f'{number} "ä",\nb' * (number % 4), "n": str(number)} for number in range(150)]
TEXTS = [row["text"] for row in ROWS]
COLUMNS = ("text", "n")


def _csv(delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, COLUMNS, delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return b"\xef\xbb\xbf" + out.getvalue().encode()


def _parquet() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), out, row_group_size=40)
    return out.getvalue()


def _arrow() -> bytes:
    out, table = io.BytesIO(), pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, 40)
    return out.getvalue()


def _json_lines() -> bytes:
    return "\r\n\n".join(json.dumps(row) for row in ROWS).encode()


CONTENT: dict[str, Callable[[], bytes]] = {
    "jsonl": _json_lines,
    "ndjson": _json_lines,
    "json": lambda: json.dumps(ROWS, indent=1).encode(),
    "csv": lambda: _csv(","),
    "tsv": lambda: _csv("\t"),
    "parquet": _parquet,
    "arrow": _arrow,
    "txt": lambda: "\n\n".join(f"{number}\r\nrow" for number in range(150)).encode(),
    "md": lambda: "\n\n".join(f"{number}\r\nrow" for number in range(150)).encode(),
}


def compress(content: bytes, compression: str) -> bytes:
    if compression == ".gz":  # in two parts, as tools that work in parallel write it
        return gzip.compress(content[:100]) + gzip.compress(content[100:])
    if compression == ".zst":
        out = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(out, "zstd") as stream:
            stream.write(content)
        return out.getvalue().to_pybytes()
    return content


def source_of(path: str, **settings: Any) -> Source:
    return open_source(DataConfig(path=path, **settings), False)


def values_of(source: Source, start: Any = None, columns: tuple[str, ...] = COLUMNS) -> list[dict[str, Any]]:
    return [row.values for row, _ in source.read(columns, start)]


FILES = [(kind, end) for kind in CONTENT for end in ("", ".gz", ".zst") if not (end and kind in ("parquet", "arrow"))]


@pytest.mark.parametrize(("kind", "compression"), FILES)
def test_every_kind_of_file_and_any_row_again(tmp_path: Path, kind: str, compression: str) -> None:
    path = write(tmp_path / f"a.{kind.upper()}{compression}", compress(CONTENT[kind](), compression))
    source = source_of(path, sample_by="paragraph")
    placed = [(row, after()) for row, after in source.read(COLUMNS)]
    is_text = kind in ("txt", "md")
    expected = [{"text": f"{number}\nrow"} for number in range(150)] if is_text else ROWS
    assert [row.values for row, _ in placed] == expected
    assert len({row.where for row, _ in placed}) == 150
    for number in (0, 1, 39, 40, 77, 148, 149):
        assert values_of(source, json.loads(json.dumps(placed[number][1]))) == expected[number + 1 :]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_document_is_the_whole_file(tmp_path: Path, compression: str) -> None:
    path = write(tmp_path / f"a.txt{compression}", compress(b"\xef\xbb\xbfone\r\n\r\ntwo\r" + b" " * 100, compression))
    source = source_of(path)
    ((row, after),) = source.read(["text"])
    assert row.values == {"text": "one\n\ntwo\n" + " " * 100}
    assert values_of(source, after()) == []


# After rows 0, 3 and the last one, as version 0.1.0 has written them into its checkpoints.
POSITIONS = {
    "jsonl": [[0, 24, 1], [0, 195, 7], [0, 7788, 299]],
    "csv": [[0, 15, 2], [0, 99, 11], [0, 3761, 374]],
    "parquet": [[0, 0, 1], [0, 0, 4], [0, 0, 150]],
    "txt": [[0, 3, 1], [0, 11, 4], [0, 1388, 449]],
}
STREAM = [
    "line",
    [["b/a.jsonl", 14, "e1fbd856930c4269e6d94f5f5f381db5"], ["b.txt", 100000, "f424e55927bc082448a32ee4d00635ce"]],
]


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_of_version_0_1_0(tmp_path: Path, kind: str) -> None:
    source = source_of(write(tmp_path / f"a.{kind}", CONTENT[kind]()), sample_by="line")
    placed = [after() for _, after in source.read(COLUMNS)]
    assert [placed[0], placed[3], placed[-1]] == POSITIONS[kind]
    assert len(values_of(source, POSITIONS[kind][1])) == len(placed) - 4


def test_what_identifies_streamed_files_is_that_of_version_0_1_0(tmp_path: Path) -> None:
    write(tmp_path / "d" / "b.txt", "b" * 100_000)
    write(tmp_path / "d" / "b" / "a.jsonl", '{"text": "a"}\n')
    assert source_of(str(tmp_path / "d"), sample_by="line").stream_fingerprint() == STREAM


def test_keys_that_rows_lack_are_not_made_up(tmp_path: Path) -> None:
    """The builders of `datasets` add `name: null` to the first message, read 1 as a number and NA as null."""
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "name": "f", "content": {"x": [1, "2"]}}]
    path = write(
        tmp_path / "a.jsonl", json.dumps({"messages": messages[:1]}) + "\n" + json.dumps({"messages": messages})
    )
    assert [row["messages"] for row in values_of(source_of(path))] == [messages[:1], messages]
    path = write(tmp_path / "a.csv", 'text,n\nNA,1\n1.50,""\n')
    assert values_of(source_of(path)) == [{"text": "NA", "n": "1"}, {"text": "1.50", "n": ""}]


def test_an_array_may_be_laid_out_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "x" * length, "n": [1, {"a": "]"}]} for length in (0, 1, 40, 3)]
    monkeypatch.setattr(readers, "_CHARACTERS_AT_ONCE", 7)
    layouts = [json.dumps(rows), json.dumps(rows, indent=3), f"\ufeff\n\n{json.dumps(rows)}\n \n", "[\n]", " [ ] "]
    for layout in layouts:
        expected = rows if "x" in layout else []
        assert values_of(source_of(write(tmp_path / "a.json", layout))) == expected
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    assert values_of(source_of(write(tmp_path / "a.json", lines))) == rows, "one object per line"


@pytest.fixture
def memory() -> Any:
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


def test_remote_files(memory: Any, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b/c.jsonl.gz", "b.parquet", ".hidden.jsonl", "other.pdf"):
        kind = name.split(".")[1]
        memory.pipe(f"/d/{name}", compress(CONTENT.get(kind, bytes)(), ".gz" if name.endswith(".gz") else ""))
    assert values_of(source_of("memory://d/b.parquet")) == ROWS
    source = source_of("memory://d")
    assert values_of(source) == 3 * ROWS, "in the order of names"
    assert isinstance(source, FileSource)
    assert [file.name for file in source.files] == ["a.jsonl", "b/c.jsonl.gz", "b.parquet"]
    places = [after() for _, after in source.read(COLUMNS)]
    assert values_of(source, places[200]) == (3 * ROWS)[201:]
    assert values_of(source_of("memory://d/*.jsonl")) == ROWS
    assert values_of(source_of("memory://d/**/*.gz")) == ROWS
    before = source.fingerprint(), source.stream_fingerprint()
    assert (source_of("memory://d").fingerprint(), source_of("memory://d").stream_fingerprint()) == before
    memory.pipe("/d/a.jsonl", b'{"text": "x"}')
    assert source_of("memory://d").fingerprint() != before[0]
    assert source_of("memory://d").stream_fingerprint() != before[1]
    path = write(tmp_path / "a.csv", CONTENT["csv"]())
    assert values_of(source_of(f"file://{path}")) == ROWS
    for gone in ("memory://e", "memory://d/none.jsonl", "memory://d/*.csv"):
        with pytest.raises(DataError, match=r"data\.path=memory://.*: there is no such file or directory"):
            source_of(gone)
    with pytest.raises(DataError, match=r"memory://d/other\.pdf has an unknown extension"):
        source_of("memory://d/other.pdf")
    with pytest.raises(DataError, match=r"data\.path=nowhere://x/a\.jsonl cannot be opened: Protocol not known"):
        source_of("nowhere://x/a.jsonl")
    with pytest.raises(ConfigError, match=r"data\.split=test is for datasets on the hub"):
        source_of("memory://d", split="test")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    with served(tmp_path) as address:
        yield address


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_files_of_a_web_server(tmp_path: Path, web: str, compression: str) -> None:
    rows = [{"text": f"{number} " * 700, "n": ""} for number in range(2000)]  # several times what is asked for at once
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    write(tmp_path / f"a.jsonl{compression}", compress(content, compression))
    source = source_of(f"{web}/a.jsonl{compression}?token=secret")
    assert "secret" not in source.name
    placed = [(row, after()) for row, after in source.read(COLUMNS)]
    assert [row.values for row, _ in placed] == rows
    assert "secret" not in placed[0][0].where
    assert values_of(source, placed[1500][1]) == rows[1501:]
    before = source.fingerprint()
    assert source.fingerprint() == before
    assert [row["text"] for row in values_of(source_of(f"{web}/"))] == [row["text"] for row in rows], "its links"
    with pytest.raises(DataError, match="there is no such file"):
        source_of(f"{web}/none.jsonl")


def test_a_pattern_and_names_that_look_like_one(tmp_path: Path) -> None:
    for name in ("a1.jsonl", "a[1].jsonl", "b.jsonl"):
        write(tmp_path / name, json.dumps({"text": name, "n": ""}))
    assert [row["text"] for row in values_of(source_of(f"{tmp_path}/a*.jsonl"))] == ["a1.jsonl", "a[1].jsonl"]
    assert [row["text"] for row in values_of(source_of(f"{tmp_path}/a[1].jsonl"))] == ["a[1].jsonl"]
    write(tmp_path / "t[1].parquet", _parquet())
    assert values_of(source_of(f"{tmp_path}/t[1].parquet")) == ROWS


@pytest.mark.parametrize("streaming", [False, True])
def test_what_save_to_disk_wrote(tmp_path: Path, streaming: bool) -> None:
    one = datasets.Dataset.from_list(ROWS)
    with quiet_datasets():
        one.save_to_disk(tmp_path / "one", num_shards=2)
        datasets.DatasetDict(train=one, test=one.select(range(3))).save_to_disk(tmp_path / "two")
    source = source_of(str(tmp_path / "one"), streaming=streaming)
    assert values_of(source) == ROWS
    assert values_of(source_of(str(tmp_path / "two"), split="test")) == ROWS[:3]
    if streaming:
        places = [json.loads(json.dumps(after())) for _, after in source.read(COLUMNS)]
        assert values_of(source, places[99]) == ROWS[100:]
    other = source_of(str(tmp_path / "two"), split="test")
    assert source.fingerprint() != other.fingerprint()
    assert source.stream_fingerprint() != other.stream_fingerprint()
    with pytest.raises(DataError, match="has no split 'none'; it has train, test"):
        values_of(source_of(str(tmp_path / "two"), split="none"))
    with pytest.raises(ConfigError, match=r"data\.split=test is for datasets on the hub"):
        source_of(str(tmp_path / "one"), split="test")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(DataError, match="is not a dataset that can be read"):
        values_of(source_of(str(tmp_path / "one")))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_the_format_of_what_save_to_disk_wrote_hides_nothing(tmp_path: Path, streaming: bool, kind: str | None) -> None:
    rows = [{"text": row["text"], "n": number} for number, row in enumerate(ROWS)]
    with quiet_datasets():
        datasets.Dataset.from_list(rows).with_format(kind, columns=["n"]).save_to_disk(tmp_path / "one")
    source = source_of(str(tmp_path / "one"), streaming=streaming)
    assert values_of(source) == rows
    assert {type(row["n"]) for row in values_of(source)} == {int}
    assert source.fingerprint() == source_of(str(tmp_path / "one")).fingerprint()


TRUNCATED = gzip.compress(b'{"text": "x"}\n' * 5000)[:-20]
BAD: list[tuple[str, bytes, str]] = [
    ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz cannot be decompressed as \.gz: Not a gzipped file"),
    ("a.jsonl.zst", b"not zstd at all", r"a\.jsonl\.zst cannot be decompressed as \.zst"),
    ("a.jsonl.gz", TRUNCATED, r"cannot be decompressed as \.gz after line \d+: Compressed file ended"),
    ("a.txt.gz", TRUNCATED, r"cannot be decompressed as \.gz: Compressed file ended"),
    ("a.jsonl.zst", compress(_json_lines(), ".zst")[:-9], r"cannot be decompressed as \.zst: Truncated"),
    ("a.jsonl", gzip.compress(b"x"), r"line 1 is not UTF-8 text .*add \.gz to its name"),
    ("a.csv", compress(b"x", ".zst"), r"line 1 is not UTF-8 text .*add \.zst to its name"),
    ("a.jsonl", b'{"text": "a"}\n' * 3000 + b'{"text": "\xe4"}\n', "line 3001 is not UTF-8 text"),
    ("a.txt", b"one\ntwo \xff\n", "line 2 is not UTF-8 text"),
    ("a.json", b'[{"text": "\xff"}]', "line 1 is not UTF-8 text"),
    ("a.txt", "words".encode("utf-16"), "line 1 is not UTF-8 text"),
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
    ("a.jsonl", b'\n"text"\n', "line 2 is a JSON str; expected one object per line"),
    ("a.json", b'{\n "text": "a"\n}', "line 1 is not JSON .*; expected an array of objects, or one per line"),
    ("a.json", b'[{"text": "a"}, {"text": ]', "row 1 is not JSON"),
    ("a.json", b'[{"text": "a"}, {"text": "b"}', "after row 1 comes ''"),
    ("a.json", b'[{"text": "a"} {"text": "b"}]', "after row 0 comes '{'"),
    ("a.json", b'[{"text": "a"}] x', "after row 0, the array ends before the file"),
    ("a.json", b'[{"text": "a"},]', "row 1 is not JSON"),
    ("a.json", b'[{"text": "a"}, 3]', "row 1 is a JSON int"),
    ("a.json", b"[" * 100_000, "row 0 is not JSON"),
    ("a.csv", b"body,n\na,1\n", r"line 1 \(the header\) has no column 'text'; it has body, n"),
    ("a.tsv", b"text\ttext\na\tb\n", r"line 1 \(the header\) names the column 'text' twice"),
    ("a.csv", b"text,n\na,1\nb\n", r"line 3: it has 1 fields, but .*line 1 \(the header\) names 2.*commas"),
    ("a.tsv", b"text\tn\na\t1\nb\tc\td\n", "line 3: it has 3 fields, but .*tabs"),
    ("a.csv", b'text\n"a\nb"\n"open\nand more\n', "is not CSV: .* in the row that begins in line 4"),
    ("a.parquet", b"PAR1 no", "cannot be read as Parquet"),
    ("a.parquet", _parquet()[:900] + _parquet()[-900:], "cannot be read as Parquet"),
    ("a.arrow", b"no arrow", "cannot be read as Arrow"),
    ("a.arrow", _arrow()[:-2500], "cannot be read as Arrow"),
    ("a.jsonl.bz2", b"x", r"unknown extension; expected \.txt, .*also with \.gz or \.zst"),
    ("a.parquet.gz", gzip.compress(_parquet()), "unknown extension"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_read_is_one_error(
    tmp_path: Path, name: str, content: bytes, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=words) as caught:
        _ = [document_of(row, "text") for row, _ in source_of(path).read(["text"])]
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", ""), "nothing is printed besides"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.txt.gz", "a.txt.zst", "a.json"])
@pytest.mark.parametrize("sample_by", ["document", "paragraph", "line"])
def test_a_bomb_is_defused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sample_by: str) -> None:
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 10_000)
    monkeypatch.setattr(readers, "_CHARACTERS_AT_ONCE", 1000)
    begin = {"csv": "text\n", "json": '[{"text": "', "jsonl": '{"text": "', "txt": ""}[name.split(".")[1]]
    lines = ("x" * 100 + ("\n" if sample_by == "paragraph" and not begin else "")) * 10_000
    path = write(tmp_path / name, compress((begin + lines).encode(), "".join(Path(name).suffixes[1:])))
    with pytest.raises(DataError, match=r"has more than 9\.77 KiB"):
        values_of(source_of(path, sample_by=sample_by))


@pytest.mark.parametrize(
    "given", ["gone.jsonl.gz", "./gone", "~/gone", "/gone/away", "a/b/c", "gone.json", "x.zst", "d/"]
)
def test_a_missing_file_is_not_looked_for_on_the_hub(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(DataError, match="there is no such file or directory"):
        check_data(DataConfig(path=given))


def test_files_below_the_current_directory_are_named_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data" / "faq.csv", "question,answer\na,b\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^data/faq\.csv, .* no column 'text'; .*, or data\.kind=chat, instruction or"):
        check_data(DataConfig(path="data"))
    match = r"'instruction' and no 'output'; it .* Set data\.instruction_column and data\.response_column\."
    with pytest.raises(DataError, match=match):
        check_data(DataConfig(path="data", kind="instruction"))


def test_the_name_of_a_builder_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_dataset("json")` would read what lies in the current directory."""
    write(tmp_path / "a.json", '[{"text": "x"}]')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data\.path=json is a file format of the datasets library"):
        check_data(DataConfig(path="json"))


def test_settings_of_libraries_stay_as_they_were(tmp_path: Path) -> None:
    datasets.logging.set_verbosity(datasets.logging.INFO)
    try:
        limit = csv.field_size_limit()
        for kind in ("csv", "parquet"):
            rows = source_of(write(tmp_path / f"a.{kind}", CONTENT[kind]())).read(COLUMNS)
            next(rows)
            assert csv.field_size_limit() == limit
            assert datasets.logging.get_verbosity() == datasets.logging.INFO
            assert not datasets.are_progress_bars_disabled()
    finally:
        datasets.logging.set_verbosity(datasets.logging.WARNING)


def test_threads_read_csv_at_once(tmp_path: Path) -> None:
    """Fields larger than the limit of the process, which is left as it was."""
    limit, text = csv.field_size_limit(), "x" * 200_000
    paths = [write(tmp_path / f"{number}.csv", "text,n\n" + f"{text},1\n" * 40) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda path: values_of(source_of(path)), paths))
    assert found == [[{"text": text, "n": "1"}] * 40] * 4
    assert csv.field_size_limit() == limit


def test_no_position_is_an_error(tmp_path: Path) -> None:
    source = source_of(write(tmp_path / "a.jsonl", CONTENT["jsonl"]()))
    places: list[Any] = [[1, 0, 0], [0, -1, 0], [0, 0], {}, "x", [0, 0, True]]
    for place in places:
        with pytest.raises(CheckpointError, match=r"is not a position in the 1 files of data\.path="):
            values_of(source, place)
