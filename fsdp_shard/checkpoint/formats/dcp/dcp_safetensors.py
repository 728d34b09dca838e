"""Format `torch_huggingface`: per-rank safetensors of DCP's `HuggingFaceStorageWriter(save_distributed=True)`.

`save_pretrained(distributed_checkpoint=True)` of transformers and the last step of torchtitan use that writer. A file
`shard-RANK-model-PART-of-PARTS.safetensors` holds at most one piece of a tensor, whose offsets are in the metadata
(`DCP_SHARDING_INFO`). Neither the number of ranks nor a full shape is stored: a tensor ends where its last piece does.
Missing files of the last ranks therefore have only two symptoms: a hole, where a mesh cuts along two dims, and a
vocabulary smaller than config.json's. Without either (one dim, every tensor cut, no config.json) a lost last rank looks
like a smaller model, to this reader and to torch's own. Imports no torch.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_shard.checkpoint.formats.several_files import Agreement, one_world_size
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import Header, member, read_header
from fsdp_shard.checkpoint.model_files import read_config
from fsdp_shard.checkpoint.tensor_entry import Piece, TensorEntry, checked_entry
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import open_regular, parse_json

NAME = "torch_huggingface"
INFO_KEY = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_ZIP = b"PK\x03\x04"  # first bytes of a torch.save archive
# The modules whose weight has one row per token, by the last name before `.weight`.
_VOCABULARY = frozenset(
    {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "lm_head", "embed_out"}
)


class ShardFile(NamedTuple):
    """The numbers in a file name; all count from 1."""

    rank: int
    part: int
    num_parts: int

    @property
    def name(self) -> str:
        """The file name."""
        return f"shard-{self.rank:05d}-model-{self.part:05d}-of-{self.num_parts:05d}.safetensors"


def parse_name(name: str) -> ShardFile | None:
    """Return the numbers in the name of a rank file, or None for any other name."""
    match = re.fullmatch(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors", name)
    return ShardFile(*map(int, match.groups())) if match else None


def recognize(path: Path) -> bool:
    """Return whether `path` is a directory with a rank file, or a rank file, which `read` rejects as only a part."""
    if path.is_file():
        return parse_name(path.name) is not None
    return path.is_dir() and any(parse_name(entry.name) for entry in path.iterdir())


def read(path: Path) -> TensorIndex:
    """Return the index of all ranks' files; detectable missing, mixed or overlapping files are errors."""
    if path.is_file():
        raise CheckpointError(f"{path} holds one rank's part of the weights only; give its directory {path.parent}.")
    found = _files(path)
    pieces: dict[str, list[Piece]] = {}
    dtypes: dict[str, str] = {}
    saves = Agreement()
    for file in found:
        for name, dtype, piece in _pieces(member(path, file.name), file.name):
            saves.check(f"tensor {name}", path / file.name, dtype)
            dtypes[name] = dtype
            pieces.setdefault(name, []).append(piece)
    if not pieces:
        raise CheckpointError(f"{path} has the files of all ranks, but no tensors in them.")
    tensors = {name: _entry(path, name, dtypes[name], held) for name, held in pieces.items()}
    _check_vocabulary(path, tensors.values())
    return TensorIndex(path, NAME, tensors, world_size=found[-1].rank)


def _files(root: Path) -> list[ShardFile]:
    """Return the rank files in order; an error if a number in between is missing.

    A rank with nothing to write makes no file, but torch assigns what several ranks hold to the lowest idle rank, so
    those without a file are the last ranks.
    """
    found = sorted(parsed for entry in root.iterdir() if (parsed := parse_name(entry.name)))
    num_parts = one_world_size(root, {file.num_parts for file in found}, "parts") or 0
    if bad := next((file for file in found if not file.rank or not 0 < file.part <= num_parts), None):
        raise CheckpointError(f"{root / bad.name} has a name that torch never gives: it counts ranks and parts from 1.")
    parts, ranks = {file.part for file in found}, {file.rank for file in found}
    if absent := next((rank for rank in range(1, max(ranks)) if rank not in ranks), None):
        name = ShardFile(absent, min(parts), num_parts).name
        raise CheckpointError(f"{root / name} is missing: there are files of rank {max(ranks)}, none of {absent}.")
    if absent := next((part for part in range(1, num_parts + 1) if part not in parts), None):
        raise CheckpointError(f"{root} has no file of part {absent} of {num_parts}: the checkpoint is not complete.")
    return found


def refuse_parts(where: Path, header: Header) -> None:
    """Reject a file of full tensors that holds parts: sharded tensors saved without `save_distributed=True`."""
    if INFO_KEY in header.metadata:
        for name, at in _offsets(where, header).items():
            if any(at):
                raise CheckpointError(
                    f"{where} holds only the part of tensor {name} from {list(at)} on: the ranks wrote over "
                    "each other's files. Save sharded tensors with HuggingFaceStorageWriter(save_distributed=True)."
                )


def _pieces(where: Path, file: str) -> Iterator[tuple[str, str, Piece]]:
    """Yield (tensor, dtype, piece) of one file."""
    header = _read_header(where)
    offsets = _offsets(where, header)
    for name, stored in header.tensors.items():
        at = offsets[name]
        if len(at) != len(stored.shape):
            raise CheckpointError(
                f"{where}: tensor {name} has {len(stored.shape)} dimensions, but {len(at)} offsets in {INFO_KEY}."
            )
        yield name, stored.dtype, Piece(file, stored.start, at, stored.shape)


def _read_header(where: Path) -> Header:
    with os.fdopen(open_regular(where), "rb") as file:
        start = file.read(len(_ZIP))
    if start == _ZIP:
        raise CheckpointError(
            f"{where} begins with a pickled entry: the state dict held something that is not a tensor, and torch's "
            "writer then makes a file that no reader of safetensors opens. Save the tensors only."
        )
    return read_header(where)


def _offsets(where: Path, header: Header) -> Mapping[str, tuple[int, ...]]:
    text = header.metadata.get(INFO_KEY)
    if text is None:
        raise CheckpointError(f"{where} has no {INFO_KEY} in its metadata, so the offsets of its pieces are not known.")
    document = parse_json(text.encode(), f"the {INFO_KEY} of {where}")
    if not isinstance(document, dict) or not all(_is_entry(value) for value in document.values()):
        raise CheckpointError(f"the {INFO_KEY} of {where} is not a map from tensor names to {_OFFSETS}.")
    if differing := sorted(document.keys() ^ header.tensors.keys()):
        raise CheckpointError(f"{where}: tensor {differing[0]} is only in one of header and {INFO_KEY}.")
    return {name: tuple(value[_OFFSETS]) for name, value in document.items()}


def _is_entry(value: Any) -> bool:
    offsets = value.get(_OFFSETS) if isinstance(value, dict) else None
    return isinstance(offsets, list) and all(type(offset) is int and offset >= 0 for offset in offsets)


def _entry(root: Path, name: str, dtype: str, pieces: list[Piece]) -> TensorEntry:
    if len(num_dims := {len(piece.shape) for piece in pieces}) > 1:
        some = " and ".join(map(str, sorted(num_dims)))
        raise CheckpointError(f"{root}: tensor {name} has pieces of {some} dimensions: these are files of two saves.")
    ends = ([o + n for o, n in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces)
    return checked_entry(root, name, dtype, tuple(map(max, zip(*ends, strict=True))), pieces)


def _check_vocabulary(root: Path, entries: Iterable[TensorEntry]) -> None:
    """Reject an embedding with fewer rows than in config.json: the symptom of a lost last rank."""
    config = read_config(root)
    part = config.get("text_config", config)
    size = part.get("vocab_size") if isinstance(part, Mapping) else None
    for entry in entries:
        module = entry.name.rpartition(".")[0].rpartition(".")[2]
        is_vocabulary = len(entry.shape) == 2 and module in _VOCABULARY
        if is_vocabulary and isinstance(size, int) and entry.shape[0] < size:
            raise CheckpointError(
                f"{root}: tensor {entry.name} has {entry.shape[0]} rows, but config.json says vocab_size {size}: "
                f"the files of the last ranks are missing (the last one found is {entry.pieces[-1].file})."
            )
