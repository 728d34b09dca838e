"""Every way a checkpoint can be wrong is one CheckpointError that names the file, soon, and reads nothing outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import assert_refused, edit_header, even_edges, write_ranks
from tests.checkpoint.malformed_files import CASES, MODEL, TENSORS, single


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", CASES)
def test_is_refused(tmp_path: Path, name: str) -> None:
    make, damage, message = CASES[name]
    root = tmp_path / "model"
    path = make(root)
    with open_checkpoint(root) as index:
        assert set(index.names) == set(TENSORS), "it was sound before"
    damage(path)
    assert_refused(root, message)


@pytest.mark.timeout(10)
def test_many_keys_are_searched_once(tmp_path: Path) -> None:
    keys = ",".join(f'"t{number}":0' for number in [*range(40_000), 39_999])
    path = single(tmp_path / "model")
    edit_header(path, lambda document: f"{{{keys}}}".encode())
    assert_refused(path.parent, "duplicate key 't39999'")


def test_an_alias_of_a_stored_tensor_is_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path, TENSORS, even_edges(TENSORS, 2), aliases={"b": "a"})
    assert_refused(tmp_path, "tensor b is tied to a, but b is stored itself")


def test_a_missing_range_is_found(tmp_path: Path) -> None:
    write_ranks(tmp_path, TENSORS, {"a": [0, 2, 4, 5], "b": [0, 1, 2, 4]})
    with pytest.raises(CheckpointError, match=r"tensor a of shape \[2, 3\] is not whole: its pieces hold 5 of 6"):
        open_checkpoint(tmp_path)


def test_a_file_cut_after_opening_is_found(tmp_path: Path) -> None:
    path = single(tmp_path / "model")
    with open_checkpoint(path.parent) as index:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(CheckpointError, match=r"model\.safetensors ends at byte"):
            index.read("b")


def test_links_of_a_hub_cache_are_followed_to_its_blobs_only(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    snapshot, blobs = repo / "snapshots" / "abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    single(tmp_path / "model").rename(blobs / "123")
    (snapshot / MODEL).symlink_to("../../blobs/123")
    with open_checkpoint(snapshot) as index:
        assert set(index.names) == set(TENSORS)
    (blobs / "123").rename(tmp_path / "elsewhere")
    (snapshot / MODEL).unlink()
    (snapshot / MODEL).symlink_to("../../../elsewhere")
    with pytest.raises(CheckpointError, match="outside the directory"):
        open_checkpoint(snapshot)


def test_links_inside_the_directory_are_followed(tmp_path: Path) -> None:
    path = single(tmp_path)
    path.rename(tmp_path / "weights")
    path.symlink_to("weights")
    with open_checkpoint(tmp_path) as index:
        assert set(index.names) == set(TENSORS)


def test_a_path_with_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "gone")
