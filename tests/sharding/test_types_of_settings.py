"""Settings of `fs.shard` that are of another type than their annotation are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdp_shard as fs
from fsdp_shard.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("reshard_after_forward", "x", "reshard_after_forward='x' is str, expected a bool or an int."),
        ("reshard_after_forward", 1.5, "reshard_after_forward=1.5 is float, expected a bool or an int."),
        ("reshard_after_forward", None, "reshard_after_forward is null, expected a bool or an int."),
        ("activation_checkpointing", None, " is null, expected a bool or an int or a str."),
        ("activation_checkpointing", [1], r"=\[1\] is list, expected a bool or an int or a str."),
        ("compile", None, "compile is null, expected a bool or a str."),
        ("compile", 1, "compile=1 is int, expected a bool or a str."),
        ("replicas", None, "replicas is null, expected an int, such as 2."),
        ("min_params", 0.5, "min_params=0.5 is float, expected an int, such as 2."),
        ("param_dtype", torch.bfloat16, "param_dtype=torch.bfloat16 is dtype, expected a str."),
        ("blocks", "LlamaDecoderLayer", "blocks='LlamaDecoderLayer' is str, expected a list."),
    ],
)
def test_a_value_of_another_type_is_named(name: str, value: Any, said: str) -> None:
    with fs.init_distributed("cpu") as context, pytest.raises(ConfigError, match=said):
        fs.shard(torch.nn.Linear(2, 2), context, **{name: value})
