"""How bytes get from file to file: their blocks are shared where they lie alike in pages, else read and written."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.io.safetensors_format import PAGE_BYTES, read_header
from fsdp_shard.checkpoint.io.thread_pool import NUM_THREADS
from fsdp_shard.checkpoint.location import open_checkpoint
from tests.checkpoint.files import assert_same

TENSORS = {
    "first": torch.arange(700_000, dtype=torch.float32).reshape(700, 1000),  # no whole number of pages
    "second": torch.arange(300_001, dtype=torch.float32),
    "third": torch.rand(500, 333, dtype=torch.float64),
}


class Sharing:
    """A file system that has two files share blocks, `num_calls` times: it copies, and counts the bytes.

    The real thing is what these tests meet where tmp_path is on XFS or btrfs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_calls: int | None = None) -> None:
        self.num_bytes, self.num_refused, self._left = 0, 0, num_calls
        monkeypatch.setattr(fcntl, "ioctl", self)

    def __call__(self, target: int, request: int, argument: bytes) -> int:
        source, offset, count, at = struct.unpack("=qQQQ", argument)
        assert request == 0x4020940D
        assert not any(value % PAGE_BYTES for value in (offset, count, at)), "the kernel would refuse it"
        if self._left == 0:
            self.num_refused += 1
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        self._left = None if self._left is None else self._left - 1
        os.pwrite(target, os.pread(source, count, offset), at)
        self.num_bytes += count
        return 0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "source.safetensors", {"format": "pt"})
    return tmp_path / "source.safetensors"


def assert_holds(path: Path) -> None:
    with open_checkpoint(path) as index:
        assert_same(index, TENSORS)


def test_bytes_that_stay_as_they_are_share_their_blocks(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = Sharing(monkeypatch)
    convert(source, tmp_path / "one")
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    assert sharing.num_bytes > total - 4 * PAGE_BYTES * len(TENSORS)  # but for pages that are not of one tensor
    convert(tmp_path / "one", tmp_path / "ranks", format="sharded", ranks=3)
    shared = sharing.num_bytes
    convert(tmp_path / "ranks", tmp_path / "again")
    assert sharing.num_bytes > shared
    convert(source, tmp_path / "cast", dtype="bfloat16")
    for name in ("one", "ranks", "again"):
        assert_holds(tmp_path / name)


@pytest.mark.parametrize("num_calls", [0, 1])
def test_what_cannot_be_shared_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    sharing = Sharing(monkeypatch, num_calls)
    convert(source, tmp_path / "one")
    assert bool(sharing.num_bytes) == bool(num_calls)
    assert 1 <= sharing.num_refused <= NUM_THREADS, "asked again of a file system that cannot"
    assert_holds(tmp_path / "one")


def test_on_this_file_system(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "ranks", format="sharded", ranks=2)
    convert(tmp_path / "ranks", tmp_path / "pieces", max_shard_size="3MB")
    source.write_bytes(b"")  # what the files shared is theirs alone now
    assert_holds(tmp_path / "pieces")


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
