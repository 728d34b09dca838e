"""Fixtures that many tests share: a model directory and real text, made once a session."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Event

import hypothesis
import pytest
import torch

from tests.support.tiny import save_model

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# A job in the background of a script ignores Ctrl-C, and tests of it would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Forked ranks must not inherit a pool of OpenMP threads that does not exist on their side.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs fork their ranks, whatever earlier tests computed here: with one thread, there is no pool to miss.

    Spawned ranks import everything anew, which takes ten times as long, and know nothing that a test has registered.
    """
    monkeypatch.setattr("fsdp_shard.distributed.launcher._has_computed", Event())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: the tiny Llama of seed 0 with a byte-level tokenizer. Not to be written into."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with train.txt (60 kB) and held_out.txt (4 kB): reference prose that comes with Python."""
    from pydoc_data.topics import topics

    directory = tmp_path_factory.mktemp("texts")
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    (directory / "train.txt").write_text(whole[:60_000], encoding="utf-8")
    (directory / "held_out.txt").write_text(whole[60_000:64_000], encoding="utf-8")
    return directory
