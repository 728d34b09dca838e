from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_shard.errors import ModelError
from fsdp_shard.models.loading import build_on_meta, load_config, load_tokenizer, rebuild_buffers, resolve
from tests.support.tiny import llama, llama_config


def test_an_empty_model_has_no_memory_and_the_right_class() -> None:
    model = build_on_meta(llama_config(), "bfloat16")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_rebuilt_buffers_are_bit_equal_to_from_pretrained(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = build_on_meta(load_config(resolve(str(tmp_path))))
    rebuild_buffers(model, "cpu")
    buffers = dict(model.named_buffers())
    assert buffers
    for name, value in wanted.named_buffers():
        assert torch.equal(buffers[name], value), name
    assert all(p.is_meta for p in model.parameters()), "parameters are not this function's business"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: None, "is no model: it has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "is not valid JSON"),
        (lambda d: (d / "config.json").write_text("{}"), "names no model_type"),
        (
            lambda d: (d / "config.json").write_text(json.dumps({"model_type": "llama"})),
            "has no weights: it holds config",
        ),
    ],
)
def test_a_directory_that_is_no_model(tmp_path: Path, make: object, message: str) -> None:
    make(tmp_path)  # type: ignore[operator]
    with pytest.raises(ModelError, match=message) as raised:
        resolve(str(tmp_path))
    assert str(tmp_path) in str(raised.value)


def test_planning_needs_no_weights(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)
    assert resolve(str(tmp_path), need_weights=False).directory == tmp_path


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"\./nowhere does not exist"):
        resolve("./nowhere")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        resolve(str(tmp_path / "model.gguf"))


def test_an_unknown_architecture_and_a_missing_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-thing"}))
    source = resolve(str(tmp_path), need_weights=False)
    with pytest.raises(ModelError, match="cannot be used"):
        load_config(source)
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_tokenizer(source)
