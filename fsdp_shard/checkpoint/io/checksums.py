"""Checks the CRC32 that some files hold of parts of themselves, along with the reads that there are anyway.

torch.save writes one for each storage (a member of a zip archive), and torch.load ignores it. Reads come in any order
and from several threads, so the CRCs of what was read are combined until they cover a whole storage.
"""

import threading
import zlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fsdp_shard.errors import CheckpointError

_POLYNOMIAL = 0xEDB88320


class Checksum(NamedTuple):
    """The CRC32 that a file holds of `num_bytes` of itself, from byte `start` on."""

    start: int
    num_bytes: int
    crc: int


class _Part(NamedTuple):
    """The CRC of the bytes [start, stop) of a file."""

    start: int
    stop: int
    crc: int


class ChecksumTracker:
    """The records of the files in `root`, as far as they were read. Thread-safe.

    Attributes:
        raises: Whether a record whose CRC does not hold is an error; if not, it is added to `damaged`.
        damaged: (file, checksum) of these.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parts: dict[tuple[str, Checksum], list[_Part]] = {}
        self._done: set[tuple[str, Checksum]] = set()
        self._lock = threading.Lock()
        self.raises = True
        self.damaged: list[tuple[str, Checksum]] = []

    def is_done(self, file: str, checksum: Checksum) -> bool:
        """Whether all of its bytes were read, and so compared."""
        return (file, checksum) in self._done

    def add(self, file: str, checksum: Checksum, offset: int, data: memoryview) -> None:
        """Take note of `data`, which was read from byte `offset` of `file` on, and which `checksum` covers.

        Raises:
            CheckpointError: These were the last of its bytes, and it does not hold.
        """
        key = (file, checksum)
        if key in self._done or not len(data):
            return
        new = _Part(offset, offset + len(data), zlib.crc32(data))
        with self._lock:
            known = self._parts.get(key, [])
            if any(part.start <= new.start and new.stop <= part.stop for part in known):
                return
            kept = [part for part in known if part.stop <= new.start or new.stop <= part.start]
            joined = _joined(sorted([*kept, new]))
            if joined[0][:2] != (checksum.start, checksum.start + checksum.num_bytes):
                self._parts[key] = joined
                return
            self._parts.pop(key, None)
            self._done.add(key)
        if joined[0].crc != checksum.crc:
            self._report(file, checksum)

    def gaps(self, file: str, checksum: Checksum) -> list[tuple[int, int]]:
        """The ranges [start, stop) of its bytes that were not read."""
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
        """The message for one that does not hold."""
        last = checksum.start + checksum.num_bytes - 1
        return (
            f"{self._root / file}, bytes {checksum.start}-{last}: the values do not have the CRC32 that was written "
            f"with them, so they are damaged. Copy the file again, or take another save."
        )


def _joined(parts: list[_Part]) -> list[_Part]:
    """Sorted parts, neighbors joined."""
    found: list[_Part] = []
    for part in parts:
        if found and found[-1].stop == part.start:
            before = found.pop()
            part = _Part(before.start, part.stop, combine(before.crc, part.crc, part.stop - part.start))
        found.append(part)
    return found


def combine(first: int, second: int, num_bytes: int) -> int:
    """The CRC32 of two neighboring parts from theirs; the second has `num_bytes` (as zlib's `crc32_combine`)."""
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
