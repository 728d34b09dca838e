"""CRCs of parts that are read in any order are those of the whole."""

from __future__ import annotations

import itertools
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, strategies

from fsdp_shard.checkpoint.io.zip_crcs import Checksum, ChecksumTracker, combine
from fsdp_shard.errors import CheckpointError

_DATA = random.Random(0).randbytes(100_000)
_START = 1000


@given(strategies.binary(max_size=300), strategies.binary(max_size=70_000))
def test_combining_is_zlibs(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def read(tracker: ChecksumTracker, checksum: Checksum, start: int, stop: int) -> None:
    tracker.add("file", checksum, _START + start, memoryview(_DATA)[start:stop])


@given(strategies.lists(strategies.integers(0, len(_DATA)), max_size=20), strategies.randoms())
def test_parts_in_any_order(cuts: list[int], order: random.Random) -> None:
    edges = [0, *sorted(cuts), len(_DATA)]
    parts = list(itertools.pairwise(edges))
    order.shuffle(parts)
    checksum, tracker = Checksum(_START, len(_DATA), zlib.crc32(_DATA)), ChecksumTracker(Path("root"))
    for number, (start, stop) in enumerate(parts):
        missing = sum(stop - start for start, stop in tracker.gaps("file", checksum))
        assert missing == sum(stop - start for start, stop in parts[number:])
        read(tracker, checksum, start, stop)
    assert tracker.is_done("file", checksum)
    assert tracker.damaged == []


@given(strategies.lists(strategies.integers(0, len(_DATA)), max_size=20), strategies.randoms())
def test_parts_whose_beginnings_were_read_before(cuts: list[int], order: random.Random) -> None:
    """As fingerprints read them, of which some are neighbors."""
    parts = list(itertools.pairwise([0, *sorted(cuts), len(_DATA)]))
    checksum, tracker = Checksum(_START, len(_DATA), zlib.crc32(_DATA)), ChecksumTracker(Path("root"))
    for start, stop in parts:
        read(tracker, checksum, start, min(stop, start + 4096))
    order.shuffle(parts)
    for start, stop in parts:
        read(tracker, checksum, start, stop)
    assert tracker.is_done("file", checksum)
    assert tracker.damaged == []


def test_damage_is_an_error_at_the_last_part_only() -> None:
    checksum, tracker = Checksum(_START, len(_DATA), zlib.crc32(_DATA) ^ 1), ChecksumTracker(Path("root"))
    read(tracker, checksum, 500, len(_DATA))
    with pytest.raises(CheckpointError, match=r"root/file, bytes 1000-100999: .* do not have the CRC32"):
        read(tracker, checksum, 0, 500)
    read(tracker, checksum, 0, 500)  # it was said
    quiet = ChecksumTracker(Path("root"))
    quiet.raises = False
    read(quiet, checksum, 0, len(_DATA))
    assert quiet.damaged == [("file", checksum)]


def test_what_is_read_again_is_counted_once() -> None:
    checksum, tracker = Checksum(_START, len(_DATA), zlib.crc32(_DATA)), ChecksumTracker(Path("root"))
    for start, stop in ((0, 4096), (0, 60_000), (10, 20), (50_000, 70_000), (60_000, 100_000), (0, 60_000)):
        read(tracker, checksum, start, stop)
    assert tracker.is_done("file", checksum)
    assert tracker.damaged == []


def test_parts_from_several_threads() -> None:
    checksum, tracker = Checksum(_START, len(_DATA), zlib.crc32(_DATA)), ChecksumTracker(Path("root"))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda start: read(tracker, checksum, start, start + 100), range(0, len(_DATA), 100)))
    assert tracker.is_done("file", checksum)
    assert tracker.damaged == []
