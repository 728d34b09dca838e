"""Finds tensors, or parts of them, that several rank files hold, and that are not the same in each of these files.

Which of the values is right is not known, so that they differ is an error. Where files have CRCs of them, as those of
torch.save do, equal ones say that they are the same, and nothing is read; only those without are compared byte by byte.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from fsdp_shard.checkpoint.io import itemsize, page_aligned
from fsdp_shard.checkpoint.piece_reader import PieceReader
from fsdp_shard.checkpoint.tensor_entry import Piece, TensorEntry
from fsdp_shard.errors import CheckpointError

_STEP_BYTES = 4 << 20


class Replicas:
    """The pieces that were found of each part of each tensor of a checkpoint in `root`.

    Attributes:
        pieces: The pieces that hold what one before them holds.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pieces: list[Piece] = []
        self._first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Piece] = {}
        self._to_read: list[tuple[str, str, Piece, Piece]] = []

    def add(self, name: str, dtype: str, piece: Piece) -> None:
        """Take note of a piece of the tensor `name`; its other pieces must be of the same `dtype`."""
        first = self._first.setdefault((name, piece.offsets, piece.shape), piece)
        if first is piece:
            return
        self.pieces.append(piece)
        if not _have_equal_checksums(first, piece):
            self._to_read.append((name, dtype, first, piece))

    def compare(self) -> None:
        """Read those whose checksums are not the same.

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
    """Whether both are the same part of storages with the same CRC."""
    a, b = one.checksum, two.checksum
    if a is None or b is None:
        return False
    return (a.crc, a.num_bytes, one.start - a.start, one.codec) == (b.crc, b.num_bytes, two.start - b.start, two.codec)


def _read(reader: PieceReader, dtype: str, piece: Piece) -> Iterator[bytes]:
    """The values of a piece, some at a time."""
    alone = TensorEntry("", dtype, piece.shape, (piece._replace(offsets=(0,) * len(piece.shape)),))
    step = _STEP_BYTES // itemsize(dtype)
    buffer = page_aligned(min(_STEP_BYTES, alone.num_bytes))
    for start in range(0, alone.num_elements, step):
        part = buffer[: min(step, alone.num_elements - start) * itemsize(dtype)]
        reader.read_into(alone, start, part)
        yield bytes(part)
