from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.checkpoint.tensor_entry import Piece, TensorEntry, checked_entry
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import (
    assert_same,
    even_edges,
    random_tensor,
    raw_bytes,
    uneven,
    write_huggingface,
    write_ranks,
)
from tests.support.digests import digest_tensor

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
slices = st.builds(slice, st.none() | st.integers(-8, 8), st.none() | st.integers(-8, 8), st.none() | st.integers(1, 3))


def test_tensors_are_in_cpu_memory_whatever_the_default_device(tmp_path: Path) -> None:
    tensors = uneven()
    with open_checkpoint(write_huggingface(tmp_path / "model", tensors)) as index:
        with torch.device("meta"):
            found = {name: index.read(name) for name in tensors}
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = uneven()
    with open_checkpoint(write_huggingface(tmp_path / "model", tensors)) as index:
        assert index.format == "huggingface"
        assert_same(index, tensors)
        assert index.dtypes["half"] == "BF16"
        assert index.shapes["half"] == (3, 2, 4)
        assert index.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert re.fullmatch(rf"TensorIndex\(.*model.*, step=None, {len(tensors)} tensors\)", repr(index))
    with open_checkpoint(tmp_path / "model" / "model.safetensors") as index:
        assert_same(index, tensors)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_reads_rank_files_with_ranges_that_begin_inside_rows(tmp_path: Path, world_size: int) -> None:
    tensors = uneven()
    with open_checkpoint(write_ranks(tmp_path, tensors, even_edges(tensors, world_size), step=7)) as index:
        assert (index.format, index.step, index.world_size) == ("sharded", 7, world_size)
        assert_same(index, tensors)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_split_into_flat_ranges_comes_back(data: st.DataObject) -> None:
    tensor = random_tensor(data.draw(shapes), data.draw(st.sampled_from(DTYPES)), seed=1)
    world_size = data.draw(st.integers(1, 4))
    cuts = sorted(data.draw(st.lists(st.integers(0, tensor.numel()), min_size=world_size - 1, max_size=world_size - 1)))
    with tempfile.TemporaryDirectory() as directory:
        root = write_ranks(Path(directory), {"w": tensor}, {"w": [0, *cuts, tensor.numel()]})
        with open_checkpoint(root) as index:
            assert_same(index, {"w": tensor})
            start = data.draw(st.integers(0, tensor.numel()))
            stop = data.draw(st.integers(start, tensor.numel()))
            out = bytearray((stop - start) * tensor.element_size())
            index.read_into("w", start, out)
            assert out == raw_bytes(tensor.reshape(-1)[start:stop])


@settings(max_examples=100, deadline=None)
@given(shape=shapes, parts=st.lists(slices | st.integers(-7, 6), max_size=3), world_size=st.integers(1, 3))
def test_slices_are_those_of_torch(shape: tuple[int, ...], parts: list[slice | int], world_size: int) -> None:
    tensor = random_tensor(shape, torch.bfloat16, seed=2)
    with tempfile.TemporaryDirectory() as directory:
        root = write_ranks(Path(directory), {"w": tensor}, even_edges({"w": tensor}, world_size))
        with open_checkpoint(root) as index:
            try:
                expected = tensor[tuple(parts)]
            except IndexError:
                with pytest.raises(IndexError):
                    index.read("w", tuple(parts))
                return
            found = index.read("w", tuple(parts))
            assert found.shape == expected.shape
            assert raw_bytes(found) == raw_bytes(expected)


def test_what_is_neither_an_integer_nor_a_slice_is_no_part(tmp_path: Path) -> None:
    tensor = random_tensor((4, 3), torch.float32)
    with open_checkpoint(write_huggingface(tmp_path, {"w": tensor})) as index:
        for part in (True, torch.tensor([1, 2]), ..., (..., 0), "1", 1.0):
            with pytest.raises(IndexError, match=r"w: .* is neither an integer nor a slice"):
                index.read("w", part)  # type: ignore[arg-type]  # what people give
        for number in (np.int64(2), torch.tensor(2)):
            assert torch.equal(index.read("w", number), tensor[2])  # type: ignore[arg-type]  # integers, too


def test_short_runs_are_read_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_shard.checkpoint.piece_reader.ROW_GROUP_BYTES", 64)
    tensor = random_tensor((4, 9, 6), torch.float32)
    with open_checkpoint(write_huggingface(tmp_path, {"w": tensor})) as index:
        found = index.read("w", (slice(1, 3), slice(2, 9), slice(3, 5)))
        assert raw_bytes(found) == raw_bytes(tensor[1:3, 2:9, 3:5])


def test_pieces_cut_along_any_dimension(tmp_path: Path) -> None:
    tensor = random_tensor((5, 6), torch.float32)
    columns = [tensor[:, :2].contiguous(), tensor[:, 2:].contiguous()]
    (tmp_path / "data").write_bytes(b"".join(map(raw_bytes, columns)))
    pieces = [Piece("data", 0, (0, 0), (5, 2)), Piece("data", columns[0].nbytes, (0, 2), (5, 4))]
    entry = checked_entry(tmp_path, "w", "F32", (5, 6), pieces)
    with TensorIndex(tmp_path, "test", {"w": entry}) as index:
        assert_same(index, {"w": tensor})
        out = bytearray(4 * 9)
        index.read_into("w", 4, out)
        assert out == raw_bytes(tensor.reshape(-1)[4:13])
        assert index.spans("w", 0, 2) == [("data", 0, 8)]
        assert index.spans("w", 2, 8) == [("data", 40, 56), ("data", 8, 16)]
    with pytest.raises(CheckpointError, match="overlap"):
        checked_entry(tmp_path, "w", "F32", (5, 6), [*pieces, Piece("data", 0, (0, 0), (1, 1))])


def test_digest_is_of_content_not_of_files(tmp_path: Path) -> None:
    tensors = uneven()
    with (
        open_checkpoint(write_huggingface(tmp_path / "a", tensors)) as whole,
        open_checkpoint(write_ranks(tmp_path / "b", tensors, even_edges(tensors, 3))) as parts,
    ):
        digests = {name: digest_tensor(whole, name) for name in tensors}
        assert digests == {name: digest_tensor(parts, name) for name in tensors}
        assert len(set(digests.values())) == len(tensors)


def test_aliases_of_safetensors_metadata_are_read(tmp_path: Path) -> None:
    tensors = {"embed": random_tensor((4, 3), torch.float32)}
    with open_checkpoint(write_huggingface(tmp_path, tensors, head="embed", note="embed?")) as index:
        assert index.aliases == {"head": "embed"}
        assert raw_bytes(index.read("head")) == raw_bytes(tensors["embed"])
        assert index.names == ["embed"]


def test_unknown_names_and_ranges_are_refused(tmp_path: Path) -> None:
    with open_checkpoint(write_huggingface(tmp_path, {"layer.weight": torch.zeros(3)})) as index:
        with pytest.raises(CheckpointError, match=r"no tensor layer\.weigth \(did you mean layer\.weight\?\)"):
            index.read("layer.weigth")
        with pytest.raises(ValueError, match="3 elements"):
            index.read_into("layer.weight", 1, bytearray(12))
        with pytest.raises(ValueError, match="3 elements"):
            index.read_into("layer.weight", 0, bytearray(5))


def test_files_stay_open_between_reads_and_reopen_after_close(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(6.0)}
    index = open_checkpoint(write_huggingface(tmp_path, tensors))
    assert_same(index, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "moved")
    assert_same(index, tensors)
    index.close()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        index.read("w")


def test_entry_counts() -> None:
    entry = TensorEntry("w", "BF16", (3, 5), ())
    assert (entry.num_elements, entry.num_bytes) == (15, 30)
    assert entry.spec.num_bytes == math.prod((3, 5, 2))
