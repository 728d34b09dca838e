"""Names of tensors as an indented tree in which layers that look alike share a line. Pure: reads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_shard.sizes import format_size


@dataclass(frozen=True)
class TensorSummary:
    """A tensor: safetensors dtype name, full shape, logical bytes, and the files that hold it (where they matter)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    files: tuple[str, ...] = ()


def printable(name: str) -> str:
    """A name as a terminal may show it: what is no printable character, such as an escape sequence, is spelled out."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def fold(tensors: Sequence[TensorSummary]) -> list[str]:
    """The tensors as an indented tree, where neighbouring layers (numbered parts) that look alike share one line."""
    root: dict[str, Any] = {}
    for entry in tensors:
        name = printable(entry.name)
        node, parts = root, name.split(".")
        for part in parts[:-1]:
            below = node.setdefault(part, {})
            # A name may be both a tensor and a prefix of others; then the longer name stays whole.
            node = below if isinstance(below, dict) else node.setdefault(part + ".", {})
        node[parts[-1] if parts[-1] not in node else name] = entry
    return list(_render(root, 0, 1))


def _render(node: Mapping[str, Any], depth: int, copies: int) -> Iterator[str]:
    indent = "  " * depth
    for label, count, below in _groups(node):
        while count == 1 and not isinstance(below, TensorSummary) and len(below) == 1:  # a chain takes one line
            ((name, below),) = below.items()
            label = f"{label}.{name}"
        if isinstance(below, TensorSummary):
            shape = " x ".join(map(str, below.shape)) or "scalar"
            times = copies * count
            total = format_size(below.num_bytes * times)
            yield f"{indent}{label}  {below.dtype}  {shape}  {total}{f' in {times}' if times > 1 else ''}"
        else:
            yield f"{indent}{label}{f' ({count} alike)' if count > 1 else ''}"
            yield from _render(below, depth + 1, copies * count)


def _groups(node: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """(label, number of members, one member) of each run of like-looking numbered children, and each other child."""
    run: list[str] = []
    if all(name.isdecimal() for name in node):  # files may hold layer 10 before layer 2
        node = {name: node[name] for name in sorted(node, key=int)}
    for name, below in node.items():
        if run and not (name.isdecimal() and run[-1].isdecimal() and _shape(below) == _shape(node[run[-1]])):
            yield _label(run), len(run), node[run[0]]
            run = []
        run.append(name)
    if run:
        yield _label(run), len(run), node[run[0]]


def _label(run: Sequence[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}"


def _shape(node: Any) -> Any:
    """What two subtrees have in common when they look alike."""
    if isinstance(node, TensorSummary):
        return (node.dtype, node.shape)
    return {name: _shape(below) for name, below in node.items()}
