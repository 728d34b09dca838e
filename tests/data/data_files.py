"""Files of data."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, content: str | bytes) -> str:
    """Write a file, with the directories above it; its path as a setting has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)
