"""The files of a DeepSpeed ZeRO checkpoint: finding them, checking that they match, and reading their flat vectors."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import tensor_slices
from fsdp_shard.checkpoint.formats.several_files import Agreement, files_by_rank
from fsdp_shard.checkpoint.io import Checksum, has_file, itemsize, member
from fsdp_shard.checkpoint.tensor_entry import Piece
from fsdp_shard.checkpoint.torch_pickle import Record, StoredTensor, counts, piece_of, read_torch_file, readable
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import format_count, open_regular

_LATEST, _LATEST_UNIVERSAL = "latest", "latest_universal"
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_EXPERT_FILE = re.compile(r"layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt")
_WEIGHTS = re.compile(r".*\.(?:bin|pt|pth|ckpt)")
SAVE_WHOLE = "which is not supported; save the whole model from the program that trained it"


@dataclass(frozen=True)
class State:
    """The content of one file. `file` is its name relative to the checkpoint's root."""

    file: str
    path: Path
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous elements of one dtype in a file, from byte `start`, and the checksum of the surrounding storage."""

    file: str
    start: int
    num_elements: int
    checksum: Checksum | None = None


@dataclass(frozen=True)
class Zero:
    """One rank's optimizer file: stage, number of ranks, and the master weights of one dtype in a segment per group.

    `paddings` are the numbers of elements after each parameter of each group, if stored. `fragments` are, up to stage
    2, the parameters in each group's segment with (first element, number of elements).
    """

    stage: int
    world_size: int
    dtype: str
    groups: list[Segment]
    paddings: list[tuple[int, ...]] | None
    fragments: list[dict[str, tuple[int, ...]]] | None


def step_directory(path: Path) -> str | None:
    """The directory of the rank files relative to `path`: "." or the one named in `latest`; None without either."""
    if _matches(path, _OPTIMIZER_FILE):
        return "."
    name = _named_directory(path, _LATEST)
    return name if name is not None and _matches(path / name, _OPTIMIZER_FILE) else None


def universal_directory(path: Path) -> Path | None:
    """The directory of a universal checkpoint: `path`, or without weights in it the one in `latest_universal`."""
    if _is_universal(path):
        return path
    name = _named_directory(path, _LATEST_UNIVERSAL)
    return path / name if name is not None and _is_universal(path / name) and not _matches(path, _WEIGHTS) else None


def _is_universal(path: Path) -> bool:
    """Whether a directory has what ds_to_universal writes: model states, and a directory for each parameter."""
    zero = path / "zero"
    try:
        return bool(_matches(path, _MODEL_FILE)) and any(has_file(at, "fp32.pt") for at in zero.iterdir())
    except OSError:  # there is none, or it cannot be read
        return False


def _named_directory(path: Path, file: str) -> str | None:
    """The name of the directory in `path` that the text in `file` names; None if there is none."""
    if not has_file(path, file):
        return None
    try:
        with os.fdopen(open_regular(member(path, file)), "rb") as opened:
            name = opened.read(256).decode().strip()
    except (CheckpointError, UnicodeDecodeError, OSError):
        return None
    if not name or name != Path(name).name or name in ("..", "."):
        return None
    inner = path / name
    return name if inner.is_dir() and inner.resolve().is_relative_to(path.resolve()) else None


def _matches(path: Path, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    return [match for entry in path.iterdir() if (match := pattern.fullmatch(entry.name))]


def optimizer_files(path: Path, inner: str) -> list[str]:
    """The names of the optimizer files in rank order, after checking that every rank has one."""
    found = _matches(path / inner, _OPTIMIZER_FILE)
    for match in found:
        if int(match[2]):
            raise CheckpointError(
                f"{path / inner / match[0]} is of a model with tensor or pipeline parallelism, {SAVE_WHOLE}."
            )
    names = files_by_rank(path / inner, [(int(match[1]), match[0]) for match in found], kind="optimizer file")
    return [(Path(inner) / name).as_posix() for name in names]


def model_files(path: Path, inner: str, zero: Zero) -> list[str]:
    """The names of the model files: one up to stage 2, one per rank in stage 3."""
    num_files = zero.world_size if zero.stage == 3 else 1
    found = [(int(match[1] or 0), match[0]) for match in _matches(path / inner, _MODEL_FILE) if not int(match[2])]
    wanted = [(rank, name) for rank, name in found if rank < num_files]
    names = files_by_rank(path / inner, wanted, num_files, "file with the model states")
    return [(Path(inner) / name).as_posix() for name in names]


def what_is_missing(path: Path) -> str | None:
    """The end of an error about a directory with an engine's model states that no format reads; None for others."""
    name = _named_directory(path, _LATEST)
    inner = path if name is None else path / name
    states = sorted(match[0] for match in _matches(inner, _MODEL_FILE))
    if not states:
        return None
    files = f"of DeepSpeed, but no {_optimizer_file_of(states[0])}, from which the weights are read"
    if _matches(inner, _EXPERT_FILE):
        return f"it holds a model {files}: experts in files of their own are not supported."
    return f"it holds {states[0]} {files}; give the directory of a whole save."


def _optimizer_file_of(model_file: str) -> str:
    """The name of a rank's optimizer file, without the prefix for its dtype, from that of its model states."""
    match = _MODEL_FILE.fullmatch(model_file)
    rank, part = (match[1] or "0", match[2]) if match else ("*", "*")
    return f"*zero_pp_rank_{rank}_mp_rank_{part}_optim_states.pt"


def refuse_incomplete(content: Any, path: Path) -> None:
    """Raise CheckpointError for an engine's model states that do not hold the weights of all their parameters."""
    if not isinstance(content, Mapping) or not isinstance(content.get("module"), Mapping):
        return
    module, groups = content["module"], content.get("param_shapes")
    groups = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    source = f"the optimizer files, {_optimizer_file_of(path.name)} and those of the other ranks"
    for name, shape in (item for group in groups for item in group.items()):
        tensor = module.get(name)
        if isinstance(tensor, StoredTensor) and isinstance(shape, tuple) and tensor.shape != shape:
            raise CheckpointError(
                f"{path} holds the placeholders of ZeRO stage 3: tensor {name} has the shape {list(tensor.shape)} "
                f"instead of {list(shape)}. The weights are in {source}; give the directory of the save that has them."
            )
    if content.get("num_experts") and "ds_version" in content:
        raise CheckpointError(
            f"{path} holds a model without its experts, which DeepSpeed writes to files of their own. All weights of "
            f"a ZeRO save are in {source}; give the directory of the save that has them."
        )


def read_state(root: Path, file: str) -> State:
    """Read the file `file` of the checkpoint in `root`."""
    path = member(root, file)
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not the state of a DeepSpeed engine.")
    return State(file, path, content)


def check_ranks(directory: Path, states: Sequence[State], zeros: Sequence[Zero]) -> None:
    """Raise CheckpointError unless the optimizer files of all ranks exist and belong to one save."""
    saves = Agreement()
    for state, zero in zip(states, zeros, strict=True):
        size = (zero.world_size, "ranks with", len(zero.groups), "parameter groups of", zero.dtype)
        saves.check("the optimizer state", state.path, "of ZeRO stage", zero.stage, "on", *size)
    if zeros[0].world_size != len(zeros):
        raise CheckpointError(
            f"{directory} has the optimizer files of {format_count(len(zeros), 'rank')}, but was written by "
            f"{format_count(zeros[0].world_size, 'rank')}."
        )


def zero_of(state: State) -> Zero:
    """The partitions in an optimizer file."""
    held = state.content.get("optimizer_state_dict")
    if not isinstance(held, Mapping) or not {"zero_stage", "single_partition_of_fp32_groups"} & held.keys():
        raise CheckpointError(f"{state.path} has no ZeRO optimizer state.")
    stage = held.get("zero_stage", 1)  # BF16_Optimizer, which partitions as stage 1 does, records none
    stage = stage.arguments[0] if isinstance(stage, Record) and stage.arguments else stage
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{state.path} is of ZeRO stage {str(stage)[:20]!r}; stages 1 to 3 are supported.")
    size = _world_size(state, held)
    groups = held.get("single_partition_of_fp32_groups" if stage <= 2 else "fp32_flat_groups")
    if type(size) is not int or not isinstance(groups, (list, tuple)):
        raise CheckpointError(f"{state.path} does not say how its ZeRO optimizer was partitioned.")
    dtypes = {readable(group, f"group {number}", state.path).dtype for number, group in enumerate(groups)}
    dtype = "BF16" if dtypes == {"BF16"} else "F32"  # with bf16_master_weights_and_grads
    found = [segment(state, f"group {number}", group, dtype) for number, group in enumerate(groups)]
    paddings = _paddings(state, held.get("param_alignment_paddings"))
    return Zero(stage, size, dtype, found, paddings, _fragments(state, held.get("param_slice_mappings")))


def _world_size(state: State, held: Mapping[str, Any]) -> Any:
    """The number of ranks over which a file says that the parameters are divided, in whatever type it is stored."""
    size, groups = held.get("partition_count"), held.get("ds_zero_partition_groups")
    sizes = list(size) if isinstance(size, list) else [size]
    if isinstance(groups, list):  # stage 3 with expert parallelism
        sizes += [group.get("partition_count") for group in groups if isinstance(group, Mapping)]
    different = list(dict.fromkeys(str(size)[:20] for size in sizes))
    if len(different) > 1:
        raise CheckpointError(
            f"{state.path} is of a model with expert parallelism (some parameters are divided over {different[0]} "
            f"ranks, others over {different[1]}), {SAVE_WHOLE}."
        )
    return sizes[0] if sizes else 0


def _paddings(state: State, value: Any) -> list[tuple[int, ...]] | None:
    if value is None:
        return None
    try:
        return [counts(group, 1 << 20) for group in value]
    except TypeError as error:
        raise CheckpointError(f"{state.path} has paddings of parameters that are none: {error}.") from None


def _fragments(state: State, value: Any) -> list[dict[str, tuple[int, ...]]] | None:
    if value is None:  # before DeepSpeed 0.7
        return None
    try:
        return [
            {str(name): counts((at.get("start"), at.get("numel"))) for name, at in group.items()} for group in value
        ]
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{state.path} has fragments of parameters that are none: {error}.") from None


def segment(state: State, name: str, tensor: Any, dtype: str) -> Segment:
    """Return a contiguous tensor of `dtype` in a file; raise CheckpointError for anything else."""
    plain = readable(tensor, name, state.path)
    piece = piece_of("", plain, plain.shape)
    if plain.dtype != dtype or piece.codec is not None:
        raise CheckpointError(f"{state.path}: {name} is not a flat tensor of {dtype}.")
    return Segment(state.file, plain.start, plain.num_elements, piece.checksum)


def length(vector: Sequence[Segment]) -> int:
    """The total number of elements in these segments."""
    return sum(segment.num_elements for segment in vector)


def pieces(
    vector: Sequence[Segment], at: int, shape: tuple[int, ...], first: int, num_elements: int, dtype: str
) -> Iterator[Piece]:
    """The pieces of the flat elements [first, first + num_elements) of a tensor of `shape`.

    They begin at element `at` of the vector; if the vector ends early, the last pieces are missing.
    """
    position = 0
    for segment in vector:
        low, high = max(at, position), min(at + num_elements, position + segment.num_elements)
        if low < high:
            start = segment.start + (low - position) * itemsize(dtype)
            for offsets, box in tensor_slices.flat_boxes(shape, first + low - at, high - low):
                yield Piece(segment.file, start, offsets, box, None, segment.checksum)
                start += math.prod(box) * itemsize(dtype)
        position += segment.num_elements
