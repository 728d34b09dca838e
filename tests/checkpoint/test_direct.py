"""Ranges of files that are written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from fsdp_shard.checkpoint import direct
from fsdp_shard.checkpoint.direct import BlockReader, DirectFile, Stage
from fsdp_shard.checkpoint.files import large_pages, page_aligned

SIZE = 10 << 20


def write(path: Path, ranges: list[tuple[int, int]], *, piece: int = SIZE, past_cache: bool = True) -> bytes:
    """Random bytes in these ranges of a new file of SIZE bytes; what should be in it then."""
    path.write_bytes(bytes(SIZE))
    expected = bytearray(SIZE)
    stage, file = Stage(), DirectFile(path, past_cache=past_cache)
    for start, stop in ranges:
        content = np.random.default_rng(start).bytes(stop - start)
        expected[start:stop] = content
        for low in range(start, stop, piece):
            stage.put(file, low, memoryview(content)[low - start : low - start + piece])
    stage.write()
    file.sync()
    file.close()
    return bytes(expected)


RANGES = {
    "nothing": [(5, 5)],
    "less than a block": [(10, 90)],
    "over the end of a block": [(4000, 4200)],
    "one block": [(4096, 8192)],
    "blocks and what is around them": [(5000, 30001), (30001, 60002)],
    "more than a stage": [(12, SIZE - 6)],
    "all": [(0, SIZE)],
}


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_what_is_written_is_there(ranges: list[tuple[int, int]], is_direct: bool, tmp_path: Path) -> None:
    expected = write(tmp_path / "file", ranges, past_cache=is_direct)
    assert (tmp_path / "file").read_bytes() == expected


@pytest.mark.parametrize("start", [0, 4096, 13, (4 << 20) - 20])
@pytest.mark.parametrize("piece", [1000, 5 << 20])
def test_pieces_are_brought_together(start: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    put = DirectFile.write

    def note(file: DirectFile, offset: int, content: memoryview) -> None:
        written.append((offset, offset + len(content)))
        put(file, offset, content)

    monkeypatch.setattr(DirectFile, "write", note)
    stop = start + (5 << 20) + 7
    expected = write(tmp_path / "file", [(start, stop)], piece=piece)
    assert (tmp_path / "file").read_bytes() == expected
    end = start - start % 4096 + (4 << 20)
    assert [(low, high) for low, high in written if low < high] == [(start, end), (end, stop)]


def test_what_belongs_elsewhere_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(9000))
    (tmp_path / "b").write_bytes(bytes(9000))
    stage, files = Stage(), [DirectFile(tmp_path / name, past_cache=True) for name in "ab"]
    first, second = files
    for file, offset, content in [(first, 0, b"one"), (second, 3, b"two"), (second, 8000, b"three")]:
        stage.put(file, offset, memoryview(content))
    stage.put(second, 8005, memoryview(b"four"))
    stage.put(first, 3, memoryview(b"x"))
    stage.write()
    for file in files:
        file.close()
    assert (tmp_path / "a").read_bytes() == b"onex" + bytes(8996)
    assert (tmp_path / "b").read_bytes() == bytes(3) + b"two" + bytes(7994) + b"threefour" + bytes(991)


def test_whole_blocks_pass_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probe").touch()
    if (probe := direct._open_direct(tmp_path / "probe", os.O_WRONLY)) is None:
        pytest.skip("this file system has no direct writing")
    os.close(probe)
    written = {True: 0, False: 0}
    pwrite = os.pwrite

    def count(descriptor: int, data: memoryview, offset: int) -> int:
        done = pwrite(descriptor, data, offset)
        written[bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)] += done
        return done

    monkeypatch.setattr(os, "pwrite", count)
    write(tmp_path / "file", [(1000, SIZE - 1000)], piece=1 << 20)
    assert written == {True: SIZE - 2 * 4096, False: 2 * 3096}


def test_memory_that_cannot_be_written_directly_is_written_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    content = page_aligned((1 << 20) + 1)[1:]  # not as far into its block as what is in the file
    content[:] = np.random.default_rng(0).bytes(1 << 20)
    file = DirectFile(tmp_path / "file", past_cache=True)
    file.write(0, content)
    file.close()
    assert (tmp_path / "file").read_bytes() == bytes(content)


@pytest.mark.parametrize("past_cache", [True, False])
def test_ranges_of_files_are_read(past_cache: bool, tmp_path: Path) -> None:
    content = {name: np.random.default_rng(number).bytes(3 << 20) + b"end" for number, name in enumerate("ab")}
    for name, expected in content.items():
        (tmp_path / name).write_bytes(expected)
    reader, end = BlockReader(tmp_path, 1 << 20, past_cache=past_cache), (3 << 20) + 3
    for start, stop in [(0, 1), (4095, 4097), (4096, 8192), (777, 777 + (1 << 20)), (end - 5, end), (end, end)]:
        for name, expected in content.items():
            assert reader.read(name, start, stop - start) == expected[start:stop]
    with pytest.raises(OSError, match="ends 4 bytes before") as raised:
        reader.read("b", end - 1, 5)
    assert raised.value.filename == str(tmp_path / "b")
    reader.close()


def test_blocks_are_read_past_the_cache_where_they_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(content := np.random.default_rng(0).bytes(1 << 20))
    if (probe := direct._open_direct(tmp_path / "file", os.O_RDONLY)) is None:
        pytest.skip("this file system has no direct reading")
    os.close(probe)
    calls, preadv, refuses = [], os.preadv, False

    def note(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        if refuses and calls[-1]:
            raise OSError(errno.EINVAL, "blocks are larger here")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    reader = BlockReader(tmp_path, 1 << 20, past_cache=True)
    assert reader.read("file", 5, 70_000) == content[5:70_005]
    refuses = True
    for _ in range(2):
        assert reader.read("file", 5, 70_000) == content[5:70_005]
    assert calls == [True, True, False, False], "asked once"
    reader.close()


def test_what_is_written_lies_in_large_pages() -> None:
    memory = large_pages(4 << 20)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    assert len(memory) == 4 << 20
    assert address % (2 << 20) == 0
    memory[:] = bytes(len(memory))  # all of it is there
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in _flags(address)


def _flags(address: int) -> list[str]:
    """What the kernel was told of the memory at `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []
