"""Open files of a checkpoint: as many as it takes at a time, and no more."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.io.atomicity import allocate
from fsdp_shard.checkpoint.io.files import FilePool, Files, split_aligned
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import assert_same, write_huggingface


def is_open(handle: int) -> bool:
    try:
        os.fstat(handle)
    except OSError:
        return False
    return True


def test_the_last_unused_files_close_and_open_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilePool, "MAX_FILES", 3)
    for number in range(6):
        (tmp_path / str(number)).write_text(str(number))
    opened: list[int] = []

    def open_file(name: str) -> int:
        opened.append(os.open(tmp_path / name, os.O_RDONLY))
        return opened[-1]

    pool = FilePool(open_file)
    for number in [*range(6), *range(6)]:  # as tensors of six ranks are read
        with pool.use(str(number)) as handle:
            assert os.pread(handle, 1, 0) == str(number).encode()
    assert len(opened) == 9  # of the second turn 0, 1 and 5 were still open
    with ExitStack() as stack:  # files in use stay, however many
        held = [stack.enter_context(pool.use(str(number))) for number in range(6)]
        assert all(map(is_open, held))
    pool.close()
    assert not any(map(is_open, opened))


def test_what_one_does_not_use_is_closed_when_another_can_open_no_more(tmp_path: Path) -> None:
    """As a model on disk, whose files stay open between its calls, and `convert` beside it."""
    for number in range(8):
        (tmp_path / str(number)).write_text(str(number))
    model, target = (FilePool(lambda name: os.open(tmp_path / name, os.O_RDONLY)) for _ in range(2))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        free = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]  # others may be open between these
        for descriptor in free:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        held = stack.enter_context(model.use("0"))
        for number in range(1, 4):
            with model.use(str(number)):
                pass
        for number in range(8):
            with target.use(str(number)) as handle:
                assert os.pread(handle, 1, 0) == str(number).encode()
        assert os.pread(held, 1, 0) == b"0"


def test_a_file_that_is_replaced_is_not_read_on(tmp_path: Path) -> None:
    for name in ("read", "remembered", "new"):
        (tmp_path / name).write_text(f"{name} first")
    files, out = Files(tmp_path), bytearray(4)
    files.read_into("read", 0, memoryview(out))
    files.remember("remembered")
    files.close()
    files.read_into("read", 0, memoryview(out))  # it is the same
    assert out == b"read"
    files.close()
    for name in ("read", "remembered"):
        (tmp_path / "new").write_text(f"{name} again")
        os.utime(tmp_path / "new", (1, 1))
        os.replace(tmp_path / "new", tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"{name} was replaced or written to while the checkpoint was read"):
            files.read_into(name, 0, memoryview(out))


def test_each_of_many_rank_files_is_opened_once_to_convert(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 2000:
        pytest.skip(f"a process may open {hard} files at most here")
    tensors = {name: torch.randn(900, 3) for name in "abcdef"}
    write_huggingface(tmp_path / "one", tensors)
    convert(tmp_path / "one", tmp_path / "ranks", format="sharded", ranks=300)
    counted = """
import collections, json, sys
opened = collections.Counter()
sys.addaudithook(lambda event, args: opened.update([str(args[0])] if event == "open" else []))
sys.argv = ["fsdp-shard", "convert", "source=ranks", "target=back"]
from fsdp_shard.cli import main
try:
    main()
finally:
    counts = [count for name, count in opened.items() if name.endswith("-of-00300.safetensors")]
    print(json.dumps(counts), file=sys.stderr)
"""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n{counted}"
    done = subprocess.run([sys.executable, "-c", limited], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stderr.splitlines()[-1])
    assert counts == [1] * 300


def test_more_ranks_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilePool, "MAX_FILES", 4)
    tensors = {"a": torch.randn(40, 3), "b": torch.randn(7)}
    write_huggingface(tmp_path / "one", tensors)
    convert(tmp_path / "one", tmp_path / "ranks", format="sharded", ranks=20)
    convert(tmp_path / "ranks", tmp_path / "back", format="dcp", ranks=9)
    with open_checkpoint(tmp_path / "back") as index:
        assert_same(index, tensors)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 8), (3, 4), (3, 8), (3, 30), (16, 31)])
def test_parts_end_where_multiples_of_their_size_are(start: int, stop: int) -> None:
    parts = list(split_aligned(start, stop, 8))
    assert [byte for low, high in parts for byte in range(low, high)] == list(range(start, stop))
    assert all(high % 8 == 0 for _, high in parts[:-1])
    assert all(0 < high - low <= 8 for low, high in parts)
    assert len(parts) == len({byte // 8 for byte in range(start, stop)})


def test_a_new_file_has_its_blocks_before_its_bytes(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        if not _can_allocate(file.fileno()):
            pytest.skip("this file system sets no blocks aside")
        allocate(file.fileno(), 1 << 20)
        found = os.fstat(file.fileno())
    assert found.st_size == 1 << 20
    assert found.st_blocks * 512 >= 1 << 20


def _can_allocate(descriptor: int) -> bool:
    """Whether fallocate works here; posix_fallocate would write where it does not."""
    return ctypes.CDLL(None).fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(4096)) == 0
