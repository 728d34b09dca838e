"""Small checkpoints that ask for all time, memory or files: each is one error, soon; and large sound ones are read."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_shard.checkpoint import convert, open_checkpoint, summarize_checkpoint, verify
from fsdp_shard.checkpoint.tensor_slices import coverage_problem
from fsdp_shard.checkpoint.torch_pickle.placements import Placement, local_spans
from fsdp_shard.errors import CheckpointError
from fsdp_shard.inference import load_dispatched
from tests.support.tiny import save_model

_SECONDS = 5.0  # of processor time, on any machine; what it prevents takes minutes


@pytest.fixture(autouse=True)
def _soon() -> object:
    before = time.process_time()
    yield
    assert time.process_time() - before < _SECONDS


def _expect(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"w": torch.zeros(1).expand(10**6, 10**6)},
        lambda: {f"w{n}": torch.zeros(1).expand(10**4, 10**4, n + 1) for n in range(100)},
        lambda: {"w": torch.as_strided(torch.zeros(1000), (100,) * 6, (1,) * 6)},
        lambda: (lambda whole: {f"w{n}": whole[n : 90_000 + n] for n in range(1000)})(torch.zeros(100_000)),
    ],
)
def test_views_beyond_the_bytes_of_the_file(make: Callable[[], object], tmp_path: Path) -> None:
    torch.save(make(), tmp_path / "model.pt")
    _expect(tmp_path / "model.pt", r"its files have .* but hold views of .*FSDP_SHARD_LIMITS=view_bytes=VALUE")


def test_views_that_models_have_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(30_000.0).view(100, 300)
    state = dict(zip("qkv", whole.chunk(3, dim=1), strict=True))
    state |= {"transposed": whole.T, "mask": torch.ones(1).expand(512, 512)}
    torch.save(state, tmp_path / "model.pt")
    with open_checkpoint(tmp_path / "model.pt") as index:
        assert all(torch.equal(index.read(name), tensor) for name, tensor in state.items())
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "view_bytes=1kB")
    _expect(tmp_path / "model.pt", "the limit is 0.98 KiB")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04" + b"\x8f" * 500_000 + b".", "more tiny objects"),
        (b"\x80\x04N" + b"\x94" * 1_000_000 + b".", "more tiny objects"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 4 * 10**9) + b".", "a text of 3.73 GiB"),
        (b"\x80\x02]q\x00(" + b"]" * 3000 + b"e.", "nested in itself, or has too many tensors: the limit is 1,000"),
    ],
)
def test_pickles_that_take_a_multiple_of_their_size(
    data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "tensors=1000")
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", data)
    _expect(tmp_path / "model.pt", message)


def test_an_old_stream_that_goes_on_in_a_hole(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"\x80\x02B" + struct.pack("<I", 2 * 10**9))
    os.truncate(tmp_path / "model.pt", 3 << 30)
    _expect(tmp_path / "model.pt", "a text of 1.86 GiB")


@pytest.mark.parametrize("factor", [1 << 40, 1 << 14])
def test_shards_that_are_cut_into_too_many_parts(factor: int) -> None:
    with pytest.raises(ValueError, match="cut into more than 4096 parts"):
        local_spans((1 << 41,), (2,), (0,), [Placement("shard", 0, factor)])
    with pytest.raises(ValueError, match="cut into more than 4096 parts"):
        local_spans((10**6, 10**6), (2, 2), (0, 0), [Placement("shard", 0, 100), Placement("shard", 1, 100)])


def test_pieces_in_no_order_are_not_compared_with_each_other() -> None:
    size = 2000  # upper parts of columns and lower ones: wherever one looks, half of them are open
    pieces = [(((0, n), (n, 1)), ((n, n), (size - n, 1))) for n in range(1, size)]
    boxes = [((0, 0), (size, 1)), *(box for pair in pieces for box in pair)]
    assert coverage_problem((size, size), boxes) == f"its {len(boxes)} pieces are in no order that ranks would write"


def test_pieces_of_a_large_mesh_are_compared() -> None:
    boxes = [((row * 4, column * 4), (4, 4)) for column in range(64) for row in range(512)]
    assert coverage_problem((2048, 256), boxes) is None
    assert coverage_problem((2048, 256), [*boxes[1:], boxes[1]]) == "the pieces at [4, 0] and [4, 0] overlap"


def _write_header(file: Path, document: object, num_bytes: int = 0) -> None:
    header = json.dumps(document, separators=(",", ":")).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


@pytest.mark.parametrize(
    ("shape", "name", "message"),
    [
        ([2**62] * 100_000, "w", r"has the shape .*; it must be a list of counts, at most 64"),
        ([0], "module." * 150_000 + "w", "whose name is not a path of modules: it has 1050001 characters"),
        ([0], "a." * 200 + "w", "it has 401 characters and 200 dots"),
    ],
)
def test_shapes_and_names(shape: list[int], name: str, message: str, tmp_path: Path) -> None:
    _write_header(tmp_path / "model.safetensors", {name: {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}})
    _expect(tmp_path, message)


def test_numbers_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    _write_header(tmp_path / "model.safetensors", {f"w{n}": entry for n in range(1000)})
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "tensors=999")
    _expect(tmp_path, r"too many tensors: the limit is 999; .*FSDP_SHARD_LIMITS=tensors=VALUE")
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "tensors=1000")
    assert len(open_checkpoint(tmp_path).names) == 1000


def test_gguf_arrays_beyond_the_file(tmp_path: Path) -> None:
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    for kind, message in ((8, "more than it has bytes for"), (4, "ends inside its header")):
        (tmp_path / "model.gguf").write_bytes(start + struct.pack("<IIQ", 9, kind, 10**12) + bytes(1000))
        _expect(tmp_path, message)
    os.truncate(tmp_path / "model.gguf", 8 << 40)
    _expect(tmp_path, r"has a header of 3\.64 TiB or more: .*metadata_bytes")
    (tmp_path / "model.gguf").write_bytes(start + struct.pack("<IIQ", 9, 8, 500_000_000))
    os.truncate(tmp_path / "model.gguf", 8 << 40)
    _expect(tmp_path, r"has an array of 500,000,000 texts .*array_items")


def test_pieces_that_are_in_no_file(tmp_path: Path) -> None:
    piece = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([10**6]), [piece] * 10**6)
    stored = {MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 10)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": tensor}, None, stored)))
    _expect(tmp_path, "has 1000000 pieces of tensors, but only 1 in files")


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = tmp_path / "nested"
    nested.joinpath(*["actor"] * 100).mkdir(parents=True)
    _expect(nested, "nested deeply, or one of hundreds of directories")
    for number in range(30):
        (tmp_path / f"{number}.txt").touch()
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "directory_entries=30")
    _expect(tmp_path, r"too many files to be a checkpoint: the limit is 30")


def test_few_open_files_are_enough(tmp_path: Path) -> None:
    """As `ulimit -n 24` has it; 21 and 40 files."""
    save_model(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "sharded", format="sharded", ranks=40)
    convert(tmp_path / "model", tmp_path / "indexed", max_shard_size="6kB")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, before[1]))
    try:
        for name in ("sharded", "indexed"):
            assert summarize_checkpoint(tmp_path / name).num_tensors == 20
            assert verify(tmp_path / name, against=tmp_path / "model").is_sound
            convert(tmp_path / name, tmp_path / f"{name}-again", format="sharded", ranks=30)
            for device in ("cpu", "disk"):
                load_dispatched(tmp_path / name, device_map=device)(torch.tensor([[1, 2]]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_metadata_of_many_ranks_is_read() -> None:
    """Pieces as of 256 ranks in the memory and order of magnitude that torch's own take."""
    pieces = [ChunkStorageMetadata(torch.Size([n * 4, 0]), torch.Size([4, 64])) for n in range(256)]
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        f"model.layers.{n}.weight": TensorStorageMetadata(
            TensorProperties(dtype=torch.bfloat16), torch.Size([1024, 64]), list(pieces)
        )
        for n in range(20)
    }
    stored = {
        MetadataIndex(name, piece.offsets, number): _StorageInfo(f"__{number}_0.distcp", 0, 10)
        for name in tensors
        for number, piece in enumerate(pieces)
    }
    from fsdp_shard.checkpoint.torch_pickle import load

    found = load(pickle.dumps(Metadata(tensors, None, stored)), "x")
    assert len(found.storage_data) == 20 * 256


def test_a_zip_of_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for number in range(200):
            archive.writestr(f"archive/data/{number}", b"")
    (tmp_path / "model.pt").write_bytes(data.getvalue())
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "tensors=199")
    _expect(tmp_path / "model.pt", "a zip archive of too many members")
