"""Checks the CRC32s that some files store for parts of themselves, as a side effect of normal reads.

torch.save writes one for each storage (a member of a zip archive), and torch.load ignores it. Reads come in any order
and from several threads, so the CRC of each read is kept. Once the reads cover a whole storage, their CRCs are
combined.
"""

import threading
import zlib
from bisect import bisect_left, bisect_right
from functools import lru_cache, reduce
from pathlib import Path
from typing import NamedTuple

from fsdp_shard.errors import CheckpointError

_POLYNOMIAL = 0xEDB88320


class Checksum(NamedTuple):
    """The CRC32 that a file stores for its `num_bytes` bytes from `start`."""

    start: int
    num_bytes: int
    crc: int


class _Part(NamedTuple):
    """The CRC of the bytes [start, stop) of a file."""

    start: int
    stop: int
    crc: int


class ChecksumTracker:
    """Tracks the checksums of the files in `root`, as far as they were read. Thread-safe.

    Attributes:
        raises: Whether a wrong CRC is an error; if not, its record is added to `damaged`.
        damaged: (file, checksum) of wrong CRCs.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parts: dict[tuple[str, Checksum], list[_Part]] = {}
        self._done: set[tuple[str, Checksum]] = set()
        self._lock = threading.Lock()
        self.raises = True
        self.damaged: list[tuple[str, Checksum]] = []

    def is_done(self, file: str, checksum: Checksum) -> bool:
        """Whether all bytes of a checksum were read, and so compared."""
        return (file, checksum) in self._done

    def add(self, file: str, checksum: Checksum, offset: int, data: memoryview) -> None:
        """Record `data`, which was read from byte `offset` of `file` and which `checksum` covers.

        Raises:
            CheckpointError: These were the last bytes, and the CRC is wrong.
        """
        key = (file, checksum)
        if key in self._done or not len(data):
            return
        new = _Part(offset, offset + len(data), zlib.crc32(data))
        with self._lock:
            if key in self._done:  # meanwhile
                return
            parts = self._parts.setdefault(key, [])  # sorted, none overlaps another
            first = bisect_right(parts, new.start, key=lambda part: part.stop)
            end = bisect_left(parts, new.stop, key=lambda part: part.start)
            if end - first == 1 and parts[first].start <= new.start and new.stop <= parts[first].stop:
                return
            parts[first:end] = [new]  # such as the beginning of a tensor, before all of it
            if sum(part.stop - part.start for part in parts) < checksum.num_bytes:
                return
            del self._parts[key]
            self._done.add(key)
        if reduce(_joined, parts).crc != checksum.crc:
            self._report(file, checksum)

    def gaps(self, file: str, checksum: Checksum) -> list[tuple[int, int]]:
        """The ranges [start, stop) of a checksum's bytes that were not read."""
        if self.is_done(file, checksum):
            return []
        with self._lock:
            parts = list(self._parts.get((file, checksum), ()))
        stops = [checksum.start, *(part.stop for part in parts)]
        starts = [*(part.start for part in parts), checksum.start + checksum.num_bytes]
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    def _report(self, file: str, checksum: Checksum) -> None:
        self.damaged.append((file, checksum))
        if self.raises:
            raise CheckpointError(self.describe(file, checksum))

    def describe(self, file: str, checksum: Checksum) -> str:
        """The message for a wrong CRC."""
        last = checksum.start + checksum.num_bytes - 1
        return (
            f"{self._root / file}, bytes {checksum.start}-{last}: the values do not have the CRC32 that was written "
            f"with them, so they are damaged. Copy the file again, or take another save."
        )


def _joined(one: _Part, next_one: _Part) -> _Part:
    return _Part(one.start, next_one.stop, combine(one.crc, next_one.crc, next_one.stop - next_one.start))


def combine(first: int, second: int, num_bytes: int) -> int:
    """Combine the CRC32s of two neighboring parts; the second has `num_bytes` (like zlib's `crc32_combine`)."""
    return _product(_power(num_bytes), first) ^ second


@lru_cache(maxsize=256)
def _power(num_bytes: int) -> int:
    """x to the power of 8 * num_bytes, modulo the polynomial, in reflected bits."""
    power, square = 1 << 31, 1 << 23  # 1, and x^8
    while num_bytes:
        if num_bytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        num_bytes >>= 1
    return power


def _product(one: int, two: int) -> int:
    """The product of two polynomials over GF(2), modulo the polynomial of CRC32, in reflected bits."""
    found = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            found ^= two
        two = two >> 1 ^ (_POLYNOMIAL if two & 1 else 0)
    return found
