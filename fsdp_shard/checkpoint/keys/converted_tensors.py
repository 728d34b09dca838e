"""Converts stored tensors as transformers does on load: experts are stacked by byte ranges, others by its own code.

The results become entries of the index, so all code that reads weights reads them like others.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, core_model_loading as loading

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import from_torch_name, to_torch
from fsdp_shard.checkpoint.piece_reader import tensor_bytes
from fsdp_shard.checkpoint.tensor_entry import Piece, TensorEntry
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import first_line

Part = tuple[int, int, TensorEntry]  # expert, position among the concatenated tensors, the stored tensor
Sources = Sequence[tuple[str, str]]  # stored names with their matching patterns


def convert_tensors(
    model: PreTrainedModel,
    index: TensorIndex,
    converters: Sequence[loading.WeightConverter],
    sources: Mapping[str, Sources],
) -> list[str]:
    """Replace stored tensors in `index` with entries for transformers' conversion of them.

    Args:
        model: The model of the tensors.
        index: The checkpoint.
        converters: transformers' conversions for this model.
        sources: First resulting name -> the stored tensors from which it is made.

    Returns:
        The names of the new entries.

    Raises:
        CheckpointError: The stored tensors do not fit together.
    """
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    cache: dict[str, dict[str, torch.Tensor]] = {}
    made: dict[str, TensorEntry] = {}
    for name, stored in sources.items():
        converter = by_pattern[stored[0][1]]
        parts = [_expert(index, converter, source) for source, _ in stored]
        experts = sorted((part for part in parts if part is not None), key=lambda part: part[:2])
        if len(experts) == len(parts):
            made[name] = _stacked(index, name, experts)
        else:
            made |= _converted(index, _Conversion(model, index, converter, name, stored, cache))
    for stored in sources.values():
        for source, _ in stored:
            index.tensors.pop(index.entry(source).name, None)
    if stored_too := next((name for name in made if name in index.tensors), None):
        raise CheckpointError(
            f"{index.path} holds {stored_too}, and also the tensors that it is made of; remove what was left over."
        )
    index.tensors.update(made)
    return list(made)


def computed_entry(
    index: TensorIndex, name: str, like: torch.Tensor, compute: Callable[[], torch.Tensor]
) -> TensorEntry:
    """An entry for a tensor computed on read, with the dtype and shape of `like`, which may be on meta."""
    pieces = next(iter(index.tensors.values())).pieces  # whose first file stands for all files of the index
    dtype = from_torch_name(str(like.dtype).removeprefix("torch."))
    return TensorEntry(name, dtype, tuple(like.shape), pieces).with_codec(_ComputedCodec(compute))


@dataclass(frozen=True, slots=True)
class _ComputedCodec:
    """The codec of a computed tensor."""

    compute: Callable[[], torch.Tensor]
    num_bytes: int = 0

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        values = self.compute()
        first = start * values.itemsize
        out[:] = tensor_bytes(values)[first : first + len(out)]


def _expert(index: TensorIndex, converter: loading.WeightConverter, stored: str) -> Part | None:
    """The expert of a stored tensor if the conversion only stacks experts; else None."""
    merge, *rest = converter.operations
    is_merge = isinstance(merge, loading.MergeModulelist) and merge.dim == 0
    is_simple = all(isinstance(then, loading.Concatenate) and then.dim == 1 for then in rest) and len(rest) <= 1
    for position, pattern in enumerate(converter.source_patterns):
        found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), stored)
        if found is not None and found.groups() and is_merge and is_simple:
            return int(found.group(1)), position, index.entry(stored)
    return None


def _stacked(index: TensorIndex, name: str, parts: Sequence[Part]) -> TensorEntry:
    """Build [experts, rows of all positions, ...] from one tensor for each expert and position, in that order."""
    num_experts, num_positions = (len({part[axis] for part in parts}) for axis in (0, 1))
    if [part[:2] for part in parts] != [(e, p) for e in range(num_experts) for p in range(num_positions)]:
        raise CheckpointError(f"{index.root} lacks some of the experts that {name} is made of.")
    first = parts[0][2]
    for _, _, entry in parts:
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{index.root} holds {entry.name} as {entry.dtype} {list(entry.shape)}, but {first.name}, which is a "
                f"part of the same {name}, as {first.dtype} {list(first.shape)}."
            )
    rows = first.shape[0]
    pieces = [_moved(piece, expert, at * rows) for expert, at, entry in parts for piece in entry.pieces]
    return TensorEntry(name, first.dtype, (num_experts, rows * num_positions, *first.shape[1:]), tuple(pieces))


def _moved(piece: Piece, expert: int, row: int) -> Piece:
    offsets = (expert, piece.offsets[0] + row, *piece.offsets[1:])
    return piece._replace(offsets=offsets, shape=(1, *piece.shape))


class _Conversion:
    """A conversion by transformers. All with one `cache` keep only the last result, whose parts are read in turn."""

    def __init__(
        self,
        model: PreTrainedModel,
        index: TensorIndex,
        converter: loading.WeightConverter,
        name: str,
        stored: Sources,
        cache: dict[str, dict[str, torch.Tensor]],
    ) -> None:
        self.model, self.converter, self.name, self._cache, self._reader = model, converter, name, cache, index.reader
        ordered = sorted(stored, key=lambda source: loading.dot_natural_key(source[0]))  # transformers' order
        self.sources = [(index.entry(source), pattern) for source, pattern in ordered]

    def run(self, read: Callable[[TensorEntry], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return name -> tensor, converted from the results of `read`."""
        converter = copy.deepcopy(self.converter)
        for entry, pattern in self.sources:
            when_needed: Any = partial(read, entry)  # transformers' annotation is too narrow
            converter.add_tensor(self.name, entry.name, pattern, when_needed)
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}

    def result(self, name: str) -> torch.Tensor:
        """One of the resulting tensors."""
        found = self._cache.get(self.name)
        if found is None:
            made = self.run(lambda entry: self._reader.read(entry, ()))
            found = {each: tensor.contiguous() for each, tensor in made.items()}
            self._cache.clear()
            self._cache[self.name] = found
        return found[name]


def _converted(index: TensorIndex, conversion: _Conversion) -> dict[str, TensorEntry]:
    """The entries for a conversion's results; dtypes and shapes come from a trial on the meta device."""
    try:
        made = conversion.run(lambda entry: torch.empty(entry.shape, dtype=to_torch(entry.dtype), device="meta"))
    except Exception as error:  # anything that inconsistent stored tensors cause
        raise CheckpointError(
            f"{index.root} stores {conversion.sources[0][0].name} in a form that transformers converts to "
            f"{conversion.name}, which fails: {first_line(error)} The weights are incomplete, or of another model."
        ) from error
    return {
        name: computed_entry(index, name, tensor, partial(conversion.result, name)) for name, tensor in made.items()
    }
