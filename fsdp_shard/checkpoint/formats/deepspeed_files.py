"""The files of a DeepSpeed ZeRO checkpoint: which there are, whether they belong together, and what is in each."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.formats.flat_parts import Segment
from fsdp_shard.checkpoint.io.files import has_file, member, open_regular
from fsdp_shard.checkpoint.torch_pickle.metadata_classes import Record, counts
from fsdp_shard.checkpoint.torch_pickle.state_dict import readable
from fsdp_shard.checkpoint.torch_pickle.strided import piece_of
from fsdp_shard.checkpoint.torch_pickle.torch_zip import StoredTensor, read_torch_file
from fsdp_shard.errors import CheckpointError

_LATEST = "latest"
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


@dataclass(frozen=True)
class State:
    """What one file holds. `file` is its name as seen from the checkpoint's root."""

    file: str
    where: Path
    content: Mapping[str, Any]


@dataclass(frozen=True)
class Zero:
    """One rank's optimizer file: stage, number of ranks, the float32 masters of each parameter group in one segment.

    `paddings` are elements behind each parameter of each group, where the file has any.
    """

    stage: int
    world_size: int
    groups: list[Segment]
    paddings: list[tuple[int, ...]] | None


def step_directory(path: Path) -> str | None:
    """The directory with the rank files as seen from `path`: "." or what `latest` names; None if there is none."""
    if _matches(path, _OPTIMIZER_FILE):
        return "."
    name = _latest(path)
    if name is None or name != Path(name).name or name in ("..", "."):
        return None
    inner = path / name
    is_inside = inner.is_dir() and inner.resolve().is_relative_to(path.resolve())
    return name if is_inside and _matches(inner, _OPTIMIZER_FILE) else None


def _latest(path: Path) -> str | None:
    if not has_file(path, _LATEST):
        return None
    try:
        with os.fdopen(open_regular(member(path, _LATEST)), "rb") as file:
            return file.read(256).decode().strip() or None
    except (CheckpointError, UnicodeDecodeError, OSError):
        return None


def _matches(path: Path, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    return [match for entry in path.iterdir() if (match := pattern.fullmatch(entry.name))]


def optimizer_files(path: Path, inner: str) -> list[str]:
    """Names by rank, after checking that there is one of each rank."""
    by_rank: dict[int, str] = {}
    for match in sorted(_matches(path / inner, _OPTIMIZER_FILE), key=lambda match: int(match[1])):
        rank = int(match[1])
        if int(match[2]):
            raise CheckpointError(
                f"{path / inner / match[0]} is of a model that is split by tensor parallelism, which is not read; "
                "merge it with DeepSpeed's ds_to_universal first."
            )
        if rank in by_rank:
            raise CheckpointError(f"{path / inner} has two files of rank {rank}: {by_rank[rank]} and {match[0]}.")
        if rank != len(by_rank):
            raise CheckpointError(f"{path / inner} has {match[0]}, but no optimizer file of rank {len(by_rank)}.")
        by_rank[rank] = match[0]
    return [_joined(inner, name) for name in by_rank.values()]


def model_files(path: Path, inner: str, zero: Zero) -> list[str]:
    """One file up to stage 2, one a rank in stage 3."""
    names = {int(match[1] or 0): match[0] for match in _matches(path / inner, _MODEL_FILE) if not int(match[2])}
    wanted = range(zero.world_size if zero.stage == 3 else 1)
    for rank in wanted:
        if rank not in names:
            raise CheckpointError(
                f"{path / inner} has no model states of rank {rank}; {len(wanted)} such files are needed."
            )
    return [_joined(inner, names[rank]) for rank in wanted]


def _joined(inner: str, name: str) -> str:
    return name if inner == "." else f"{inner}/{name}"


def read_state(root: Path, file: str) -> State:
    where = member(root, file)
    content = read_torch_file(where)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{where} holds a {type(content).__name__}, not the state of a DeepSpeed engine.")
    return State(file, where, content)


def check_ranks(directory: Path, states: Sequence[State], zeros: Sequence[Zero]) -> None:
    for state, zero in zip(states, zeros, strict=True):
        if (zero.stage, zero.world_size) != (zeros[0].stage, zeros[0].world_size):
            raise CheckpointError(
                f"{state.where} is of ZeRO stage {zero.stage} on {zero.world_size} ranks, but rank 0's file is of "
                f"stage {zeros[0].stage} on {zeros[0].world_size}: these are files of different saves."
            )
        if len(zero.groups) != len(zeros[0].groups):
            raise CheckpointError(
                f"{state.where} has {len(zero.groups)} parameter groups; rank 0 has {len(zeros[0].groups)}."
            )
    if zeros[0].world_size != len(zeros):
        raise CheckpointError(
            f"{directory} has the optimizer files of {len(zeros)} ranks, but {zeros[0].world_size} ranks wrote it."
        )


def zero_of(state: State) -> Zero:
    held = state.content.get("optimizer_state_dict")
    if not isinstance(held, Mapping) or "zero_stage" not in held:
        raise CheckpointError(f"{state.where} has no ZeRO optimizer state.")
    stage = held["zero_stage"]
    stage = stage.arguments[0] if isinstance(stage, Record) and stage.arguments else stage
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{state.where} is of ZeRO stage {str(stage)[:20]!r}; 1 to 3 are read.")
    size = held.get("partition_count")
    size = max(size, default=0) if isinstance(size, list) and all(type(n) is int for n in size) else size
    groups = held.get("single_partition_of_fp32_groups" if stage <= 2 else "fp32_flat_groups")
    if type(size) is not int or not isinstance(groups, (list, tuple)):
        raise CheckpointError(f"{state.where} does not say how its ZeRO optimizer was partitioned.")
    found = [segment(state, f"group {number}", group, "F32") for number, group in enumerate(groups)]
    return Zero(stage, size, found, _paddings(state, held.get("param_alignment_paddings")))


def _paddings(state: State, value: Any) -> list[tuple[int, ...]] | None:
    if value is None:
        return None
    try:
        return [counts(group, 1 << 20) for group in value]
    except TypeError as error:
        raise CheckpointError(f"{state.where} has paddings of parameters that are none: {error}.") from None


def segment(state: State, name: str, tensor: Any, dtype: str) -> Segment:
    plain = readable(tensor, name, state.where)
    if (
        not isinstance(plain, StoredTensor)
        or plain.dtype != dtype
        or piece_of("", plain, plain.shape).codec is not None
    ):
        raise CheckpointError(f"{state.where}: {name} is no flat tensor of {dtype}.")
    return Segment(state.file, plain.start, plain.num_elements)
