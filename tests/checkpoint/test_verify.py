from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_shard.checkpoint.convert import convert
from fsdp_shard.checkpoint.index import open_checkpoint
from fsdp_shard.checkpoint.store import read_manifest
from fsdp_shard.checkpoint.verify import verify
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import edit_header, random_tensor, write_huggingface


def converted(tmp_path: Path) -> Path:
    tensors = {"a": random_tensor((700_001,), torch.float32), "b": random_tensor((4, 3), torch.bfloat16)}
    convert(write_huggingface(tmp_path / "source", tensors), tmp_path / "model", format="sharded", ranks=2)
    return tmp_path / "model"


def test_verify_names_file_tensor_and_bytes(tmp_path: Path) -> None:
    root = converted(tmp_path)
    report = verify(root)
    assert report.is_sound
    assert report.content_checked
    assert "sound (2 tensors, 2.80 MB; every byte" in str(report)
    path = root / "shard-00001-of-00002.safetensors"
    with open(path, "r+b") as file:
        file.seek(-100, 2)
        position, (old,) = file.tell(), file.read(1)
        file.seek(position)
        file.write(bytes([old ^ 1]))
    (problem,) = verify(root).problems
    assert (problem.file, problem.tensor) == (path.name, "a")
    assert problem.start is not None
    assert problem.stop is not None
    assert problem.start <= position < problem.stop
    assert str(path) in problem.message


def test_verify_names_both_files_where_a_chunk_lies_in_two(tmp_path: Path) -> None:
    root = converted(tmp_path)
    with open_checkpoint(root) as index:
        ((file, start, stop), (other, _, _)) = index.places("b", 0, 12)
    with open(root / file, "r+b") as stream:
        stream.seek(start)
        stream.write(b"\x99\x99")
    (problem,) = verify(root).problems
    assert [place.file for place in problem.places] == [file, other]
    assert problem.tensor == "b"
    assert (problem.start, problem.stop) == (start, stop)
    for place in problem.places:
        assert f"{root / place.file}, bytes {place.start}-" in problem.message
    assert "does not tell which" in problem.message


def test_verify_finds_what_is_wrong_beside_the_weights(tmp_path: Path) -> None:
    root = converted(tmp_path)
    config = (root / "config.json").read_text()
    (root / "config.json").write_text(config.replace("llama", "lamma"))
    assert [problem.file for problem in verify(root).problems] == ["config.json"]
    (root / "config.json").write_text(config + " ")
    assert "bytes, but" in verify(root).problems[0].message
    (root / "config.json").unlink()
    assert "is missing" in verify(root).problems[0].message


def test_verify_finds_a_changed_header_and_a_cut_file(tmp_path: Path) -> None:
    root = converted(tmp_path)
    path = root / "shard-00000-of-00002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format":"pt"', b'"format":"tp"'))
    assert "the header of" in verify(root).problems[0].message
    path.write_bytes(content[:-3])
    report = verify(root)
    assert [problem.file for problem in report.problems] == [path.name]
    assert not report.content_checked


def test_a_manifest_of_other_weights_is_refused(tmp_path: Path) -> None:
    root = converted(tmp_path)
    other = {"a": torch.zeros(3), "c": torch.zeros(1)}
    convert(write_huggingface(tmp_path / "other source", other), tmp_path / "other")
    (tmp_path / "other" / "manifest.json").write_text((root / "manifest.json").read_text())
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_checkpoint(tmp_path / "other")
    text = (root / "manifest.json").read_text()
    manifest = read_manifest(root)
    assert manifest is not None
    (root / "manifest.json").write_text(text.replace(f'"{manifest.tensors["a"].chunks[0]}", ', ""))
    with pytest.raises(CheckpointError, match="2 chunks of tensor a, which has 3"):
        open_checkpoint(root)


def test_without_a_manifest_structure_is_checked(tmp_path: Path) -> None:
    root = write_huggingface(tmp_path, {"w": torch.zeros(3)})
    report = verify(root)
    assert report.is_sound
    assert not report.content_checked
    assert "content could not be checked" in str(report)
    edit_header(root / "model.safetensors", lambda document: document["w"].update(dtype="F31"))
    assert "F31" in verify(root).problems[0].message
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "gone")
