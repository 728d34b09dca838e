"""Composes the configs of commands in tests, and catches what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_shard.config import COMMANDS
from fsdp_shard.config.compose import Job, compose_jobs
from fsdp_shard.errors import ConfigError

GIVEN = {
    "finetune": ["model.path=org/name", "data.path=text.txt"],
    "convert": ["source=a", "target=b"],
    "evaluate": ["checkpoint=a", "data.path=text.txt"],
    "generate": ["checkpoint=a", "prompt=Hello"],
    "plan": ["model.path=org/name"],
    "doctor": [],
}


def compose(command: str, *arguments: str) -> list[Job[Any]]:
    return compose_jobs(COMMANDS[command], [*GIVEN[command], *arguments], f"fsdp-shard {command}")


def one(command: str, *arguments: str) -> Any:
    (job,) = compose(command, *arguments)
    return job.config


def refusal(command: str, *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(command, *arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message
