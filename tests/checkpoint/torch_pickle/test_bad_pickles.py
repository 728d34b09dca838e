"""Damaged or hostile files of torch.save are one CheckpointError that names the file; nothing in them runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import assert_refused
from tests.checkpoint.torch_pickle.bad_pickles import CANARY, CASES, TENSORS


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore")  # torch's own about sparse tensors, Python's about a duplicate name
@pytest.mark.parametrize("name", CASES)
def test_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, damage, message = CASES[name]
    root = tmp_path / "model"
    path = make(root)
    with open_checkpoint(root) as index:
        assert set(index.names) == set(TENSORS), "it was sound before"
    damage(path)
    assert_refused(root, message)
    assert not (tmp_path / CANARY).exists()


def test_every_flipped_byte_is_sound_or_refused(tmp_path: Path) -> None:
    """Of the small file's header and directory bytes: an answer or a CheckpointError, never anything else."""
    torch.save({"b": torch.arange(4.0)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    refused = 0
    for position in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        (tmp_path / "x.pt").write_bytes(flipped)
        try:
            with open_checkpoint(tmp_path / "x.pt") as index:
                index.read(index.names[0])
        except CheckpointError:
            refused += 1
    assert refused > 50
