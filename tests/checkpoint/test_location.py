"""One `locate` answers what a path leads to, and a command locates a path and opens its weights once."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.checkpoint import convert, location
from fsdp_shard.checkpoint.io import safetensors_format
from fsdp_shard.checkpoint.location import locate, open_checkpoint
from fsdp_shard.cli import run_command
from fsdp_shard.errors import CheckpointError, ModelError
from tests.support.tiny import llama_config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: None, "is not a model: it has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "is not valid JSON"),
        (lambda d: (d / "config.json").write_text("{}"), "has no model_type"),
    ],
)
def test_a_directory_that_is_no_model(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path)
    found = locate(tmp_path)
    with pytest.raises(ModelError, match=message) as raised:
        found.directory  # noqa: B018  # reading it is the check
    assert str(tmp_path) in str(raised.value)


def test_planning_needs_no_weights(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)
    found = locate(str(tmp_path))
    assert (found.directory, found.tokenizer, found.format) == (tmp_path, tmp_path, None)
    with pytest.raises(CheckpointError, match=r"no checkpoint that fsdp-shard reads: the directory holds config\.json"):
        found.index  # noqa: B018


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist; give a checkpoint"):
        locate("./nowhere")
    with pytest.raises(CheckpointError, match=r"There is no GGUF file .*model\.gguf"):
        locate(tmp_path, "model.gguf")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    with pytest.raises(CheckpointError, match=r"model\.gguf.* GGUF file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_weight_file_has_the_config_of_its_directory(tiny_model: Path) -> None:
    found = locate(tiny_model / "model.safetensors")
    assert (found.directory, found.format) == (tiny_model, "huggingface")
    assert found.index.file == tiny_model / "model.safetensors"
    assert set(found.model_files) == set(locate(tiny_model).model_files)


def test_other_processes_get_the_location_and_open_the_files_themselves(tiny_model: Path) -> None:
    found = locate(tiny_model)
    assert found.index is found.index
    received = pickle.loads(pickle.dumps(found))
    assert received == found
    assert "index" not in vars(received)
    assert received.index.names == found.index.names


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often paths are resolved, and the header of each file is parsed."""
    found: Counter[str] = Counter()
    find, parse = location.find_checkpoint, safetensors_format._header_length

    def counted_find(path: Path, *arguments: Any) -> Any:
        found[f"resolved {path.name}"] += 1
        return find(path, *arguments)

    def counted_parse(data: bytes, size: int, path: Path) -> Any:
        found[path.name] += 1
        return parse(data, size, path)

    monkeypatch.setattr(location, "find_checkpoint", counted_find)
    monkeypatch.setattr(safetensors_format, "_header_length", counted_parse)
    monkeypatch.setattr("fsdp_shard.cli.recipes.start_garbage_collection", lambda: None)  # not in the tests' process
    return found


@pytest.fixture
def ranks(tiny_model: Path, tmp_path: Path) -> Path:
    convert(tiny_model, tmp_path / "ranks", format="sharded", ranks=2)
    return tmp_path / "ranks"


ONCE = {"resolved ranks": 1, "shard-00000-of-00002.safetensors": 1, "shard-00001-of-00002.safetensors": 1}


def test_generate_resolves_its_path_and_parses_each_header_once(
    ranks: Path, tmp_path: Path, counts: Counter[str]
) -> None:
    settings = [f"checkpoint={ranks}", "prompt=abc", "generation.max_new_tokens=2", f"run_dir={tmp_path / 'run'}"]
    run_command(["generate", *settings])
    assert json.loads((tmp_path / "run" / "result.json").read_text())["num_new_tokens"] == 2
    assert counts == ONCE


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_other_commands_do_so_too(command: str, ranks: Path, counts: Counter[str]) -> None:
    run_command([command, str(ranks)])
    assert counts == ONCE


def test_a_logit_comparison_opens_each_checkpoint_once(ranks: Path, tiny_model: Path, counts: Counter[str]) -> None:
    run_command(["diff", str(ranks), str(tiny_model), "--logits", "abc"])
    assert counts == ONCE | {f"resolved {tiny_model.name}": 1, "model.safetensors": 1}
