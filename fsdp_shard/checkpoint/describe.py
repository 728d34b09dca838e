"""What is in a checkpoint, as text or as JSON: for `inspect`. Reads headers only, imports no torch."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import dtypes
from fsdp_shard.checkpoint.files import member
from fsdp_shard.checkpoint.index import TensorIndex, open_checkpoint
from fsdp_shard.checkpoint.manifest import read_manifest
from fsdp_shard.sizes import format_size


@dataclass(frozen=True)
class FileSummary:
    """One weight file: its size on the disk, and how many tensors it holds at least a part of."""

    name: str
    num_bytes: int
    num_tensors: int


@dataclass(frozen=True)
class TensorSummary:
    """A tensor: safetensors dtype name, full shape, logical bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Description:
    """`balance` is the largest file over the mean (1.0 is even); `bytes_by_dtype` has torch's names as keys.

    `integrity` says what can be checked: `digests` (a manifest has them) or `structure`.
    """

    path: str
    format: str
    layout: str
    step: int | None
    world_size: int | None
    num_tensors: int
    num_parameters: int
    num_bytes: int
    bytes_by_dtype: dict[str, int]
    files: tuple[FileSummary, ...]
    balance: float
    tied: dict[str, str]
    integrity: str
    tensors: tuple[TensorSummary, ...]

    def to_json(self) -> str:
        """For programs: one JSON object with the fields above."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def to_text(self) -> str:
        """For a terminal: a head, the files, then the tensors as a tree folded by layer."""
        return "\n".join([*_head(self), *_file_lines(self), "", *fold(self.tensors)])


def describe(checkpoint: TensorIndex | str | Path, pattern: str = "*") -> Description:
    """Describe an open checkpoint, or the one at a path.

    `pattern` (as of a shell) chooses the tensors that are listed; all are counted. Raises what `open_checkpoint` does.
    """
    if isinstance(checkpoint, TensorIndex):
        return _describe(checkpoint, pattern)
    with open_checkpoint(checkpoint) as index:
        return _describe(index, pattern)


def _describe(index: TensorIndex, pattern: str) -> Description:
    entries = list(index.tensors.values())
    by_dtype: Counter[str] = Counter()
    for entry in entries:
        by_dtype[dtypes.torch_name(entry.dtype)] += entry.num_bytes
    files = _files(index)
    mean = sum(file.num_bytes for file in files) / len(files) if files else 0
    manifest = read_manifest(index.root) if index.root.is_dir() else None
    return Description(
        path=str(index.root),
        format=index.format,
        layout="sharded"
        if any(len(entry.pieces) > 1 for entry in entries)
        else manifest.layout
        if manifest
        else "gathered",
        step=index.step,
        world_size=index.world_size,
        num_tensors=len(entries),
        num_parameters=sum(entry.num_elements for entry in entries),
        num_bytes=index.num_bytes,
        bytes_by_dtype=dict(by_dtype.most_common()),
        files=tuple(files),
        balance=max(file.num_bytes for file in files) / mean if mean else 1.0,
        tied=dict(index.aliases),
        integrity="digests" if manifest is not None else "structure",
        tensors=tuple(
            TensorSummary(entry.name, entry.dtype, entry.shape, entry.num_bytes)
            for entry in entries
            if fnmatch.fnmatchcase(entry.name, pattern)
        ),
    )


def _files(index: TensorIndex) -> list[FileSummary]:
    counts: Counter[str] = Counter()
    for entry in index.tensors.values():
        counts.update({piece.file for piece in entry.pieces})
    return [FileSummary(name, member(index.root, name).stat().st_size, counts[name]) for name in sorted(counts)]


def _head(d: Description) -> list[str]:
    dtype_sizes = ", ".join(f"{name} {format_size(size)}" for name, size in d.bytes_by_dtype.items())
    head = {
        "path": d.path,
        "format": d.format,
        "layout": d.layout,
        "step": d.step,
        "world size": d.world_size,
        "tensors": f"{d.num_tensors:,}",
        "parameters": f"{d.num_parameters:,}",
        "bytes": f"{format_size(d.num_bytes)} ({dtype_sizes})",
        "tied": ", ".join(f"{alias} = {kept}" for alias, kept in d.tied.items()) or None,
        "integrity": "every byte has a digest" if d.integrity == "digests" else "no manifest: structure only",
        "files": f"{len(d.files)}, the largest {d.balance:.2f}x the mean",
    }
    return [f"{key + ':':<12} {value}" for key, value in head.items() if value is not None]


def _file_lines(d: Description) -> list[str]:
    width = max((len(file.name) for file in d.files), default=0)
    return [f"  {f.name:<{width}}  {format_size(f.num_bytes):>8}  {_tensors(f.num_tensors)}" for f in d.files]


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'' if count == 1 else 's'}"


def fold(tensors: Sequence[TensorSummary]) -> list[str]:
    """The tensors as an indented tree, where neighbouring layers (numbered parts) that look alike share one line."""
    root: dict[str, Any] = {}
    for entry in tensors:
        node, parts = root, entry.name.split(".")
        for part in parts[:-1]:
            below = node.setdefault(part, {})
            # A name may be both a tensor and a prefix of others; then the longer name stays whole.
            node = below if isinstance(below, dict) else node.setdefault(part + ".", {})
        node[parts[-1] if parts[-1] not in node else entry.name] = entry
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
