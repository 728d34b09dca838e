"""Summarizes the contents of a checkpoint as text or JSON, for `inspect`. Reads headers only; imports no torch."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.formats import native_sharded, peft
from fsdp_shard.checkpoint.formats.several_files import sum_extras
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity.verify_report import size_problem
from fsdp_shard.checkpoint.io import TensorSpec, member, torch_name
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.checkpoint.steps.manifest import Manifest
from fsdp_shard.checkpoint.steps.step_store import AVERAGE, OPTIMIZER
from fsdp_shard.checkpoint.tensor_entry import Extra
from fsdp_shard.errors import CheckpointError, one_line
from fsdp_shard.utils import first_few, format_count, format_size, format_table

_SHOWN, _FILES_SHOWN = 3, 16


@dataclass(frozen=True)
class FileSummary:
    """A weight file: its size on disk, and the number of tensors of which it holds a part."""

    name: str
    num_bytes: int
    num_tensors: int


@dataclass(frozen=True)
class CheckpointSummary:
    """The contents of a checkpoint.

    Attributes:
        path: The file or directory.
        format: The name of its format.
        layout: `gathered` or `sharded`.
        step: The training step, if it is stored.
        world_size: The number of ranks that wrote it, if it is stored.
        num_tensors: The number of tensors.
        num_parameters: The number of their elements.
        num_bytes: Their logical bytes.
        bytes_by_dtype: Their bytes by torch's dtype name.
        files: The weight files.
        balance: The size of the largest file divided by the mean (1.0 is even).
        base: An adapter's base model, as in adapter_config.json.
        tied: Each tied name with the name under which the tensor is stored.
        extras: Other tensors by kind (`optimizer`, `adapter`, `other`, and a step's `ema`), including those in folders.
        integrity: What `verify` can check: `digests` (there is a manifest) or `structure`.
        manifest_problems: Files in the manifest that are missing or have another size.
        tensors: The selected tensors.
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
    base: str | None
    tied: dict[str, str]
    extras: dict[str, Extra]
    integrity: str
    manifest_problems: tuple[str, ...]
    tensors: tuple[TensorSummary, ...]

    def to_json(self) -> str:
        """Return a JSON object with the attributes above, for programs."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """Return a header, the files, then the tensors as a tree folded by layer, for a terminal."""
        return "\n".join([*_head(self), *_file_lines(self), "", *fold(self.tensors)])

    def to_list(self) -> str:
        """Return the tensors, one per line, with dtype, shape, bytes and files, for a terminal."""
        rows = [
            (one_line(t.name), t.dtype, shape_text(t.shape), format_size(t.num_bytes), first_few(t.files, 3))
            for t in self.tensors
        ]
        return "\n".join(format_table(rows, right=(3,)))


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as `4 x 8`, or `scalar`."""
    return " x ".join(map(str, shape)) or "scalar"


def summarize_checkpoint(checkpoint: TensorIndex | str | Path, pattern: str = "*") -> CheckpointSummary:
    """Summarize the contents of a checkpoint from its headers.

    Args:
        checkpoint: An open checkpoint, or the path of one.
        pattern: A shell pattern or a part of a name that selects the listed tensors; all are counted.

    Raises:
        CheckpointError: The checkpoint cannot be opened, or no tensor matches the pattern.
    """
    if not isinstance(checkpoint, TensorIndex):
        with open_checkpoint(checkpoint) as index:
            return summarize_checkpoint(index, pattern)
    entries = list(checkpoint.tensors.values())
    by_dtype: Counter[str] = Counter()
    for entry in entries:
        by_dtype[torch_name(entry.dtype)] += entry.num_bytes
    files = _files(checkpoint)
    mean = sum(file.num_bytes for file in files) / len(files) if files else 0
    manifest = checkpoint.manifest()
    layout = manifest.layout if manifest else "gathered"
    return CheckpointSummary(
        path=str(checkpoint.path),
        format=checkpoint.format,
        layout="sharded" if any(len(entry.pieces) > 1 for entry in entries) else layout,
        step=checkpoint.step,
        world_size=checkpoint.world_size,
        num_tensors=len(entries),
        num_parameters=sum(entry.num_elements for entry in entries),
        num_bytes=checkpoint.num_bytes,
        bytes_by_dtype=dict(by_dtype.most_common()),
        files=tuple(files),
        balance=max(file.num_bytes for file in files) / mean if mean else 1.0,
        base=_base(checkpoint),
        tied=dict(checkpoint.aliases),
        extras=_extras(checkpoint),
        integrity="digests" if manifest is not None else "structure",
        manifest_problems=_manifest_problems(checkpoint.root, manifest) if manifest else (),
        tensors=tuple(_chosen(checkpoint, pattern)),
    )


def _base(index: TensorIndex) -> str | None:
    if index.format != peft.NAME:
        return None
    base = peft.read_adapter_config(index.root).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def _chosen(index: TensorIndex, pattern: str) -> Iterator[TensorSummary]:
    """Yield the tensors whose name, or a tied name, matches `pattern`."""
    glob = pattern if any(character in pattern for character in "*?[") else f"*{pattern}*"
    names = [name for name in [*index.tensors, *index.aliases] if fnmatch.fnmatchcase(name, glob)]
    if not names and index.tensors:
        raise CheckpointError(f"{index.path} has no tensor that {pattern} fits{_near(pattern, index)}.")
    for name in dict.fromkeys(index.aliases.get(name, name) for name in names):
        entry = index.tensors[name]
        held = tuple(dict.fromkeys(piece.file for piece in entry.pieces))
        yield TensorSummary(entry.name, entry.dtype, entry.shape, entry.num_bytes, held)


def _near(pattern: str, index: TensorIndex) -> str:
    """Suggest full names or parts of names for a pattern without matches."""
    parts = dict.fromkeys(part for name in [*index.tensors, *index.aliases] for part in name.split("."))
    wanted = pattern.strip("*.").split(".")[-1]
    found = difflib.get_close_matches(pattern, [*index.tensors, *index.aliases], n=2) + difflib.get_close_matches(
        wanted, [part for part in parts if not part.isdecimal()], n=2
    )
    return f" (did you mean {' or '.join(dict.fromkeys(found))}?)" if found else f"; it has {first_few(index.names, 3)}"


def _extras(index: TensorIndex) -> dict[str, Extra]:
    """Return the extras of the index, and those of rank files in folders of one of our steps."""
    found = dict(index.extras)
    for folder in (OPTIMIZER, AVERAGE):
        if native_sharded.recognize(index.root / folder):
            with native_sharded.read(index.root / folder) as states:
                found = sum_extras(found, {folder: Extra(len(states.tensors), states.num_bytes)})
    return found


def _manifest_problems(root: Path, manifest: Manifest) -> tuple[str, ...]:
    problems = (size_problem(root, name, record) for name, record in manifest.files.items())
    return tuple(problem.message for problem in problems if problem is not None)


def _files(index: TensorIndex) -> list[FileSummary]:
    counts: Counter[str] = Counter()
    for entry in index.tensors.values():
        counts.update({piece.file for piece in entry.pieces})
    return [FileSummary(name, member(index.root, name).stat().st_size, counts[name]) for name in sorted(counts)]


def _head(d: CheckpointSummary) -> list[str]:
    dtype_sizes = ", ".join(f"{name} {format_size(size)}" for name, size in d.bytes_by_dtype.items())
    head = {
        "path": d.path,
        "format": d.format,
        "layout": d.layout,
        "step": d.step,
        "world size": None if d.layout == "gathered" else d.world_size,  # 1 for every writer
        "tensors": f"{d.num_tensors:,}",
        "parameters": f"{d.num_parameters:,}",
        "bytes": f"{format_size(d.num_bytes)} ({dtype_sizes})",
        "base": None if d.base is None else one_line(d.base),
        "tied": ", ".join(f"{alias} = {kept}" for alias, kept in d.tied.items()) or None,
        **{
            kind: f"{format_count(extra.num_tensors, 'tensor')}, {format_size(extra.num_bytes)}"
            for kind, extra in d.extras.items()
        },
        "integrity": _integrity(d),
        "files": f"{len(d.files)}, the largest {d.balance:.2f}x the mean",
    }
    return [f"{key + ':':<12} {value}" for key, value in head.items() if value is not None]


def _integrity(d: CheckpointSummary) -> str:
    if d.integrity != "digests":
        return "no manifest with digests: `fsdp-shard verify` can check structure and NaN only"
    if d.manifest_problems:
        return "DAMAGED: " + " ".join(d.manifest_problems[:_SHOWN])
    return "all files are there, of the size that was written; `fsdp-shard verify` compares every byte"


def _file_lines(d: CheckpointSummary) -> list[str]:
    width = max((len(file.name) for file in d.files), default=0)
    lines = [
        f"  {f.name:<{width}}  {format_size(f.num_bytes):>8}  {format_count(f.num_tensors, 'tensor')}" for f in d.files
    ]
    more = [f"  ... and {len(lines) - _FILES_SHOWN:,} more (--json lists all)"] if len(lines) > _FILES_SHOWN else []
    return lines[:_FILES_SHOWN] + more


@dataclass(frozen=True)
class TensorSummary:
    """A tensor: name, safetensors dtype, full shape, logical bytes, and the files that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    files: tuple[str, ...]


def fold(tensors: Sequence[TensorSummary | TensorSpec]) -> list[str]:
    """Format the tensors as an indented tree; equal neighboring layers (numbered parts) share a line."""
    root: dict[str, Any] = {}
    for entry in tensors:
        name = one_line(entry.name)
        node, parts = root, name.split(".")
        for part in parts[:-1]:
            below = node.setdefault(part, {})
            # If a name is both a tensor and a prefix of others, the longer names are not split further.
            node = below if isinstance(below, dict) else node.setdefault(part + ".", {})
        node[parts[-1] if parts[-1] not in node else name] = entry
    return list(_render(root, 0, 1))


def _render(node: Mapping[str, Any], depth: int, copies: int) -> Iterator[str]:
    indent = "  " * depth
    for label, count, below in _groups(node):
        while count == 1 and isinstance(below, dict) and len(below) == 1:  # a chain takes one line
            ((name, below),) = below.items()
            label = f"{label}.{name}"
        times = copies * count
        if isinstance(below, dict):
            yield f"{indent}{label}{f' ({count} alike)' if count > 1 else ''}"
            yield from _render(below, depth + 1, times)
        else:
            total = format_size(below.num_bytes * times) + (f" in {times}" if times > 1 else "")
            yield f"{indent}{label}  {below.dtype}  {shape_text(below.shape)}  {total}"


def _groups(node: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Return (label, number of members, one member) for each run of equal numbered children, and each other child."""
    # Files may hold layer 10 before layer 2.
    names = sorted(node, key=int) if all(name.isdecimal() for name in node) else list(node)
    for _, run in itertools.groupby(names, lambda name: _look(node[name]) if name.isdecimal() else name):
        first, *others = run
        yield f"{first}..{others[-1]}" if others else first, 1 + len(others), node[first]


def _look(node: Any) -> Any:
    """Return a value that is equal for equal subtrees."""
    return {name: _look(below) for name, below in node.items()} if isinstance(node, dict) else (node.dtype, node.shape)
