"""A flipped bit in a file of torch.save, which torch.load returns in silence, is found while the file is read."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_shard import load_dispatched
from fsdp_shard.checkpoint import convert, open_checkpoint, verify
from fsdp_shard.checkpoint.integrity.verify_report import Problem
from fsdp_shard.errors import CheckpointError
from tests.support.tiny import save_adapter, save_model

_DAMAGED = "do not have the CRC32 that was written with them"


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, position)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), position)


def flip_in(root: Path, name: str, element: int = 0) -> None:
    """Flip a bit of an element of a tensor where the index says that it is."""
    with open_checkpoint(root) as index:
        (span,) = index.spans(name, element, element + 1)
        path = index.root / span.file
    flip(path, span.start)


def model(root: Path) -> Path:
    save_model(root)
    with open_checkpoint(root) as index:
        torch.save({name: index.read(name) for name in index.names}, root / "pytorch_model.bin")
    (root / "model.safetensors").unlink()
    return root


_NAME = "model.layers.0.mlp.down_proj.weight"


def test_a_bit_that_torch_load_does_not_see(tmp_path: Path) -> None:
    root = model(tmp_path / "model")
    assert verify(root).is_sound
    before = torch.load(root / "pytorch_model.bin")
    flip_in(root, _NAME, 1000)
    assert not torch.equal(torch.load(root / "pytorch_model.bin")[_NAME], before[_NAME])
    for target in ("one", "two"):
        with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin, bytes \d+-\d+: the values {_DAMAGED}"):
            convert(root, tmp_path / target, dtype="bfloat16" if target == "two" else None)
        assert not (tmp_path / target).exists()
    with pytest.raises(CheckpointError, match=_DAMAGED):
        load_dispatched(root, "cpu")
    (problem,) = verify(root).problems
    assert (problem.file, problem.tensor) == ("pytorch_model.bin", _NAME)
    assert problem.start is not None
    assert _DAMAGED in problem.message


def test_a_part_is_read_without_a_check(tmp_path: Path) -> None:
    """What a rank or a slice needs is all that is read; `verify` reads the rest."""
    root = model(tmp_path / "model")
    flip_in(root, _NAME)
    with open_checkpoint(root) as index:
        index.read(_NAME, slice(0, 20))
        with pytest.raises(CheckpointError, match=_DAMAGED):
            index.read(_NAME)


def views() -> dict[str, torch.Tensor]:
    """Tensors that are parts of storages, in other strides, or share one."""
    wide = torch.arange(600_000.0)
    return {"part": wide[10:500_000], "transposed": torch.arange(30.0).reshape(5, 6).t(), "again": wide[20:]}


def test_a_damaged_storage_is_one_problem_under_any_names(tmp_path: Path) -> None:
    """`--against` compares files of different names a second time, under the names of the model."""
    root, other = model(tmp_path / "model"), save_model(tmp_path / "other")
    weights = torch.load(root / "pytorch_model.bin")
    torch.save({name.removeprefix("model."): tensor for name, tensor in weights.items()}, root / "pytorch_model.bin")
    flip_in(root, _NAME.removeprefix("model."))
    problems = verify(root, other).problems
    assert [_DAMAGED in problem.message for problem in problems] == [True, False]
    assert "differ" in problems[1].message


def test_an_unread_part_of_a_weight_that_an_adapter_changes(tmp_path: Path) -> None:
    """A storage is checked as a whole where the weight in it is merged with an adapter, too."""
    root = model(tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", save_model(tmp_path / "base"))
    weights = torch.load(root / "pytorch_model.bin")
    wide = torch.cat([weights[_NAME].flatten(), torch.ones(64)])
    torch.save(weights | {_NAME: wide[:-64].view_as(weights[_NAME])}, root / "pytorch_model.bin")
    convert(adapter, tmp_path / "sound", base=root)
    with open_checkpoint(root) as index:
        (piece,) = index.entry(_NAME).pieces
    assert piece.checksum is not None
    flip(root / "pytorch_model.bin", piece.checksum.start + piece.checksum.num_bytes - 1)
    with pytest.raises(CheckpointError, match=_DAMAGED):
        convert(adapter, tmp_path / "out", base=root)


@pytest.mark.parametrize("name", ["part", "transposed", "again"])
def test_views_of_storages(name: str, tmp_path: Path) -> None:
    """A storage is checked as a whole, also those of its bytes that no tensor has."""
    torch.save(views(), tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "sound")
    with open_checkpoint(tmp_path / "model.pt") as index:
        checksum = index.entry(name).pieces[0].checksum
    assert checksum is not None
    flip(tmp_path / "model.pt", checksum.start + 7)
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert archive.testzip() == f"model/data/{int(name == 'transposed')}"
    with pytest.raises(CheckpointError, match=_DAMAGED):
        convert(tmp_path / "model.pt", tmp_path / "out")
    (problem,) = verify(tmp_path / "model.pt").problems
    assert problem.tensor == ("transposed" if name == "transposed" else "part")


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    """torch may be told to write none, and its older format has none."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(views(), tmp_path / "zip.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(views(), tmp_path / "stream.pt", _use_new_zipfile_serialization=False)
    for name in ("zip.pt", "stream.pt"):
        assert verify(tmp_path / name).is_sound
        convert(tmp_path / name, tmp_path / f"{name}-out")


def test_what_describes_the_tensors_is_checked_when_it_is_opened(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3, 5)}, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    flip(tmp_path / "model.pt", data.index(b"weight"))
    assert list(torch.load(tmp_path / "model.pt")) == ["seight"]
    with pytest.raises(CheckpointError, match="what describes the tensors does not have the CRC32"):
        open_checkpoint(tmp_path / "model.pt")


def dcp_items(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {f"layer.{n}.weight": torch.full((3, 5), float(n)) for n in range(4)}, checkpoint_id=root, no_dist=True
        )


def shards(root: Path) -> None:
    root.mkdir()
    for number in (1, 2):
        torch.save({f"layer.{number}.weight": torch.ones(3, 5)}, root / f"model-0000{number}-of-00002.bin")


@pytest.mark.parametrize("make", [dcp_items, shards])
def test_items_and_shards(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """Each item of a DCP file has a CRC of its own, though items that are alike are taken apart once."""
    make(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "sound")
    flip_in(tmp_path / "saved", "layer.2.weight", 3)
    with pytest.raises(CheckpointError, match=_DAMAGED):
        convert(tmp_path / "saved", tmp_path / "out")
    problems: tuple[Problem, ...] = verify(tmp_path / "saved").problems
    assert [problem.tensor for problem in problems] == ["layer.2.weight"]
    flip_in(tmp_path / "saved", "layer.1.weight")
    assert {problem.tensor for problem in verify(tmp_path / "saved").problems} == {"layer.1.weight", "layer.2.weight"}
