"""Settings of dispatch and generation: what they take, and what they refuse in words that help."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_shard.errors import ConfigError
from fsdp_shard.inference.config import (
    DispatchConfig,
    GenerateSettings,
    GenerationSettings,
    parse_budgets,
    parse_device_map,
)
from fsdp_shard.utils import check


def test_devices_are_read_as_people_write_them() -> None:
    mapping = {"model.layers": "cuda:1", "model.norm": "0", "lm_head": 2, "": "disk", "model.embed_tokens": "cuda"}
    expected = {"model.layers": 1, "model.norm": 0, "lm_head": 2, "": "disk", "model.embed_tokens": 0}
    assert parse_device_map(mapping) == expected
    assert parse_device_map({"*": "disk", "model.norm": "cpu"}) == {"": "disk", "model.norm": "cpu"}


def test_budgets_are_bytes_by_device() -> None:
    assert parse_budgets({0: "20GB", "cuda:1": "1GiB", "cpu": 4096}) == {0: 20 * 10**9, 1: 2**30, "cpu": 4096}
    assert parse_budgets(None) is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DispatchConfig(device_map="blanced"), "did you mean balanced"),
        (DispatchConfig(device_map=["cpu"]), "nor a mapping"),
        (DispatchConfig(device_map={"model": "gpu"}), r"device_map\.model=gpu is not a device"),
        (DispatchConfig(device_map={"model": True}), "True is not a device"),
        (DispatchConfig(max_memory={"cpu": "lots"}), r"max_memory\.cpu=lots is not a size"),
        (DispatchConfig(max_memory={"tpu": "1GB"}), "a key of max_memory=tpu is not a device"),
        (DispatchConfig(max_memory={"disk": "1GB"}), "disk, which needs none"),
        (DispatchConfig(max_memory={}), "not a mapping from devices"),
        (DispatchConfig("cpu", {"cpu": "1GB", 0: "1GB"}), "max_memory has 0, which device_map=cpu does not use"),
        (DispatchConfig("disk", {1: "1GB", 2: "1GB"}), "max_memory has 2, which device_map=disk does not use"),
        (DispatchConfig({"": 0}, {0: "1GB", "cpu": "1GB"}), "max_memory has cpu, which device_map=.* does not use"),
        (DispatchConfig({"": 0, "a": "disk"}, {"cpu": "1GB"}), "max_memory lacks 0, which device_map=.* uses"),
        (DispatchConfig({"": 0, "a": 1}, prefetch_blocks=3), "prefetch_blocks=3 has no effect with device_map="),
        (DispatchConfig("cpu", prefetch_blocks=0), "prefetch_blocks=0 has no effect with device_map=cpu"),
        (DispatchConfig(dtype="int4"), "dtype=int4 is not one of"),
        (GenerationSettings(temperature=0.5), "has no effect while do_sample=false"),
        (GenerationSettings(max_new_tokens=-1), "max_new_tokens=-1 is out of range"),
        (GenerationSettings(do_sample=True, top_p=1.5), "top_p=1.5 is out of range"),
        (GenerateSettings(checkpoint="x"), "neither is given"),
        (GenerateSettings(checkpoint="x", prompt="a", prompts="b.jsonl"), "both are given"),
        (GenerateSettings(checkpoint="x", prompt=" \n"), "prompt is empty"),
        (GenerateSettings(checkpoint="x", prompt="a", output="out.txt"), "must end in .jsonl"),
        (GenerateSettings(prompt="a"), "checkpoint is not set"),
        (GenerateSettings(checkpoint="x", prompt="a", system="b"), "system=b has no effect without chat=true"),
        (
            GenerateSettings(checkpoint="x", prompt="a", chat_template_kwargs={"a": 1}),
            "chat_template_kwargs={'a': 1} has no effect without chat=true",
        ),
        (
            GenerateSettings(checkpoint="x", prompt="a", chat_template="default"),
            "chat_template=default has no effect without chat=true",
        ),
        (
            GenerateSettings(checkpoint="x", chat=True, chat_template="none.jinja"),
            "chat_template=none.jinja cannot be read: .*No such file",
        ),
        (
            GenerateSettings(checkpoint="x", chat=True, chat_template_kwargs="thinking"),
            "chat_template_kwargs=thinking is not a mapping",
        ),
        (GenerateSettings(checkpoint="x", chat=True, output="a.jsonl"), "output=a.jsonl has no effect: chat=true"),
        (
            GenerateSettings(checkpoint="x", chat=True, generation=GenerationSettings(output_scores=True)),
            "generation.output_scores=true has no effect: chat=true",
        ),
    ],
)
def test_what_cannot_be_is_refused(config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(config)


@pytest.mark.parametrize(
    "config",
    [
        DispatchConfig("cpu", {"cpu": "1GB"}),
        DispatchConfig("disk", {1: "1GB", "cpu": "1GB"}, prefetch_blocks=0),
        DispatchConfig({"": "disk"}, {"cpu": "1GB"}, prefetch_blocks=3),
        DispatchConfig({"": 0, "a": "cpu"}, {0: "1GB", "cpu": "1GB"}, prefetch_blocks=3),
        DispatchConfig({"": 0, "a": "disk"}, {0: "1GB", "cpu": "1GB"}),
    ],
)
def test_what_has_an_effect_is_accepted(config: DispatchConfig) -> None:
    check(config)


def test_the_defaults_are_accepted() -> None:
    check(GenerateSettings(checkpoint="x", prompt="a"))
