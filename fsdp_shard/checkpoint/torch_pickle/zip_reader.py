"""Finds the byte ranges of members in an uncompressed, unencrypted zip archive, which may be a part of a file.

`zipfile` neither reads the local headers, which contain the position of a member's data, nor checks that members do not
overlap. Layout: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3 (zip64).
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import read_range, refuse_excess

_END, _END_64, _LOCATOR_64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_END_FORMAT = struct.Struct("<4s4H2LH")
_END_64_FORMAT = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_FORMAT = struct.Struct("<4sLQL")
_ENTRY_FORMAT = struct.Struct("<4s6H3L5H2L")
_LOCAL_FORMAT = struct.Struct("<4s5H3L2H")
ENTRY_BYTES, CRC_IN_ENTRY = _ENTRY_FORMAT.size, 16
_ENCRYPTED = 1
_MAX_COMMENT = (1 << 16) - 1
_NONE_16, _NONE_32 = 0xFFFF, 0xFFFFFFFF  # "see the zip64 record"


@dataclass(frozen=True, slots=True)
class Member:
    """A member: the absolute position of its first byte in the file, its number of bytes, and its CRC32.

    `crc` is 0 if none was computed; `crc_at` is its own position.
    """

    start: int
    num_bytes: int
    crc: int
    crc_at: int


def read_members(descriptor: int, start: int, num_bytes: int, where: str) -> dict[str, Member]:
    """The members of the archive in bytes [start, start + num_bytes) of an open file, by name.

    Every error in the archive is a CheckpointError that begins with `where`.
    """
    archive = _Archive(descriptor, start, num_bytes, where)
    try:
        return archive.members()
    except struct.error:
        raise archive.wrong("has a central directory that is cut short") from None


class _Archive:
    def __init__(self, descriptor: int, start: int, num_bytes: int, where: str) -> None:
        self._descriptor, self._start, self._size, self._where = descriptor, start, num_bytes, where

    def wrong(self, problem: str) -> CheckpointError:
        """The error for a damaged archive; `problem` follows its name."""
        return CheckpointError(f"{self._where} {problem}: the file is damaged, or not what torch.save writes.")

    def _read(self, offset: int, count: int) -> bytes:
        """Read `count` bytes of the archive; fewer at its end."""
        if offset >= self._size:  # it may exceed the system's maximum offset
            return b""
        return os.pread(self._descriptor, max(min(count, self._size - offset), 0), self._start + offset)

    def members(self) -> dict[str, Member]:
        """The members by name, after checking that they do not overlap."""
        offset, length, number = self._directory()
        found, end, before = {}, 0, ""
        refuse_excess(number, "tensors", f"{self._where} is a zip archive of too many members")
        directory = read_range(self._descriptor, self._start + offset, length, self._where, "metadata_bytes")
        for header, name, num_bytes, crc, at in sorted(self._entries(directory, number)):
            if header < end:
                raise self.wrong(f"has members {before!r} and {name!r} that overlap")
            begin = self._data_start(header, name)
            end, before = begin + num_bytes, name
            if end > offset:
                raise self.wrong(f"has a member {name!r} that ends at byte {end}, in the central directory")
            if name in found:
                raise self.wrong(f"has two members named {name!r}")
            found[name] = Member(self._start + begin, num_bytes, crc, self._start + offset + at)
        return found

    def _directory(self) -> tuple[int, int, int]:
        """(offset, bytes, number of entries) of the central directory."""
        tail_start = max(self._size - _END_FORMAT.size - _MAX_COMMENT, 0)
        tail = self._read(tail_start, _END_FORMAT.size + _MAX_COMMENT)
        at = tail.rfind(_END)
        if at < 0 or len(tail) - at < _END_FORMAT.size:
            raise CheckpointError(f"{self._where} is a zip archive without its end: the file was cut short.")
        _, disk, _, _, number, length, offset, comment = _END_FORMAT.unpack_from(tail, at)
        if at + _END_FORMAT.size + comment != len(tail):
            raise self.wrong("is a zip archive with something after its end")
        end = tail_start + at
        locator = self._read(end - _LOCATOR_FORMAT.size, _LOCATOR_FORMAT.size) if end >= _LOCATOR_FORMAT.size else b""
        if locator.startswith(_LOCATOR_64):
            narrow = (number, length, offset)
            end, number, length, offset, disk = self._directory_64(locator)
            for short, wide in zip(narrow, (number, length, offset), strict=True):
                if short not in (wide, _NONE_16, _NONE_32):
                    raise self.wrong(f"says at its end that its central directory has {narrow}, and {wide} before that")
        if disk:
            raise self.wrong("is a zip archive in several parts")
        if offset + length != end:
            raise self.wrong(
                f"says that its central directory is {length} bytes at byte {offset}, but that directory ends at {end}"
            )
        return offset, length, number

    def _directory_64(self, locator: bytes) -> tuple[int, int, int, int, int]:
        _, disk, at, _ = _LOCATOR_FORMAT.unpack(locator)
        record = self._read(at, _END_64_FORMAT.size)
        if not record.startswith(_END_64):
            raise self.wrong("has a zip64 locator that leads to no zip64 record")
        _, _, _, _, _, _, _, number, length, offset = _END_64_FORMAT.unpack(record)
        return at, number, length, offset, disk

    def _entries(self, directory: bytes, number: int) -> Iterator[tuple[int, str, int, int, int]]:
        """(position of the local header, name, bytes, CRC, its position in the directory) of each member."""
        at = count = 0
        while at < len(directory) and count <= number:
            fields = _ENTRY_FORMAT.unpack_from(directory, at)
            signature, flags, method, packed, size = fields[0], fields[3], fields[4], fields[8], fields[9]
            name_length, extra_length, comment_length, header = fields[10], fields[11], fields[12], fields[16]
            if signature != _ENTRY:
                raise self.wrong("has a central directory with something in it that is not an entry")
            crc_at = at + CRC_IN_ENTRY
            at += _ENTRY_FORMAT.size
            name = self._name(directory[at : at + name_length])
            extra = directory[at + name_length : at + name_length + extra_length]
            size, packed, header = self._wide(extra, (size, packed, header), name)
            if method or packed != size or flags & _ENCRYPTED:
                raise CheckpointError(
                    f"{self._where} has a member {name!r} that is compressed or encrypted; it is not unpacked. "
                    "torch.save writes no such thing: if this is a TorchScript program, save its state_dict() instead."
                )
            yield header, name, size, fields[7], crc_at
            at += name_length + extra_length + comment_length
            count += 1
        if count != number or at != len(directory):
            raise self.wrong(f"has a central directory of {count} members that says it has {number}")

    def _name(self, data: bytes) -> str:
        try:
            name = data.decode()
        except UnicodeDecodeError:
            raise self.wrong("has a member whose name is not text") from None
        if not name or name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
            raise self.wrong(f"has a member named {name[:200]!r}, which is outside the archive")
        return name

    def _wide(self, extra: bytes, values: tuple[int, int, int], name: str) -> tuple[int, ...]:
        """Return `values` (size, packed size, offset), replacing those that exceed 32 bits by the zip64 field's."""
        num_wide, at = values.count(_NONE_32), 0
        while num_wide and at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            if kind == 1 and length >= 8 * num_wide:
                wide = iter(struct.unpack_from(f"<{num_wide}Q", extra, at + 4))
                return tuple(next(wide) if value == _NONE_32 else value for value in values)
            at += 4 + length
        if num_wide:
            raise self.wrong(f"has a member {name!r} whose size or position is missing")
        return values

    def _data_start(self, header: int, name: str) -> int:
        """The first byte of a member's data, from its local header, which must have the same name."""
        local = self._read(header, _LOCAL_FORMAT.size)
        if len(local) < _LOCAL_FORMAT.size or not local.startswith(_LOCAL):
            raise self.wrong(f"has no member at byte {header}, where {name!r} should be")
        *_, name_length, extra_length = _LOCAL_FORMAT.unpack(local)
        if self._read(header + _LOCAL_FORMAT.size, name_length) != name.encode():
            raise self.wrong(f"calls the member {name!r} by another name in its local header")
        return header + _LOCAL_FORMAT.size + int(name_length) + int(extra_length)
