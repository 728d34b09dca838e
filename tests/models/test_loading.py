from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GotOcr2Config,
    GptOssConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from fsdp_shard.errors import ModelError
from fsdp_shard.models import (
    attention_implementations,
    build_on_meta,
    load_config,
    load_tokenizer,
    model_run_errors,
    rebuild_buffers,
)
from fsdp_shard.models.model_directory import check_model_files
from tests.support.tiny import llama, llama_config


def test_an_empty_model_has_no_memory_and_the_right_class() -> None:
    model = build_on_meta(llama_config(), "bfloat16")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_rebuilt_buffers_are_bit_equal_to_from_pretrained(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = build_on_meta(load_config(tmp_path))
    rebuild_buffers(model, "cpu")
    buffers = dict(model.named_buffers())
    assert buffers
    for name, value in wanted.named_buffers():
        assert torch.equal(buffers[name], value), name
    assert all(p.is_meta for p in model.parameters()), "parameters are not this function's business"


def test_buffers_that_the_model_around_a_module_computes() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
        "mamba_d_ssm": 64,
    }
    config = FalconH1Config(**sizes, mamba_n_heads=4, mamba_d_head=16, intermediate_size=48, ssm_multipliers=[2.0] * 5)
    config.architectures = ["FalconH1ForCausalLM"]
    model = build_on_meta(config, "float32")
    rebuild_buffers(model, "cpu")
    wanted = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    assert any("mup_vector" in name for name in wanted)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, wanted[name]), name


def test_the_attention_of_a_model_is_that_of_its_parts() -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    text = Qwen2Config(**sizes, intermediate_size=48, num_key_value_heads=2)
    images = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "output_channels": 32, "mlp_dim": 48}
    models: dict[tuple[str, ...], PretrainedConfig] = {
        ("sdpa",): llama_config(),
        ("eager",): GptOssConfig(**sizes, num_key_value_heads=2, intermediate_size=48, num_local_experts=2, head_dim=8),
        ("eager", "sdpa"): GotOcr2Config(vision_config=images, text_config=text.to_dict()),
        (): MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99),
    }
    for expected, config in models.items():
        assert attention_implementations(build_on_meta(config, attention="auto")) == list(expected)


def test_an_unknown_architecture_and_a_missing_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-thing"}))
    with pytest.raises(ModelError, match="cannot be used"):
        load_config(tmp_path)
    with pytest.raises(ModelError, match=r"no usable tokenizer in .*: it has no tokenizer files"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["additional_chat_templates/a.jinja", "dict.txt", "vocab.txt"])
def test_a_file_that_transformers_would_read_whole(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    check_model_files(tmp_path)
    os.truncate(tmp_path / name, 3 << 30)
    with pytest.raises(ModelError, match=rf"{name} is too large to be read: the limit is "):
        check_model_files(tmp_path)


def test_a_directory_of_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "directory_entries=2")
    for number in range(3):
        (tmp_path / str(number)).write_text("")
    with pytest.raises(ModelError, match="has too many files to be a model: the limit is 2"):
        check_model_files(tmp_path)


def test_a_directory_that_a_training_has_deleted(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"step-00000002 was deleted while it was read, .*keep_last"):
        load_config(tmp_path / "step-00000002")


@pytest.mark.parametrize("name", ["text_config", "decoder"])
def test_a_text_config_that_is_no_object_is_refused(tmp_path: Path, name: str) -> None:
    config = llama_config().to_dict() | {name: 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"config\.json: {name} is 5; expected an object\.$"):
        load_config(tmp_path)


def test_a_lack_of_memory_is_not_blamed_on_the_model() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"), model_run_errors(llama()):
        torch.empty(1 << 50)


def test_a_failing_model_is_named_without_its_wrapper() -> None:
    wrapper = nn.Module()
    wrapper.module = llama()
    said = r"^The model LlamaForCausalLM cannot be run: KeyError: 'strides'\. Its config\.json"
    with pytest.raises(ModelError, match=said), model_run_errors(wrapper):
        raise KeyError("strides")
