"""Reads the measurements of a finetune run. Writes nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import (
    CHECKPOINTS,
    CONFIG_FILE,
    OPTIMIZER,
    Manifest,
    StepStore,
    member,
    parse_shard_name,
    read_manifest,
)
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.planning.unplanned import unplanned_settings
from fsdp_shard.training import METRICS, read_rows, read_settings
from fsdp_shard.utils import RESULT, in_yaml, read_json

_LENGTH_BYTES = 8  # of the header of a safetensors file

_FIXED_LENGTH_KINDS = ("text",)


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of a run.

    Attributes:
        path: Its directory.
        device: `cpu` or `cuda`; None of runs that did not record it.
        peaks: The most memory of each rank: allocated on a GPU, or resident in a process.
        before: Resident memory of each rank before the weights were loaded; none of runs that did not record it.
        worst_peak: The most of any rank, of a run that has not ended.
        shard_bytes: The most that a rank has of parameters and buffers.
        optimizer: Bytes of optimizer state in the file of each rank of the latest checkpoint.
        num_saving_ranks: Number of ranks that wrote that checkpoint; None if there is none.
        sequence_length: In tokens.
        step_seconds: The median of the steps after the first.
        not_planned: Settings that a plan does not have, each with the reason.
        resumes: Whether it resumed from a step.
    """

    path: Path
    device: str | None
    peaks: Sequence[int]
    before: Sequence[int]
    worst_peak: int | None
    shard_bytes: int | None
    optimizer: Sequence[int]
    num_saving_ranks: int | None
    sequence_length: int | None
    step_seconds: float | None
    not_planned: Sequence[str]
    resumes: bool

    @property
    def num_ranks(self) -> int | None:
        """Number of its ranks: those that it recorded at its end, or else those of its latest checkpoint."""
        return len(self.peaks) or self.num_saving_ranks


def read_measured(path: Path) -> MeasuredRun:
    """Read the measurements of a run.

    Raises:
        ConfigError: The run has no measurements.
        CheckpointError: A file of the run is damaged.
    """
    result = _read_result(path)
    rows = read_rows(path / METRICS)
    if not result and not rows:
        raise ConfigError(f"{path} has no {RESULT} and no {METRICS}, so it has measured nothing; give another run.")
    loaded = result.get("load")
    seconds = [row["step_seconds"] for row in rows if _is_number(row.get("step_seconds"))]
    length = result.get("sequence_length")
    device = result.get("device")
    step, manifest = _latest_step(path)
    return MeasuredRun(
        path=path,
        device=device if device in ("cpu", "cuda") else None,
        peaks=_counts(result.get("peak_memory_bytes_by_rank")),
        before=_counts(result.get("memory_before_bytes_by_rank")),
        worst_peak=max((row["memory_bytes"] for row in rows if _is_count(row.get("memory_bytes"))), default=None),
        shard_bytes=_count(loaded.get("shard_bytes")) if isinstance(loaded, dict) else None,
        optimizer=[] if manifest is None else _optimizer_bytes(step, manifest),
        num_saving_ranks=None if manifest is None else math.prod(manifest.mesh.values()),
        sequence_length=_count(length),
        step_seconds=statistics.median(seconds[1:] or seconds) if seconds else None,
        not_planned=_not_planned(path / CONFIG_FILE),
        resumes=result.get("resumed_step") is not None,
    )


def _read_result(path: Path) -> dict[str, Any]:
    result = read_json(path / RESULT) if (path / RESULT).is_file() else {}
    if not isinstance(result, dict):
        raise CheckpointError(f"{path / RESULT} is not a map of figures; give another run.")
    return result


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _count(value: Any) -> int | None:
    return value if _is_count(value) else None


def _counts(values: Any) -> list[int]:
    """The values if all are positive numbers, otherwise an empty list."""
    return values if isinstance(values, list) and all(map(_is_count, values)) else []


def _latest_step(path: Path) -> tuple[Path, Manifest | None]:
    """The directory of the latest checkpoint of a run, and its manifest; without a checkpoint there is none."""
    store = StepStore(path / CHECKPOINTS)
    if (latest := store.latest()) is None:
        return path, None
    step = store.path(latest)
    return step, read_manifest(step)


def _optimizer_bytes(step: Path, manifest: Manifest) -> list[int]:
    """Bytes of tensors in the optimizer's files of a step, by rank: their sizes without their headers."""
    found: dict[int, int] = {}
    for name, record in manifest.files.items():
        folder, _, file_name = name.rpartition("/")
        if folder == OPTIMIZER and (shard := parse_shard_name(file_name)):
            with member(step, name).open("rb") as file:
                header = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            found[shard[0]] = record.size - _LENGTH_BYTES - header
    return [found[rank] for rank in sorted(found)]


def _not_planned(file: Path) -> list[str]:
    """The settings of a run that change its memory but are not planned."""
    settings = read_settings(file) or {}
    found = unplanned_settings(partial(_value, settings))
    kind, packing = _value(settings, "data.kind"), _value(settings, "data.packing")
    if kind is not None and kind not in _FIXED_LENGTH_KINDS and not packing:
        found.append(f"data.kind={in_yaml(kind)} (samples may be shorter than data.sequence_length)")
    return found


def _value(settings: Mapping[str, Any], name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
