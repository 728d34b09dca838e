"""Reads a checkpoint once with several threads: computes chunk digests and finds NaN and infinite values.

Also reports the results as problems with file, tensor and bytes. Imports no torch.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_shard.checkpoint.digests import CHUNK_BYTES, chunk_digest, chunk_jobs, num_chunks, read_chunks
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity.non_finite import NonFinite, find_non_finite
from fsdp_shard.checkpoint.integrity.verify_report import ByteRange, Problem
from fsdp_shard.checkpoint.io import Checksum, in_threads, itemsize
from fsdp_shard.checkpoint.piece_table import PieceTable
from fsdp_shard.checkpoint.steps.manifest import Manifest
from fsdp_shard.checkpoint.tensor_entry import TensorEntry
from fsdp_shard.checkpoint.tensor_slices import flat_boxes

_NAMED = 3  # files in a message; `Problem.places` lists all


@dataclass
class Scan:
    """Digests of all chunks of the tensors `digested`, and the non-finite values of those `searched`, by name."""

    digests: dict[str, list[bytes]] = field(default_factory=dict)
    non_finite: dict[str, NonFinite] = field(default_factory=dict)


def scan(index: TensorIndex, digested: Collection[str], searched: Collection[str]) -> Scan:
    """Read tensors of `index`.

    Args:
        index: The checkpoint.
        digested: Names of the tensors to compute digests of.
        searched: Names of the tensors to search for NaN and infinities; their dtypes must support these.
    """
    found = Scan({name: [b""] * num_chunks(index.tensors[name].num_bytes) for name in digested})
    parts: dict[str, dict[int, NonFinite]] = {}

    def work(jobs: Iterator[tuple[TensorEntry, range]]) -> None:
        for entry, numbers in jobs:
            for number, data in zip(numbers, read_chunks(index, entry.name, numbers), strict=True):
                if entry.name in found.digests:
                    found.digests[entry.name][number] = chunk_digest(data)
                if entry.name in searched and (part := find_non_finite(entry.dtype, data)):
                    parts.setdefault(entry.name, {})[number] = part

    in_threads(work, list(chunk_jobs(index, {*digested, *searched})), "verify")
    found.non_finite = {name: _sum(index.tensors[name], parts[name]) for name in parts}
    return found


def _sum(entry: TensorEntry, parts: dict[int, NonFinite]) -> NonFinite:
    first = min(parts)
    return NonFinite(
        sum(part.num_nan for part in parts.values()),
        sum(part.num_inf for part in parts.values()),
        first * (CHUNK_BYTES // itemsize(entry.dtype)) + parts[first].first,
    )


def damage(index: TensorIndex, manifest: Manifest, found: Scan) -> list[Problem]:
    """Return the chunks whose digests differ from `manifest`. Neighboring damaged chunks form one problem."""
    problems: list[Problem] = []
    for name, digests in found.digests.items():
        expected = manifest.tensors[name].chunks
        wrong = [number for number, digest in enumerate(digests) if digest.hex() != expected[number]]
        problems += _damaged(index, name, wrong)
    return sorted(problems, key=lambda problem: (problem.file or "", problem.start or 0))


def checksum_problems(index: TensorIndex) -> list[Problem]:
    """Return the storages, also of replicas, with a wrong CRC; reads the bytes that were not read yet."""
    checksums = index.reader.checksums
    owners: dict[tuple[str, Checksum], str] = {}
    for entry in index.tensors.values():
        if isinstance(entry.pieces, PieceTable):  # rank files, which have no CRCs
            continue
        for piece in entry.pieces:
            index.reader.finish_checksum(piece)
            if piece.checksum is not None:
                owners.setdefault((piece.file, piece.checksum), entry.name)
    for piece in index.replicas:
        index.reader.finish_checksum(piece)
    return [
        Problem(
            checksums.describe(file, found),
            (ByteRange(file, found.start, found.start + found.num_bytes),),
            owners.get((file, found)),
        )
        for file, found in sorted(checksums.damaged)
    ]


def _damaged(index: TensorIndex, name: str, chunks: Sequence[int]) -> Iterator[Problem]:
    # A run of chunks is in the same files, and contains no sound chunk.
    files = {number: [item.file for item in chunk_ranges(index, name, number, number + 1)] for number in chunks}
    runs = itertools.groupby(enumerate(chunks), lambda item: (item[1] - item[0], files[item[1]]))
    for _, run in runs:
        numbers = [number for _, number in run]
        ranges = chunk_ranges(index, name, numbers[0], numbers[-1] + 1)
        where = [item.text(index.root) for item in ranges]
        if len(ranges) == 1:
            text = f"{where[0]}: tensor {name} is not what was written."
        else:
            more = f" or {len(where) - _NAMED} more files" if len(where) > _NAMED else ""
            text = (
                f"{' or '.join(where[:_NAMED])}{more}: tensor {name} is not what was written; "
                f"one digest covers them together, so any of them may be damaged."
            )
        yield Problem(text, tuple(ranges), name)


def chunk_ranges(index: TensorIndex, name: str, first: int, stop: int) -> list[ByteRange]:
    """Return the bytes of a tensor's chunks [first, stop): in each file from the first such byte to the last."""
    entry = index.entry(name)
    size = itemsize(entry.dtype)
    found: dict[str, tuple[int, int]] = {}
    for file, low, high in index.spans(
        name, first * CHUNK_BYTES // size, min(stop * CHUNK_BYTES, entry.num_bytes) // size
    ):
        before = found.get(file, (low, high))
        found[file] = min(low, before[0]), max(high, before[1])
    return [ByteRange(file, low, high) for file, (low, high) in found.items()]


def non_finite(index: TensorIndex, found: Scan) -> Iterator[Problem]:
    """Yield a problem for each tensor with NaN or infinite values, in the order of the checkpoint."""
    for name in index.names:
        if (what := found.non_finite.get(name)) is None:
            continue
        entry = index.tensors[name]
        (span,) = index.spans(name, what.first, what.first + 1)
        first = ByteRange(*span)
        counts = [f"{count:,} {word}" for count, word in ((what.num_nan, "NaN"), (what.num_inf, "infinite")) if count]
        yield Problem(
            f"{first.text(index.root)}: tensor {name} is not finite from {position(entry, what.first)} on: "
            f"{' and '.join(counts)} of {entry.num_elements:,} elements.",
            (first,),
            name,
        )


def position(entry: TensorEntry, flat: int) -> list[int]:
    """Return the index of a flat element along each dimension."""
    ((offsets, _),) = flat_boxes(entry.shape, flat, 1)
    return list(offsets)
