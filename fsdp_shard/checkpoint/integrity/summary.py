"""What is in a checkpoint, as text or as JSON: for `inspect`. Reads headers only, imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.formats import native_sharded
from fsdp_shard.checkpoint.index import Extra, TensorIndex
from fsdp_shard.checkpoint.io import dtypes
from fsdp_shard.checkpoint.io.files import member
from fsdp_shard.checkpoint.open import open_checkpoint
from fsdp_shard.checkpoint.steps.manifest import Manifest
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import format_size

OPTIMIZER = "optimizer"  # the kind of extras, and the directory in a step of ours
_SHOWN, _FILES_SHOWN = 3, 16


@dataclass(frozen=True)
class FileSummary:
    """One weight file: its size on the disk, and how many tensors it holds at least a part of."""

    name: str
    num_bytes: int
    num_tensors: int


@dataclass(frozen=True)
class Description:
    """`balance` is the largest file over the mean (1.0 is even); `bytes_by_dtype` has torch's names as keys.

    `integrity` says what can be checked: `digests` (a manifest has them) or `structure`. `manifest_problems` are files
    of the manifest that are not there or have another size; nothing was read for it. `extras` counts what lies beside
    the weights, by kind (`optimizer`, `adapter`, `other`), the run's own optimizer/ among it.
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
    extras: dict[str, Extra]
    integrity: str
    manifest_problems: tuple[str, ...]
    tensors: tuple[TensorSummary, ...]

    def to_json(self) -> str:
        """For programs: one JSON object with the fields above."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def to_text(self) -> str:
        """For a terminal: a head, the files, then the tensors as a tree folded by layer."""
        return "\n".join([*_head(self), *_file_lines(self), "", *fold(self.tensors)])

    def to_list(self) -> str:
        """For a terminal: the tensors, one a line, with dtype, shape, bytes and files."""
        rows = [
            (
                printable(t.name),
                t.dtype,
                " x ".join(map(str, t.shape)) or "scalar",
                format_size(t.num_bytes),
                _some(t.files),
            )
            for t in self.tensors
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}  {files}"
            for name, dtype, shape, size, files in rows
        )


def _shape(tensor: TensorSummary) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"


def describe(checkpoint: TensorIndex | str | Path, pattern: str = "*") -> Description:
    """Describe an open checkpoint, or the one at a path.

    `pattern` (as of a shell, or any part of a name) chooses the tensors that are listed; all are counted. Raises what
    `open_checkpoint` does, and CheckpointError for a pattern that no tensor fits.
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
    manifest = index.manifest()
    layout = manifest.layout if manifest else "gathered"
    return Description(
        path=str(index.place),
        format=index.format,
        layout="sharded" if any(len(entry.pieces) > 1 for entry in entries) else layout,
        step=index.step,
        world_size=index.world_size,
        num_tensors=len(entries),
        num_parameters=sum(entry.num_elements for entry in entries),
        num_bytes=index.num_bytes,
        bytes_by_dtype=dict(by_dtype.most_common()),
        files=tuple(files),
        balance=max(file.num_bytes for file in files) / mean if mean else 1.0,
        tied=dict(index.aliases),
        extras=_extras(index),
        integrity="digests" if manifest is not None else "structure",
        manifest_problems=tuple(_manifest_problems(index.root, manifest)) if manifest else (),
        tensors=tuple(_chosen(index, pattern)),
    )


def _chosen(index: TensorIndex, pattern: str) -> Iterator[TensorSummary]:
    """The tensors whose name, or a name that is tied to it, fits `pattern`."""
    glob = pattern if any(character in pattern for character in "*?[") else f"*{pattern}*"
    names = [name for name in [*index.tensors, *index.aliases] if fnmatch.fnmatchcase(name, glob)]
    if not names and index.tensors:
        raise CheckpointError(f"{index.place} has no tensor that {pattern} fits{_near(pattern, index)}.")
    for name in dict.fromkeys(index.aliases.get(name, name) for name in names):
        entry = index.tensors[name]
        held = tuple(dict.fromkeys(piece.file for piece in entry.pieces))
        yield TensorSummary(entry.name, entry.dtype, entry.shape, entry.num_bytes, held)


def _near(pattern: str, index: TensorIndex) -> str:
    """Names that the pattern may have meant: whole ones, or parts of them."""
    parts = dict.fromkeys(part for name in [*index.tensors, *index.aliases] for part in name.split("."))
    wanted = pattern.strip("*.").split(".")[-1]
    found = difflib.get_close_matches(pattern, [*index.tensors, *index.aliases], n=2) + difflib.get_close_matches(
        wanted, [part for part in parts if not part.isdecimal()], n=2
    )
    return f" (did you mean {' or '.join(dict.fromkeys(found))}?)" if found else f"; it has {_some(tuple(index.names))}"


def _extras(index: TensorIndex) -> dict[str, Extra]:
    """What the index counts, and the optimizer state that a run of ours keeps in a directory of its own."""
    place = index.root / OPTIMIZER
    if not native_sharded.recognize(place):
        return dict(index.extras)
    with native_sharded.read(place) as states:
        before = index.extras.get(OPTIMIZER, Extra(0, 0))
        both = Extra(before.num_tensors + len(states.tensors), before.num_bytes + states.num_bytes)
        return {**index.extras, OPTIMIZER: both}


def _manifest_problems(root: Path, manifest: Manifest) -> Iterator[str]:
    for name, record in manifest.files.items():
        try:
            size = member(root, name).stat().st_size
        except CheckpointError as error:
            yield str(error)
        else:
            if size != record.size:
                yield f"{root / name} has {size:,} bytes, but {record.size:,} were written."


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
        **{kind: f"{_tensors(extra.num_tensors)}, {format_size(extra.num_bytes)}" for kind, extra in d.extras.items()},
        "integrity": _integrity(d),
        "files": f"{len(d.files)}, the largest {d.balance:.2f}x the mean",
    }
    return [f"{key + ':':<12} {value}" for key, value in head.items() if value is not None]


def _integrity(d: Description) -> str:
    if d.integrity != "digests":
        return "no manifest with digests: `fsdp-shard verify` can check structure and NaN only"
    if d.manifest_problems:
        return "DAMAGED: " + " ".join(d.manifest_problems[:_SHOWN])
    return "all files are there, of the size that was written; `fsdp-shard verify` compares every byte"


def _file_lines(d: Description) -> list[str]:
    width = max((len(file.name) for file in d.files), default=0)
    lines = [f"  {f.name:<{width}}  {format_size(f.num_bytes):>8}  {_tensors(f.num_tensors)}" for f in d.files]
    more = [f"  ... and {len(lines) - _FILES_SHOWN:,} more (--json lists all)"] if len(lines) > _FILES_SHOWN else []
    return lines[:_FILES_SHOWN] + more


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'' if count == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


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
    """The tensors as an indented tree, where neighboring layers (numbered parts) that look alike share one line."""
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
        if run and not (name.isdecimal() and run[-1].isdecimal() and _look(below) == _look(node[run[-1]])):
            yield _label(run), len(run), node[run[0]]
            run = []
        run.append(name)
    if run:
        yield _label(run), len(run), node[run[0]]


def _label(run: Sequence[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}"


def _look(node: Any) -> Any:
    """What two subtrees have in common when they look alike."""
    if isinstance(node, TensorSummary):
        return (node.dtype, node.shape)
    return {name: _look(below) for name, below in node.items()}
