"""How bytes get from file to file: copied by the kernel where they lie alike in pages, else read and written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_shard.checkpoint import files
from fsdp_shard.checkpoint.convert import convert
from fsdp_shard.checkpoint.header import PAGE_BYTES, read_header
from fsdp_shard.checkpoint.index import open_checkpoint
from tests.checkpoint.files import assert_same

TENSORS = {
    "first": torch.arange(700_000, dtype=torch.float32).reshape(700, 1000),  # no whole number of pages
    "second": torch.arange(300_001, dtype=torch.float32),
    "third": torch.rand(500, 333, dtype=torch.float64),
}


class Copies:
    """Stands in front of `os.copy_file_range` and counts its bytes; `limit` bytes a call, then `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int | None = None, end: int | OSError = 0) -> None:
        self.num_bytes, self._limit, self._end = 0, limit, end
        self._real = os.copy_file_range
        monkeypatch.setattr(files.os, "copy_file_range", self)

    def __call__(self, source: int, target: int, count: int, offset: int, at: int) -> int:
        if self._limit is not None and offset % 3 == 0:
            if isinstance(self._end, OSError):
                raise self._end
            return self._end
        done = self._real(source, target, min(count, self._limit or count), offset, at)
        self.num_bytes += done
        return done


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "source.safetensors", {"format": "pt"})
    return tmp_path / "source.safetensors"


def assert_holds(path: Path) -> None:
    with open_checkpoint(path) as index:
        assert_same(index, TENSORS)


def test_bytes_that_stay_as_they_are_are_copied(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    convert(source, tmp_path / "one", verify=False)
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    assert copies.num_bytes == total
    convert(tmp_path / "one", tmp_path / "pieces", max_shard_size="3MB", verify=False)
    assert copies.num_bytes == 2 * total
    convert(tmp_path / "pieces", tmp_path / "again", verify=False)
    assert copies.num_bytes > 2 * total  # what lies in its page as it will lie; the rest is read and written
    for name in ("one", "pieces", "again"):
        assert_holds(tmp_path / name)


@pytest.mark.parametrize("end", [0, OSError(errno.EXDEV, "Invalid cross-device link")])
def test_what_the_kernel_does_not_copy_is_read_and_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, end: int | OSError
) -> None:
    copies = Copies(monkeypatch, limit=100_001, end=end)
    convert(source, tmp_path / "one", verify=False)
    assert 0 < copies.num_bytes < sum(tensor.nbytes for tensor in TENSORS.values())
    assert_holds(tmp_path / "one")


def test_a_file_lies_in_its_pages_as_its_source_does(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "pieces", max_shard_size="3MB")
    begins = {name: stored.start for name, stored in read_header(source).tensors.items()}
    written = sorted((tmp_path / "pieces").glob("*.safetensors"))
    assert len(written) > 1
    for file in written:
        name, stored = next(iter(read_header(file).tensors.items()))
        assert file.stat().st_size <= 3_000_000
        assert (stored.start - begins[name]) % PAGE_BYTES == 0


def test_what_is_cast_begins_with_a_page(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "cast", dtype="bfloat16")
    header = read_header(tmp_path / "cast" / "model.safetensors")
    assert header.num_bytes % PAGE_BYTES == 0
