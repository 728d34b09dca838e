"""Configs, tokenizers and chat templates that take all time or memory are one error, and sound ones are tried once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_shard.errors import ModelError
from fsdp_shard.models import load_config, load_tokenizer, rebuild_buffers
from tests.support.tiny import llama, save_model


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "build_seconds=0.4,render_seconds=0.4")
    return save_model(tmp_path / "model")


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"num_labels": 10**9},
        {"model_type": "qwen2", "num_hidden_layers": 10**9},  # while the config is read
    ],
)
def test_a_config_of_numbers_without_end(values: dict[str, Any], directory: Path) -> None:
    _change(directory / "config.json", **values)
    for load in (load_config, load_tokenizer, load_config):
        with pytest.raises(ModelError, match=r"building the model of .*config\.json takes too much"):
            load(directory)


def test_a_sound_config_is_tried_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_config(directory)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it was tried before"))
    assert load_config(directory).num_hidden_layers == 2


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{% if messages[0].content == 'Hello' %}{{ 2 ** (10**9) }}{% endif %}",
    ],
)
def test_a_chat_template_without_end(template: str, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=f"using the tokenizer or the chat template in {directory} takes too much"):
        load_tokenizer(directory)


def test_a_chat_template_that_fails_is_loaded(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert load_tokenizer(directory).chat_template


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_doubles_its_text(part: str, directory: Path) -> None:
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    _change(directory / "tokenizer.json", **{part: {"type": "Sequence", f"{part}s": [doubling] * 40}})
    with pytest.raises(ModelError, match="takes too much"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"added_tokens_decoder": {str(10**12): {"content": "a"}}}, "has the number 1000000000000.*tokens=VALUE"),
        ({"extra_ids": 10**9}, "has the number 1000000000"),
        ({"model_max_length": 10**30}, None),
    ],
)
def test_numbers_of_tokens(values: dict[str, Any], message: str | None, directory: Path) -> None:
    _change(directory / "tokenizer_config.json", **values)
    if message is None:
        load_tokenizer(directory)
        return
    with pytest.raises(ModelError, match=message):
        load_tokenizer(directory)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_files_that_are_no_regular_ones_or_too_large(file: str, directory: Path) -> None:
    (directory / file).unlink(missing_ok=True)
    os.mkfifo(directory / file)
    with pytest.raises(ModelError, match=f"{file} is not a regular file"):
        load_tokenizer(directory)
    (directory / file).unlink()
    (directory / file).write_bytes(b"{}")
    os.truncate(directory / file, 3 << 30)
    with pytest.raises(ModelError, match=f"{file} is too large to be read: the limit is 16.0 MiB"):
        load_config(directory)


def test_buffers_that_are_computed_are_bounded() -> None:
    model = llama()
    with torch.device("meta"):
        model.register_module("mask", mask := nn.Module())
        mask.register_buffer("bias", torch.empty(10**5, 10**5, dtype=torch.bool), persistent=False)
    with pytest.raises(ModelError, match=r"computes 9\.31 GiB of masks .*FSDP_SHARD_LIMITS=buffer_bytes"):
        rebuild_buffers(model, "cpu")
