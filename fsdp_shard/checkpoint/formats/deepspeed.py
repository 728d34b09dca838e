"""Format `deepspeed`: ZeRO stages 1 to 3; reads the master weights in all optimizer files, without DeepSpeed.

As in DeepSpeed 0.19 (utils/zero_to_fp32.py), model states list the parameters with their shapes, in the order of the
flat vectors in the optimizer states. Up to stage 2, a parameter group is one vector, split over the ranks at any
element. In stage 3, each parameter is split into equal, padded parts, and each rank concatenates its parts. Buffers and
untrained parameters are in the model states, in the model's own dtype; stage 1 does not list the latter. Master weights
are float32, or bfloat16 where DeepSpeed is set to train so.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import torch_pickle
from fsdp_shard.checkpoint.formats import deepspeed_files
from fsdp_shard.checkpoint.formats.deepspeed_files import (
    SAVE_WHOLE,
    Segment,
    State,
    Zero,
    length,
    pieces,
    segment,
    step_directory,
    universal_directory,
)
from fsdp_shard.checkpoint.formats.several_files import Agreement, Replicas
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.tensor_entry import Piece, TensorEntry, checked_entry
from fsdp_shard.checkpoint.torch_pickle import AnyTensor, StoredTensor, counts, plain_entry, readable, text, walk
from fsdp_shard.errors import CheckpointError

NAME = "deepspeed"

_Shapes = Mapping[str, tuple[int, ...]]


def recognize(path: Path) -> bool:
    """Whether `path` is a directory with ZeRO optimizer files or a universal checkpoint, or names one as the latest."""
    return path.is_dir() and (step_directory(path) is not None or universal_directory(path) is not None)


def read(path: Path) -> TensorIndex:
    """Return the index of a directory that `recognize` accepts; trained parameters have the dtype of master weights."""
    inner = step_directory(path)
    if inner is None:
        raise CheckpointError(
            f"{universal_directory(path)} is a universal checkpoint of DeepSpeed (a directory in zero/ for each "
            "parameter), which is not supported; give the directory of the save that it was made from."
        )
    optimizers = [deepspeed_files.read_state(path, name) for name in deepspeed_files.optimizer_files(path, inner)]
    zeros = [deepspeed_files.zero_of(state) for state in optimizers]
    deepspeed_files.check_ranks(path / inner, optimizers, zeros)
    models = [deepspeed_files.read_state(path, name) for name in deepspeed_files.model_files(path, inner, zeros[0])]
    shapes = _param_shapes(models[0])
    make = _split_anywhere if zeros[0].stage <= 2 else _split_equally
    replicas = _replicas(path, models, optimizers)
    found: dict[str, TensorEntry] = {}
    for entry in (*make(path, models[0], shapes, zeros), *_kept_in_models(path, models, zeros[0].stage, replicas)):
        if found.setdefault(entry.name, entry) is not entry:
            raise CheckpointError(f"{models[0].path} names parameter {entry.name} twice; which one is meant?")
    replicas.compare()
    shared = _shared(models[0], found)
    if zeros[0].stage <= 2:
        found |= {entry.name: entry for entry in _unlisted(models[0], {*found, *shared})}
    tensors, aliases = torch_pickle.without_copies(found, path)
    aliases |= {name: kept for name, kept in shared.items() if kept in tensors}
    moments = [tensor for state in optimizers for keys, tensor in walk(state.content, state.path) if "state" in keys]
    step = models[0].content.get("global_steps")
    return TensorIndex(
        path,
        NAME,
        tensors,
        aliases,
        {"stage": zeros[0].stage, "deepspeed": str(models[0].content.get("ds_version"))},
        step=step if type(step) is int and step >= 0 else None,
        world_size=len(zeros),
        extras={"optimizer": torch_pickle.extra_of(moments)},
        replicas=tuple(replicas.pieces),
    )


def _replicas(path: Path, models: Sequence[State], optimizers: Sequence[State]) -> Replicas:
    """Check that the files of all ranks agree; each optimizer file stores the number of steps as a tensor."""
    saves, replicas = Agreement(), Replicas(path)
    for model in models:
        shapes = [[(name, *counts(shape)) for name, shape in group.items()] for group in _param_shapes(model)]
        saves.check("the step", model.path, model.content.get("global_steps"))
        saves.check("the list of parameters", model.path, shapes)
        saves.check("the list of buffers", model.path, model.content.get("buffer_names"))
    for state in optimizers:
        for keys, tensor in walk(state.content, state.path):
            if keys[-1] == "step" and "state" in keys and isinstance(tensor, StoredTensor):
                name = f"{keys[-2]}.step of the optimizer"
                entry = plain_entry(name, tensor, state.file, state.path)
                replicas.add(name, entry.dtype, entry.pieces[0])
    return replicas


def _param_shapes(state: State) -> list[_Shapes]:
    groups = state.content.get("param_shapes")
    if not isinstance(groups, list):
        raise CheckpointError(
            f"{state.path} has no shapes of parameters, so it is not the model state of a ZeRO engine."
        )
    return [_shapes(state, group) for group in groups]


def _shapes(state: State, group: Any) -> _Shapes:
    try:
        return {text(name): counts(shape) for name, shape in group.items()}
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{state.path} has shapes of parameters that are not shapes: {error}.") from None


def _split_anywhere(
    root: Path, model: State, shapes: Sequence[_Shapes], zeros: Sequence[Zero]
) -> Iterator[TensorEntry]:
    """Stages 1 and 2: the concatenated partitions of a group on all ranks are its concatenated parameters."""
    dtype, paddings = zeros[0].dtype, zeros[0].paddings or [(0,) * len(group) for group in shapes]
    if [len(group) for group in shapes] != [len(group) for group in paddings] or len(shapes) != len(zeros[0].groups):
        raise CheckpointError(f"{model.path} has other groups of parameters than the optimizer files.")
    for number, group in enumerate(shapes):
        vector = [zero.groups[number] for zero in zeros]
        at, starts = 0, {}
        for (name, shape), padding in zip(group.items(), paddings[number], strict=True):
            size = math.prod(shape)
            yield _entry(root, name, dtype, shape, pieces(vector, at, shape, 0, size, dtype), vector)
            starts[name] = (at, size)
            at += size + padding
        _check_fragments(model, number, starts, zeros)
        # The end is padded to a multiple of twice the number of ranks; the last ranks' partitions lack some of it.
        _check_end(model, at, length(vector), 2 * len(zeros))


def _check_fragments(model: State, number: int, starts: Mapping[str, tuple[int, int]], zeros: Sequence[Zero]) -> None:
    """Raise CheckpointError unless each rank's own list of a group's parameters matches the positions that were read.

    `starts` are their (first element, number of elements) in the whole group.
    """
    low = 0
    for rank, zero in enumerate(zeros):
        high = low + zero.groups[number].num_elements
        parts = {name: (max(at - low, 0), min(at + n, high) - max(at, low)) for name, (at, n) in starts.items()}
        expected = {name: part for name, part in parts.items() if part[1] > 0}
        if zero.fragments is not None and zero.fragments[number : number + 1] != [expected]:
            raise CheckpointError(
                f"{model.path} and the optimizer file of rank {rank} do not have the same parameters in group "
                f"{number}: the files were mixed up, or one is damaged."
            )
        low = high


def _split_equally(root: Path, model: State, shapes: Sequence[_Shapes], zeros: Sequence[Zero]) -> Iterator[TensorEntry]:
    """Stage 3: a rank's concatenated groups are its concatenated parts of all parameters; the last parts are padded."""
    at, dtype = 0, zeros[0].dtype
    vectors = [zero.groups for zero in zeros]
    for name, shape in (item for group in shapes for item in group.items()):
        yield _entry(root, name, dtype, shape, _equal_parts(vectors, at, shape, dtype), zeros[0].groups)
        at += -(-math.prod(shape) // len(zeros))
    for zero in zeros:
        _check_end(model, at, length(zero.groups), 1)


def _equal_parts(vectors: Sequence[Sequence[Segment]], at: int, shape: tuple[int, ...], dtype: str) -> Iterator[Piece]:
    size = math.prod(shape)
    part = -(-size // len(vectors))
    for rank, vector in enumerate(vectors):
        first = min(rank * part, size)
        yield from pieces(vector, at, shape, first, min(part, size - first), dtype)


def _entry(
    root: Path, name: str, dtype: str, shape: tuple[int, ...], held: Iterable[Piece], vector: Sequence[Segment]
) -> TensorEntry:
    """The entry of a parameter; a parameter without elements has no bytes, at the start of the vector."""
    empty = [Piece(part.file, part.start, (0,) * len(shape), shape) for part in vector[:1] if not math.prod(shape)]
    return checked_entry(root, name, dtype, shape, [*held, *empty])


def _check_end(model: State, wanted: int, found: int, alignment: int) -> None:
    if -(-wanted // alignment) != -(-found // alignment):
        raise CheckpointError(
            f"{model.path} names parameters of {wanted} elements in all, but the optimizer files hold "
            f"{found}: these are files of different saves."
        )


def _kept_in_models(root: Path, models: Sequence[State], stage: int, replicas: Replicas) -> Iterator[TensorEntry]:
    """Buffers and untrained parameters: complete up to stage 2, in equal flat parts in stage 3."""
    first, names = models[0], models[0].content.get("buffer_names")
    modules: list[Any] = [model.content.get("module") for model in models]
    if modules[0] is None and "module" in first.content:
        raise CheckpointError(
            f"{first.path} is of a PipelineModule, whose layers are in files of their own, {SAVE_WHOLE}."
        )
    if not all(isinstance(module, Mapping) for module in modules) or not isinstance(names, (list, tuple, set)):
        raise CheckpointError(f"{first.path} has no module or no names of buffers, so it is not a model state.")
    for name in dict.fromkeys(map(str, names)):
        held = zip(models, modules, strict=True) if name in modules[0] else ()
        entries = [plain_entry(name, module.get(name), model.file, model.path) for model, module in held]
        for entry in entries:
            replicas.add(name, entry.dtype, entry.pieces[0])
        yield from entries[:1]
    frozen = _shapes(first, first.content.get("frozen_param_shapes") or {})
    for name, shape in frozen.items():
        fragments = [_fragments(model).get(name) for model in models]
        if stage <= 2:
            yield plain_entry(name, fragments[0], first.file, first.path)
            continue
        dtype = readable(fragments[0], name, first.path).dtype
        vectors = [[segment(model, name, part, dtype)] for model, part in zip(models, fragments, strict=True)]
        yield checked_entry(root, name, dtype, shape, list(_equal_parts(vectors, 0, shape, dtype)))


def _fragments(model: State) -> Mapping[str, Any]:
    found = model.content.get("frozen_param_fragments") or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{model.path} has no map of the parameters that were not trained.")
    return found


def _unlisted(model: State, known: Set[str]) -> Iterator[TensorEntry]:
    """Up to stage 2, what only `module` holds: stage 1 does not list the parameters that are not trained."""
    for name, tensor in model.content["module"].items():
        if str(name) not in known and isinstance(tensor, AnyTensor):
            yield plain_entry(str(name), tensor, model.file, model.path)


def _shared(model: State, found: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Tied parameters: those that DeepSpeed lists, and in stage 3 those whose emptied tensors share one storage."""
    listed, module = model.content.get("shared_params"), model.content.get("module")
    pairs = {str(name): str(kept) for name, kept in listed.items()} if isinstance(listed, Mapping) else {}
    pairs = {name: kept for name, kept in pairs.items() if kept in found}
    items = module.items() if isinstance(module, Mapping) else ()
    starts = {str(name): tensor.start for name, tensor in items if isinstance(tensor, StoredTensor)}
    owners = {start: name for name, start in starts.items() if name in found}
    for name, start in starts.items():
        if name not in found and start in owners:
            pairs.setdefault(name, owners[start])
    return pairs
