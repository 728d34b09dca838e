"""Checks that a checkpoint's files are complete and of one save, and plans one file per rank.

Replicas of a tensor in several files must be equal (`Replicas`), as nothing says which of two values is right. Where
files have CRCs, as those of torch.save do, equal CRCs suffice and nothing is read; other replicas are compared byte by
byte.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from fsdp_shard.checkpoint.io import TensorSpec, itemsize, page_aligned
from fsdp_shard.checkpoint.piece_reader import PieceReader
from fsdp_shard.checkpoint.steps.file_plan import Extent, FilePlan, chunk_rows
from fsdp_shard.checkpoint.tensor_entry import Extra, Piece, TensorEntry
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import format_count

_STEP_BYTES = 4 << 20
_ONE_OF_SEVERAL = re.compile(r"-\d{4,}-of-(\d{4,})\.\w+$")


def num_files(name: str) -> int:
    """Return the number of a model's files from the name of one: 2 for `model-00001-of-00002.safetensors`.

    Return 1 for other names.
    """
    found = _ONE_OF_SEVERAL.search(name)
    return 1 if found is None else int(found[1])


def files_by_rank(
    root: Path, found: Iterable[tuple[int, str]], world_size: int | None = None, kind: str = "file"
) -> list[str]:
    """Return the rank files' names in the order of ranks; an error unless each rank has exactly one.

    Args:
        root: The directory of the files.
        found: (rank, name) of each file.
        world_size: The number of ranks that wrote the checkpoint; None if only the files show it.
        kind: The kind of files, for messages.
    """
    names: dict[int, str] = {}
    for rank, name in sorted(found):
        if rank in names:
            raise CheckpointError(f"{root} has two files of rank {rank}: {names[rank]} and {name}.")
        names[rank] = name
    num_ranks = world_size if world_size is not None else max(names) + 1
    missing = next((rank for rank in range(num_ranks) if rank not in names), None)
    if missing is not None:
        raise CheckpointError(
            f"{root}: the {kind} of rank {missing} is missing; the checkpoint was written by "
            f"{format_count(num_ranks, 'rank')}."
        )
    if len(names) > num_ranks:
        raise CheckpointError(
            f"{root / names[max(names)]} is of a rank that a save by {format_count(num_ranks, 'rank')} does not have."
        )
    return list(names.values())


def one_world_size(root: Path, sizes: Iterable[int | None], unit: str = "ranks") -> int | None:
    """Return the number of ranks (or another `unit`) on which all file names agree."""
    first, *others = set(sizes)
    if others:
        some = " and ".join(sorted(str(size or "an unknown number of") for size in (first, *others)))
        raise CheckpointError(f"{root} mixes rank files of saves by {some} {unit}; keep the files of one save only.")
    return first


class Agreement:
    """Properties that all files of a save must share; a CheckpointError names the first file that differs."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[Path, tuple[object, ...]]] = {}

    def check(self, subject: str, where: Path, *description: object) -> None:
        """Compare `subject`'s `description` in file `where` with that in the first file that had one."""
        by, known = self._first.setdefault(subject, (where, description))
        if known != description:
            raise CheckpointError(
                f"{where}: {subject} is {_words(description)}, but {_words(known)} in {by.name}: these are files "
                "of different saves."
            )


def _words(description: Sequence[object]) -> str:
    return " ".join(str(list(item) if isinstance(item, tuple) else item)[:200] for item in description)


class Replicas:
    """The pieces found for each part of each tensor of a checkpoint in `root`.

    Attributes:
        pieces: The pieces that repeat an earlier one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pieces: list[Piece] = []
        self._first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Piece] = {}
        self._to_read: list[tuple[str, str, Piece, Piece]] = []

    def add(self, name: str, dtype: str, piece: Piece) -> None:
        """Record a piece of the tensor `name`; all of its pieces must have the same `dtype`."""
        first = self._first.setdefault((name, piece.offsets, piece.shape), piece)
        if first is piece:
            return
        self.pieces.append(piece)
        if not _have_equal_checksums(first, piece):
            self._to_read.append((name, dtype, first, piece))

    def compare(self) -> None:
        """Read and compare the pieces whose checksums differ.

        Raises:
            CheckpointError: Two differ.
        """
        reader = PieceReader(self.root)
        with closing(reader.files):
            for name, dtype, first, other in self._to_read:
                parts = zip(_read(reader, dtype, first), _read(reader, dtype, other), strict=True)
                if any(one != two for one, two in parts):
                    raise CheckpointError(
                        f"{self.root / other.file} and {first.file} hold different values of tensor {name}, of which "
                        f"both have the same part: these are files of different saves, or one is damaged."
                    )


def _have_equal_checksums(one: Piece, two: Piece) -> bool:
    """Return whether both are the same part of storages with equal CRCs."""
    a, b = one.checksum, two.checksum
    if a is None or b is None:
        return False
    return (a.crc, a.num_bytes, one.start - a.start, one.codec) == (b.crc, b.num_bytes, two.start - b.start, two.codec)


def _read(reader: PieceReader, dtype: str, piece: Piece) -> Iterator[bytes]:
    """Yield the values of a piece, some at a time."""
    alone = TensorEntry("", dtype, piece.shape, (piece._replace(offsets=(0,) * len(piece.shape)),))
    step = _STEP_BYTES // itemsize(dtype)
    buffer = page_aligned(min(_STEP_BYTES, alone.num_bytes))
    for start in range(0, alone.num_elements, step):
        part = buffer[: min(step, alone.num_elements - start) * itemsize(dtype)]
        reader.read_into(alone, start, part)
        yield bytes(part)


def add_entry(tensors: dict[str, TensorEntry], entry: TensorEntry, root: Path) -> None:
    """Add an entry to those of earlier files, none of which may have a tensor of this name."""
    other = tensors.setdefault(entry.name, entry)
    if other is not entry:
        files = f"{other.pieces[0].file} and in {entry.pieces[0].file}"
        raise CheckpointError(f"{root}: tensor {entry.name} is both in {files}.")


def sum_extras(extras: Mapping[str, Extra], more: Mapping[str, Extra]) -> dict[str, Extra]:
    """Add up the extras of two files, by kind."""
    none = Extra(0, 0)
    both = {kind: (extras.get(kind, none), more.get(kind, none)) for kind in (*extras, *more)}
    return {kind: Extra(a.num_tensors + b.num_tensors, a.num_bytes + b.num_bytes) for kind, (a, b) in both.items()}


def plan_ranks(
    specs: Sequence[TensorSpec],
    ranks: int,
    plan_file: Callable[[int, Sequence[tuple[TensorSpec, int, int]]], FilePlan],
) -> tuple[tuple[FilePlan, ...], Mapping[str, tuple[Extent, ...]]]:
    """Plan the files and extents of one file per rank; dim 0 of each tensor is chunked as by FSDP2.

    Args:
        specs: The tensors.
        ranks: The number of ranks.
        plan_file: Plans the file of a rank from its (tensor, flat start, number of elements).
    """
    parts = {spec.name: chunk_rows(spec, ranks) for spec in specs}
    extents: dict[str, list[Extent]] = {spec.name: [] for spec in specs}
    files = []
    for rank in range(ranks):
        pieces = [(spec, *parts[spec.name][rank]) for spec in specs]
        file = plan_file(rank, pieces)
        for spec, start, count in pieces:
            if count:
                size, offset = itemsize(spec.dtype), file.tensors[spec.name]
                extents[spec.name].append(Extent(start * size, (start + count) * size, file.name, offset))
        files.append(file)
    return tuple(files), {name: tuple(held) for name, held in extents.items()}
