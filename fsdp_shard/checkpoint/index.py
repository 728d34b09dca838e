"""The tensor index: every tensor of a checkpoint with its dtype, its shape and the pieces of files that hold it.

Formats build it from headers alone, and all weights are read through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.io import FileHeader, itemsize
from fsdp_shard.checkpoint.piece_reader import PieceReader
from fsdp_shard.checkpoint.piece_table import PieceTable
from fsdp_shard.checkpoint.steps.manifest import Manifest, read_manifest
from fsdp_shard.checkpoint.tensor_entry import Extra, Piece, Span, TensorEntry
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import nearest

if TYPE_CHECKING:
    import torch


@dataclass(repr=False)
class TensorIndex:
    """The weights of one checkpoint. A context manager: files stay open after reading until `close`.

    Example:
        >>> with open_checkpoint("outputs/run") as index:
        ...     rows = index.read("lm_head.weight", slice(0, 10))

    Attributes:
        root: The directory of the files.
        format: Name of the format.
        tensors: The stored tensors by name, in file order.
        aliases: Tied name -> the name under which it is stored; readers accept either.
        metadata: Other metadata of the format.
        step: The training step, if recorded.
        world_size: Number of ranks that wrote it, if recorded.
        extras: Tensors that are not weights, by kind: `optimizer`, `adapter`, `other`.
        side: The directory with config and tokenizer, if it is not `root`.
        file: The file, if a single one was named.
        parts: The indexes that this one combines; they are closed with it.
        notes: What was dropped when it was made, one line each.
        replicas: Pieces that duplicate pieces of `tensors`; they are not read.
        headers: Expected headers of files that were not read: each is compared when its file is opened.
    """

    root: Path
    format: str
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    world_size: int | None = None
    extras: dict[str, Extra] = field(default_factory=dict)
    side: Path | None = None
    file: Path | None = None
    parts: tuple[TensorIndex, ...] = ()
    notes: tuple[str, ...] = ()
    replicas: tuple[Piece, ...] = ()
    headers: Mapping[str, FileHeader] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for alias, kept in self.aliases.items():
            if alias in self.tensors or kept not in self.tensors:
                problem = f"{alias} is stored itself" if alias in self.tensors else f"{kept} is not stored"
                raise CheckpointError(f"{self.path} says that tensor {alias} is tied to {kept}, but {problem}.")
        self.reader = PieceReader(self.root, self.headers)

    def __repr__(self) -> str:
        return f"TensorIndex({str(self.path)!r}, format={self.format!r}, step={self.step}, {len(self.tensors)} tensors)"

    @property
    def path(self) -> Path:
        """The file if one was named, else the directory; for messages."""
        return self.file or self.root

    @property
    def model_directory(self) -> Path:
        """The directory with config and tokenizer, if there are any."""
        return self.side or self.root

    def manifest(self) -> Manifest | None:
        """Read manifest.json; None if there is none, or if a single file was named: it describes the directory."""
        return read_manifest(self.root) if self.file is None else None

    @property
    def names(self) -> list[str]:
        """Names of the stored tensors, in file order, without aliases."""
        return list(self.tensors)

    @property
    def dtypes(self) -> dict[str, str]:
        """Name -> dtype, as in safetensors files (`BF16`)."""
        return {name: entry.dtype for name, entry in self.tensors.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> full shape."""
        return {name: entry.shape for name, entry in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Logical bytes of all stored tensors."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    def files(self) -> list[Path]:
        """Return the files that hold the tensors, sorted."""
        return sorted(self.root / name for name in self._file_names())

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor, or of the one it is tied to; CheckpointError if there is neither."""
        found = self.tensors.get(self.aliases.get(name, name))
        if found is None:
            raise CheckpointError(f"{self.root} has no tensor {name}{nearest(name, self.names)}.")
        return found

    def read(self, name: str, slices: tuple[slice | int, ...] | slice | int | None = None) -> torch.Tensor:
        """Read a tensor, or a part of it, into new CPU memory. Only the bytes of the part are read.

        Args:
            name: Name of the tensor, or one that is tied to it.
            slices: As for indexing a tensor: an integer or a slice with a positive step for each leading dimension.
                None for the whole tensor.

        Returns:
            The part, in the dtype it is stored in.

        Raises:
            CheckpointError: There is no such tensor, or its file is damaged.
            IndexError: `slices` do not fit its shape.
            ValueError, TypeError: The step of a slice is 0, or it is not of integers.
        """
        parts = () if slices is None else slices if isinstance(slices, tuple) else (slices,)
        return self.reader.read(self.entry(name), parts)

    def read_into(self, name: str, start: int, out: Any) -> None:
        """Fill a buffer with the raw bytes of a tensor. Imports no torch; may be called from several threads.

        Args:
            name: Name of the tensor, or one that is tied to it.
            start: The first flat element to read.
            out: The writable buffer; its length in bytes must be a whole number of elements.

        Raises:
            CheckpointError: There is no such tensor, or its file is damaged.
            ValueError: The range is not inside the tensor.
        """
        entry, view = self.entry(name), memoryview(out)
        if not view.nbytes:
            return
        view = view.cast("B")
        size = itemsize(entry.dtype)
        count, rest = divmod(len(view), size)
        if rest or start < 0 or start + count > entry.num_elements:
            raise ValueError(f"{name} has {entry.num_elements} elements of {size} bytes: no {len(view)} at {start}")
        self.reader.read_into(entry, start, view)

    def spans(self, name: str, start: int, stop: int) -> list[Span]:
        """Return the file bytes that hold the flat elements [start, stop) of a tensor, in order."""
        return self.reader.spans(self.entry(name), start, stop)

    def decoded_from(self) -> Iterator[tuple[TensorIndex, list[str]]]:
        """Return each of `parts`, recursively, with its tensors that the index around it does not hold unchanged.

        That index computes others from these, as from an adapter's factors and the weights that it changes. A tensor of
        an inner part that only an outer index replaces is listed for the part between them.
        """
        for part in self.parts:
            yield part, [name for name, entry in part.tensors.items() if self.tensors.get(name) is not entry]
            yield from part.decoded_from()

    def finish_checksums(self) -> None:
        """Compare the CRCs that files hold of the tensors; reads the bytes that were not read yet.

        Raises:
            CheckpointError: A file is damaged.
        """
        for index, names in ((self, self.names), *self.decoded_from()):
            for name in names:
                for piece in index.tensors[name].pieces:
                    index.reader.finish_checksum(piece)

    def remember_files(self) -> None:
        """Fix the files to read: a later replacement is rejected, even if the file was never opened.

        Raises:
            CheckpointError: A file is missing, or of another save than the index of its directory.
        """
        for name in self._file_names(decoded=not self.parts):
            self.reader.files.remember(name)
        for part in self.parts:
            part.remember_files()

    def _file_names(self, *, decoded: bool = True) -> set[str]:
        """Return the files of all pieces, or of those without a codec: a codec may read files of `parts`."""
        found: set[str] = set()
        for entry in self.tensors.values():
            if isinstance(entry.pieces, PieceTable):
                found |= entry.pieces.files
            else:
                found |= {piece.file for piece in entry.pieces if decoded or piece.codec is None}
        return found

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self.reader.files.close()
        for part in self.parts:
            part.close()

    def __enter__(self) -> TensorIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def aliases_in(metadata: Mapping[str, str], tensors: Mapping[str, object]) -> dict[str, str]:
    """Return the tied names in the `__metadata__` of `safetensors.torch.save_model`: {alias: kept name}."""
    return {alias: kept for alias, kept in metadata.items() if kept in tensors and alias not in tensors}
