"""Reads the files that describe checkpoints and models, with memory and time bounded by their size.

Never blocks, even if a path is a FIFO. A hole left by a download is detected before it is read into memory.
"""

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils.file_limits import exceeded, limits, refuse_excess
from fsdp_shard.utils.text import format_size

_ZEROS = bytes(1 << 20)  # read at once
# Python's memory for JSON that begins with these bytes: an object with a key, a list, a value in one.
_BYTES_OF = {b"{": 250, b"[": 64, b",": 60}
# The memory limit for JSON: a base, and an amount per byte; safetensors headers need up to 12 per byte.
_MEMORY_BYTES, _MEMORY_PER_BYTE = 64 << 20, 16
# Content that failed downloads leave in place of a file -> its description, with advice.
_OTHER_CONTENT = {
    b"version https://git-lfs": "the pointer of Git LFS to it; fetch the file itself with `git lfs pull`",
    b"<!doctype html": "an HTML page, perhaps of a failed download; download it again",
    b"<html": "an HTML page, perhaps of a failed download; download it again",
    b"<?xml": "an XML page, perhaps of a failed download; download it again",
}


def other_content(start: bytes) -> str | None:
    """Describe, by its first bytes, a file that should hold weights or data but does not; None if it may."""
    begin = start.lstrip().lower()
    return next((what for mark, what in _OTHER_CONTENT.items() if begin.startswith(mark)), None)


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor; never blocks, even if the path is a FIFO."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        advice = "; raise the limit by `ulimit -n`" if error.errno == errno.EMFILE else ""
        raise CheckpointError(f"{path} cannot be read: {error.strerror}{advice}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file, so it is not read.")
    return descriptor


def read_bounded(path: Path, limit: str) -> bytes:
    """Read a whole file.

    Args:
        path: The file.
        limit: The name of its size limit.

    Raises:
        CheckpointError: It is not a regular file, is larger than the limit, or has a hole.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return read_range(file.fileno(), 0, os.fstat(file.fileno()).st_size, str(path), limit)


def read_range(descriptor: int, start: int, num_bytes: int, where: str, limit: str) -> bytes:
    """Read bytes [start, start + num_bytes) of an open file like `read_bounded`; fewer at its end."""
    refuse_excess(num_bytes, limit, f"{where} takes {format_size(num_bytes)}, so it is not read")
    parts, end = [], start + num_bytes
    while start < end and (part := os.pread(descriptor, min(len(_ZEROS), end - start), start)):
        if part == _ZEROS:
            raise CheckpointError(
                f"{where} has nothing but zeros from byte {start} on: it was not written or downloaded completely."
            )
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def read_json(path: Path, limit: str = "config_bytes") -> Any:
    """Parse the JSON in a regular file like `parse_json`; `limit` is the name of its size limit."""
    return parse_json(read_bounded(path, limit), str(path))


def parse_json(data: bytes, where: str) -> Any:
    """Parse JSON. Duplicate keys are an error, since readers disagree on which one counts.

    Args:
        data: The JSON.
        where: The file, for errors.

    Raises:
        CheckpointError: It is invalid, nested too deeply, or would need a multiple of its size as Python objects.
    """
    if sum(data.count(sign) * size for sign, size in _BYTES_OF.items()) > _MEMORY_BYTES + _MEMORY_PER_BYTE * len(data):
        raise CheckpointError(f"{where} consists of many empty or tiny parts, so it is not the JSON of a checkpoint.")
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}.") from None
    inner = [document]
    for _ in range(limits().nesting):
        inner = [item for part in inner for item in _items(part) if isinstance(item, (dict, list))]
    if inner:
        raise _too_deep(where)
    return document


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(where: str) -> CheckpointError:
    return CheckpointError(f"{where} is nested too deeply to be the JSON of a checkpoint: {exceeded('nesting')}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"duplicate key {twice!r}")
    "".join(found).encode()  # a lone surrogate is not valid text: UnicodeEncodeError is a ValueError
    return found
