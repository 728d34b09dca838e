"""The stored tensors that fill the tensors of a model, by the names in the model.

For most models, the names are the same. For others, transformers renames tensors on load, and stacks experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.tensor_entry import TensorEntry


class StoredPart(NamedTuple):
    """The stored tensor `name`, and the box of a model tensor that it fills, at `offsets` and of `shape`."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class ModelTensor(NamedTuple):
    """Shape and parts of a model tensor; without parts, it is computed from stored tensors."""

    shape: tuple[int, ...]
    parts: Sequence[StoredPart]


@dataclass(frozen=True)
class ModelNames:
    """The tensors of a model that a checkpoint stores.

    Attributes:
        tensors: Name of a tensor in the model -> where it is stored; for tied ones, only the kept name.
        ties: Tied name -> kept name; None if no model was built.
        linear: The modules that peft's `all-linear` adapts; None if no model was built.
        transposed: Modules whose matrices for each expert are [inputs, outputs].
    """

    tensors: Mapping[str, ModelTensor]
    ties: Mapping[str, str] | None = None
    linear: frozenset[str] | None = None
    transposed: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """The codec of a tensor in another index."""

    index: TensorIndex
    name: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.index.entry(self.name).num_bytes

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        """Copy elements of the tensor, regardless of the file of the piece."""
        self.index.read_into(self.name, start, out)


def names_of_files(index: TensorIndex) -> ModelNames:
    """Use the stored names as the names in the model."""
    whole = {name: StoredPart(name, (0,) * len(entry.shape), entry.shape) for name, entry in index.tensors.items()}
    return ModelNames({name: ModelTensor(part.shape, (part,)) for name, part in whole.items()})


def names_of_model(index: TensorIndex, directory: Path, others: Mapping[str, TensorEntry]) -> ModelNames:
    """Match names with the model class of a config, as in loading; imports transformers.

    Args:
        index: The stored tensors.
        directory: The directory of config.json.
        others: Tensors of the model that another checkpoint holds, by the names in the model.

    Raises:
        CheckpointError, ModelError: The model does not exist, or the tensors do not belong to it.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from fsdp_shard.checkpoint.keys.matching import match_names
    from fsdp_shard.models import build_on_meta, load_config, tied_names

    model = build_on_meta(load_config(directory), "float32")
    # Each codec identifies its stored tensor, regardless of conversions.
    stored = {name: entry.with_codec(CopiedTensor(index, entry.name)) for name, entry in index.tensors.items()}
    matched = replace(index, tensors=stored | dict(others))  # the match replaces entries with converted ones
    try:
        names = match_names(model, matched).stored
    finally:
        matched.reader.files.close()
    entries = {name: matched.entry(found) for name, found in names.items() if found not in others}
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    return ModelNames(
        {name: ModelTensor(entry.shape, _parts(entry)) for name, entry in entries.items()},
        tied_names(model),
        frozenset(n for n, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and module is not head),
        frozenset(name for name, module in modules.items() if getattr(module, "is_transposed", False)),
    )


def _parts(entry: TensorEntry) -> list[StoredPart]:
    found = [
        StoredPart(piece.codec.name, piece.offsets, piece.shape)
        for piece in entry.pieces
        if isinstance(piece.codec, CopiedTensor)
    ]
    return found if len(found) == len(entry.pieces) else []
