"""What torch.save wrote is found byte for byte without torch, in both of its containers and however it is strided."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.tensor_entry import TensorEntry
from fsdp_shard.checkpoint.torch_pickle import (
    StoredTensor,
    Unreadable,
    is_torch_file,
    piece_of,
    read_torch_bytes,
    read_torch_file,
)
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import assert_same, random_tensor

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


def index_of(path: Path, stored: dict[str, Any]) -> TensorIndex:
    tensors = {}
    for name, tensor in stored.items():
        assert isinstance(tensor, StoredTensor), (name, tensor)
        piece = piece_of(path.name, tensor, (0,) * len(tensor.shape))
        tensors[name] = TensorEntry(name, tensor.dtype, tensor.shape, (piece,))
    return TensorIndex(path.parent, "test", tensors)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_every_dtype(tmp_path: Path, is_zip: bool, protocol: int) -> None:
    tensors = {str(dtype): random_tensor((3, 5), dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "big": random_tensor((700, 900), torch.float32)}
    torch.save(tensors, tmp_path / "x.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    assert is_torch_file(tmp_path / "x.pt")
    with index_of(tmp_path / "x.pt", read_torch_file(tmp_path / "x.pt")) as index:
        assert_same(index, tensors)
        assert all(entry.pieces[0].codec is None for entry in index.tensors.values())


@pytest.mark.parametrize("is_zip", [True, False])
def test_every_stride(tmp_path: Path, is_zip: bool) -> None:
    base = random_tensor((6, 8, 10), torch.bfloat16)
    wide = random_tensor((2100, 1500), torch.float32, seed=1)
    tensors = {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "sliced": base[1:5, ::2, 3:7],
        "rows": base[2:4],
        "column": base[:, 1:2, 4],
        "expanded": base[0, :1, :].expand(5, 10),
        "scalar expanded": base[0, 0, 0].expand(3, 4),
        "one row of many": base[3:4, :, :].permute(1, 0, 2),
        "empty": base[:, :0].transpose(0, 1),
        "wide": wide.t(),
        "wide sliced": wide[::7, 100:1400:3],
    }
    torch.save(tensors, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    stored = read_torch_file(tmp_path / "x.pt")
    with index_of(tmp_path / "x.pt", stored) as index:
        assert_same(index, tensors)
        part = index.read("wide", (slice(700, 900), slice(5, 2000)))
        assert torch.equal(part.view(torch.int32), wide.t()[700:900, 5:2000].contiguous().view(torch.int32))
        plain = {name for name, entry in index.tensors.items() if entry.pieces[0].codec is None}
        assert plain == {"whole", "rows", "one row of many", "empty"}
    assert stored["rows"].start == stored["whole"].start + 2 * 80 * 2


def test_parameters_and_buffers(tmp_path: Path) -> None:
    module = torch.nn.BatchNorm1d(4)
    module.extra = torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
    tagged = torch.nn.Parameter(torch.ones(2))
    tagged.some_attribute = 3  # type: ignore[attr-defined]  # of its own
    buffer = torch.nn.Buffer(torch.full((2,), 3.0))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), "tagged": tagged, "buffer": buffer}
    torch.save(tensors, tmp_path / "x.pt")
    with index_of(tmp_path / "x.pt", read_torch_file(tmp_path / "x.pt")) as index:
        assert_same(index, {name: tensor.detach() for name, tensor in tensors.items()})
    torch.save(module.state_dict(), tmp_path / "x.pt")
    assert set(read_torch_file(tmp_path / "x.pt")) == set(module.state_dict())


@pytest.mark.filterwarnings("ignore")  # torch's own, about sparse and quantized tensors
def test_tensors_without_plain_bytes_say_why(tmp_path: Path) -> None:
    tensors = {
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "conjugated": torch.zeros(2, dtype=torch.complex64).conj(),
        "complex128": torch.zeros(2, dtype=torch.complex128),
        "complex32": torch.zeros(2, dtype=torch.complex32),
    }
    torch.save(tensors, tmp_path / "x.pt")
    stored = read_torch_file(tmp_path / "x.pt")
    for name, word in {
        "sparse": "sparse",
        "compressed": "sparse",
        "quantized": "quantized",
        "meta": "meta device",
        "conjugated": "conjugated",
        "complex128": "ComplexDouble",
        "complex32": "complex32",
    }.items():
        assert isinstance(stored[name], Unreadable), name
        assert word in stored[name].problem


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
def test_a_module_or_anything_else_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt asks to run 'torch\.nn\.modules\.linear\.Linear'"):
        read_torch_file(tmp_path / "x.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="TorchScript program"):
        read_torch_file(tmp_path / "y.pt")


def test_a_zip_inside_a_file(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save({"a": torch.arange(5.0)}, inner)
    (tmp_path / "x.distcp").write_bytes(b"before" + inner.getvalue() + b"behind")
    descriptor = os.open(tmp_path / "x.distcp", os.O_RDONLY)
    try:
        stored = read_torch_bytes(descriptor, 6, len(inner.getvalue()), "x.distcp")
    finally:
        os.close(descriptor)
    with index_of(tmp_path / "x.distcp", stored) as index:
        assert_same(index, {"a": torch.arange(5.0)})


def test_offsets_beyond_4_gb(tmp_path: Path) -> None:
    """The members of a real file, moved behind a hole of 5 GB by Python's zipfile, which then writes zip64 fields."""
    tensors = {"a": random_tensor((3, 5), torch.float32), "b": random_tensor((4,), torch.int64)}
    torch.save(tensors, tmp_path / "small.pt")
    with zipfile.ZipFile(tmp_path / "small.pt") as source, (tmp_path / "x.pt").open("w+b") as file:
        file.write(b"PK\x03\x04")
        file.truncate(5 << 30)
        file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file, "w") as target:
            target.start_dir = file.tell()
            for name in source.namelist():
                target.writestr(name, source.read(name))
    stored = read_torch_file(tmp_path / "x.pt")
    assert stored["a"].start > 5 << 30
    with index_of(tmp_path / "x.pt", stored) as index:
        assert_same(index, tensors)


def test_zip64_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": random_tensor((3, 5), torch.float32)}
    torch.save(tensors, tmp_path / "small.pt")
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    with zipfile.ZipFile(tmp_path / "small.pt") as source, zipfile.ZipFile(tmp_path / "x.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert b"PK\x06\x06" in (tmp_path / "x.pt").read_bytes()
    with index_of(tmp_path / "x.pt", read_torch_file(tmp_path / "x.pt")) as index:
        assert_same(index, tensors)
