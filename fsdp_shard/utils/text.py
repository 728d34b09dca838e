"""Formats and parses values: sizes, counts, addresses, the first line of an error, the closest known name, a digest."""

import difflib
import fnmatch
import json
import operator
import os
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile, zip_longest
from typing import Any

from fsdp_shard.errors import ConfigError, one_line

# Decimal and binary suffixes, as in the IEC 80000-13 standard; "5G" is read as "5GB", as in transformers.
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_LINE = 500  # characters in an error's first line

ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://(.*)", re.DOTALL)
"""Of a remote store, such as s3://bucket/run: its scheme, and the rest."""


def parse_size(text: str | int, setting: str) -> int:
    """Parse a size such as `200MB`, `5GB`, `2GiB` or a plain number.

    Args:
        text: The size as the user wrote it.
        setting: Name of the setting, for the error message.

    Returns:
        The size in bytes.

    Raises:
        ConfigError: `text` is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(text).upper())
    if match is None or match[2] not in _UNITS or not (num_bytes := int(float(match[1]) * _UNITS[match[2]])):
        raise ConfigError(
            f"{setting}={text} is not a size; write a positive number with a unit, such as 200MB or 2GiB."
        )
    return num_bytes


def format_size(num_bytes: float) -> str:
    """Format `num_bytes` in binary units with three significant digits: 513 MiB, 2.65 GiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    unit = units.pop(0)
    while abs(num_bytes) >= 999.5 and units:
        num_bytes, unit = num_bytes / 1024, units.pop(0)
    digits = 0 if unit == "B" or abs(num_bytes) >= 99.95 else 1 if abs(num_bytes) >= 9.995 else 2
    return f"{num_bytes:.{digits}f} {unit}"


def format_count(count: float, noun: str) -> str:
    """Format a count with its noun, floats with three significant digits: `1 tensor`, `2,048 tensors`, `0.5 epochs`."""
    number = f"{count:.3g}" if isinstance(count, float) else f"{count:,}"
    return f"{number} {noun}{'' if number == '1' else 's'}"


def format_number(number: int) -> str:
    """Format a number with three significant digits: 2.85 B, 135 M, 36.6 K, 576."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= 0.9995 * size:  # never 1e+03 of the unit below
            return f"{number / size:.3g} {unit}"
    return str(number)


def first_few(names: Sequence[str], most: int = 4) -> str:
    """List the first `most` names and the number of others: `a, b and 7 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def format_table(rows: Sequence[Sequence[str]], right: Collection[int] | None = None) -> list[str]:
    """Format `rows` as aligned columns; a row may lack the last cells.

    Args:
        rows: The rows.
        right: The right-aligned columns. If None, these are the columns with numbers, and the first row is the header.
    """
    columns = list(zip_longest(*([one_line(cell) for cell in row] for row in rows), fillvalue=""))
    if right is None:
        right = {at for at, column in enumerate(columns) if any(cell[:1].isdigit() for cell in column[1:])}
    for at, column in enumerate(columns):
        width = max(map(len, column))
        columns[at] = tuple(cell.rjust(width) if at in right else cell.ljust(width) for cell in column)
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def printable(text: str) -> str:
    """Apply `one_line` to each line."""
    return "\n".join(map(one_line, text.split("\n")))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, truncated if long, with the next line if it ends with a colon.

    If the message is empty, return the name of the error's class.
    """
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    line = f"{first.rstrip()} {others[0].strip()}" if first.rstrip().endswith(":") and others else first
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."


def json_digest(value: Any) -> str:
    """Return the xxh3_128 of a value as JSON, regardless of key order. Files record it, so it must not change."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the shell patterns, case-sensitively."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Count the equal items at the beginning of two texts or lists."""
    return sum(takewhile(bool, map(operator.eq, one, other)))


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ` (did you mean X?)` for the name in `known` closest to `name`, or an empty string if none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is the address of a remote store, not a local path."""
    return ADDRESS.fullmatch(str(path)) is not None


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as text; ConfigError if it is of another type, or empty, which would be the working directory."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{path!r} is not a path; give a string or a pathlib.Path, such as 'outputs/run' or '.'.")
    return os.fspath(path)


def refuse_remote(path: str | os.PathLike[str], name: str, instead: str) -> None:
    """Raise ConfigError if `path`, the value of setting `name`, is remote but must be local; `instead` advises."""
    if is_remote(path):
        raise ConfigError(f"{name}={path} is a remote address, but {name} must be a local path; {instead}")
