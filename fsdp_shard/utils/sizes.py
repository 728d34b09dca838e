"""Sizes in bytes, as users write and read them. Knows nothing of tensors or files."""

from __future__ import annotations

import re

from fsdp_shard.errors import ConfigError

# Decimal and binary suffixes, as in the IEC 80000-13 standard; "5G" is read as "5GB", as transformers does.
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str | int, setting: str) -> int:
    """Bytes in `text`, such as `200MB`, `5GB`, `2GiB` or a plain number; `setting` is named when it cannot be read."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(text).upper())
    if match is None or match[2] not in _UNITS or not (num_bytes := int(float(match[1]) * _UNITS[match[2]])):
        raise ConfigError(
            f"{setting}={text} is not a size; write a positive number with a unit, such as 200MB or 2GiB."
        )
    return num_bytes


def format_size(num_bytes: float) -> str:
    """`num_bytes` in decimal units with three significant digits: 538 MB, 2.85 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    unit = units.pop(0)
    while abs(num_bytes) >= 999.5 and units:
        num_bytes, unit = num_bytes / 1000, units.pop(0)
    digits = 0 if unit == "B" or abs(num_bytes) >= 99.95 else 1 if abs(num_bytes) >= 9.995 else 2
    return f"{num_bytes:.{digits}f} {unit}"
