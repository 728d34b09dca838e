"""What a run recorded of its settings is read again, and is an error where YAML makes much of a few bytes."""

from __future__ import annotations

import pytest

from fsdp_shard.errors import CheckpointError
from fsdp_shard.training.checkpoints.recorded_settings import parse_settings


def test_the_choice_of_each_group() -> None:
    content = b"defaults:\n- _self_\n- optim: adamw\n- model: m\ntrain:\n  steps: 3\n"
    assert parse_settings(content, "x") == {"defaults": {"optim": "adamw", "model": "m"}, "train": {"steps": 3}}


_REPEATS = [b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9)]


@pytest.mark.parametrize(
    "content",
    [
        b"a0: &a0 [x]\n" + b"".join(_REPEATS),
        b"a: " + b"[" * 100_000,
        b"a: 1",
    ],
    ids=["repeats", "depth", "no settings"],
)
def test_what_is_no_settings(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "build_seconds=0.3")
    with pytest.raises(CheckpointError, match=r"run_config\.yaml"):
        parse_settings(content, "run_config.yaml")
