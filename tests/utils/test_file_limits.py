"""FSDP_SHARD_LIMITS, and what files that describe checkpoints may take."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.utils import Limits, limits, parse_json, read_bounded, read_json, refuse_excess


def test_the_variable_changes_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARD_LIMITS", " metadata_bytes=2GB, render_seconds=10,tensors=1_000_000 ,")
    assert (limits().metadata_bytes, limits().render_seconds, limits().tensors) == (2 * 10**9, 10.0, 10**6)
    monkeypatch.delenv("FSDP_SHARD_LIMITS")
    assert limits() == Limits()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor=3", r"tensor is not a limit \(did you mean tensors\?\)"),
        ("tensors", "tensors= is wrong"),
        ("tensors=-1", "tensors=-1 is wrong; write a whole number above 0"),
        ("tensors=1.5", "write a whole number"),
        ("nesting=x", "write a whole number"),
        ("metadata_bytes=0", "metadata_bytes=0 is not a size"),
        ("render_seconds=nan", "write seconds, such as 10"),
        ("render_seconds=inf", "write seconds"),
    ],
)
def test_wrong_names_and_values_are_errors(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARD_LIMITS", text)
    with pytest.raises(ConfigError, match=f"FSDP_SHARD_LIMITS: .*{message}"):
        limits()


def test_an_error_names_the_limit_and_how_to_raise_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b" " * (17 << 20) + b"{}")
    with pytest.raises(
        CheckpointError, match=r"config\.json takes 17\.0 MiB.*limit is 16\.0 MiB.*FSDP_SHARD_LIMITS=config_bytes=VALUE"
    ):
        read_json(file)
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "config_bytes=20MB")
    assert read_json(file) == {}
    with pytest.raises(CheckpointError, match=r"too many: the limit is 500,000"):
        refuse_excess(500_001, "tensors", "too many")


@pytest.mark.parametrize("start", [b"", b'{"a": "', b"x" * 5_000_000])
def test_a_hole_is_found_before_it_is_read(start: bytes, tmp_path: Path) -> None:
    file = tmp_path / "hole"
    file.write_bytes(start)
    os.truncate(file, 1000 << 20)
    with pytest.raises(CheckpointError, match=r"nothing but zeros from byte .* it was not written or downloaded"):
        read_bounded(file, "metadata_bytes")


def test_what_is_no_regular_file_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    caught = list[str]()

    def read() -> None:
        try:
            read_json(tmp_path / "fifo")
        except CheckpointError as error:
            caught.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert caught == [f"{tmp_path / 'fifo'} is not a regular file, so it is not read."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("[" * 65 + "]" * 65, "nested too deeply.*FSDP_SHARD_LIMITS=nesting"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested too deeply"),
        (f'{{"a": {"9" * 5000}}}', "not valid JSON"),
        (json.dumps([[]] * 3_000_000), "many empty or tiny parts"),
        (json.dumps([{}] * 3_000_000), "many empty or tiny parts"),
    ],
)
def test_json_that_takes_a_multiple_of_its_size_is_refused(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"x.json.* {message}"):
        parse_json(text.encode(), "x.json")


def test_nesting_as_deep_as_the_limit_is_parsed() -> None:
    assert parse_json(b"[" * 64 + b"]" * 64, "x.json")


@pytest.mark.long
def test_the_largest_checkpoints_are_far_below() -> None:
    """DeepSeek-V3: 91,991 tensors in 163 files; a manifest of its weights in float32, one record a line."""
    names = [f"model.layers.{n % 61}.mlp.experts.{n // 61}.gate_proj.weight_scale_inv" for n in range(91_991)]
    index = {name: f"model-{n % 163:05d}-of-000163.safetensors" for n, name in enumerate(names)}
    data = json.dumps({"metadata": {"total_size": 688_586_727_753}, "weight_map": index}, indent=2).encode()
    assert len(parse_json(data, "index")["weight_map"]) == 91_991
    header = {
        name: {"dtype": "F32", "shape": [2048, 7168], "data_offsets": [n, n + 58720256]} for n, name in enumerate(names)
    }
    data = json.dumps(header, separators=(",", ":")).encode()
    assert data.count(b'"data_offsets"') < limits().tensors / 5
    assert len(parse_json(data, "header")) == 91_991
    chunks = json.dumps(["0123456789abcdef" * 2] * 100_000).encode()  # a manifest has one for each MiB
    assert len(parse_json(chunks, "chunks")) == 100_000
    assert len(chunks) * 27 < limits().metadata_bytes  # 2.7 TB
