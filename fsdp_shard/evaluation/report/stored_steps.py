"""A run's checkpoints for a report: size, digest, why each is kept, and how ranks share the newest one."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from fsdp_shard.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    Manifest,
    StepStore,
    has_listed_files,
    locate,
    member,
    parse_shard_name,
    read_manifest,
)
from fsdp_shard.errors import FsdpShardError, InputError
from fsdp_shard.utils import read_bounded

_MAX_PIECES = 200_000  # of the shard map
_DIGEST = re.compile(rb'"digest": "([0-9a-f]{32})"\s*}\s*$')


@dataclass(frozen=True)
class ReportedStep:
    """A committed step.

    Attributes:
        path: Its directory.
        step: Its number.
        layout: `gathered` or `sharded`.
        num_ranks: Number of ranks that wrote it.
        num_bytes: Size of all its files, according to its manifest.
        optimizer_bytes: The part of it that is optimizer state.
        digest: The digest at the end of its manifest, which covers all digests in it.
        kept: Why retention keeps it: `latest`, `best`, `last 2`, `every 100`.
        is_complete: Whether each file exists with its recorded size.
        rank_bytes: Bytes of weights in each rank's file, if sharded.
        rank_optimizer_bytes: The same for optimizer state.
    """

    path: Path
    step: int
    layout: str
    num_ranks: int
    num_bytes: int
    optimizer_bytes: int
    digest: str
    kept: tuple[str, ...]
    is_complete: bool
    rank_bytes: tuple[int, ...]
    rank_optimizer_bytes: tuple[int, ...]


def read_steps(root: Path, settings: Mapping[str, str], problems: list[str]) -> list[ReportedStep]:
    """Read the manifests of a run's committed steps.

    Args:
        root: RUN_DIR/checkpoints, which need not exist.
        settings: The settings of the run, which define retention.
        problems: Receives sentences about unreadable data.
    """
    store, found = StepStore(root), []
    try:
        steps, best = store.steps(), store.best()
    except OSError as error:
        problems.append(f"{root} cannot be read: {error.strerror}.")
        return []
    for step in steps:
        kept = _reasons(steps, step, best, settings)
        try:
            found.append(_read_step(store.path(step), step, kept))
        except (InputError, OSError) as error:
            if store.path(step).exists():  # a running run may have just deleted it
                problems.append(f"{store.path(step)} is left out: {error}")
    damaged = [one for one in found if not one.is_complete]
    problems += [f"{one.path} lacks files of its manifest, or has them in another size." for one in damaged]
    return found


def _reasons(steps: Sequence[int], step: int, best: int | None, settings: Mapping[str, str]) -> tuple[str, ...]:
    reasons = ["latest"] if step == steps[-1] else []
    if step == best:
        reasons.append("best")
    last, every = (settings.get(f"checkpoint.{name}", "") for name in ("keep_last", "keep_every"))
    if last.isdecimal() and step in steps[-int(last) :]:
        reasons.append(f"last {last}")
    if every.isdecimal() and int(every) and step % int(every) == 0:
        reasons.append(f"every {every}")
    return tuple(reasons)


def _read_step(path: Path, step: int, kept: tuple[str, ...]) -> ReportedStep:
    state = os.stat(path / MANIFEST)
    manifest, digest = _read_manifest(path, state.st_mtime_ns, state.st_size)
    sizes = {name: record.size for name, record in manifest.files.items()}
    optimizer = {name: size for name, size in sizes.items() if name.startswith(f"{OPTIMIZER}/")}
    return ReportedStep(
        path=path,
        step=step,
        layout=manifest.layout,
        num_ranks=manifest.world_size,
        num_bytes=sum(sizes.values()),
        optimizer_bytes=sum(optimizer.values()),
        digest=digest,
        kept=kept,
        is_complete=has_listed_files(path, manifest),
        rank_bytes=_by_rank(sizes, ""),
        rank_optimizer_bytes=_by_rank(sizes, f"{OPTIMIZER}/"),
    )


@lru_cache(maxsize=256)
def _read_manifest(path: Path, modified_ns: int, num_bytes: int) -> tuple[Manifest, str]:
    """The manifest of a step and its digest, read once while the file is unchanged."""
    manifest = read_manifest(path)
    found = _DIGEST.search(read_bounded(member(path, MANIFEST), "metadata_bytes")[-200:])
    if manifest is None or found is None:
        raise InputError(f"{path / MANIFEST} is not a manifest of fsdp-shard.")
    return manifest, found[1].decode()


def _by_rank(sizes: Mapping[str, int], prefix: str) -> tuple[int, ...]:
    """Sizes of the rank files with this prefix, by rank."""
    found = {
        shard[0]: size
        for name, size in sizes.items()
        if name.startswith(prefix) and (shard := parse_shard_name(name.removeprefix(prefix)))
    }
    return tuple(found[rank] for rank in sorted(found))


def shard_map(step: ReportedStep) -> dict[str, list[int]]:
    """The bytes of each block on each of several ranks; empty if there are too many, or they are unreadable.

    A block is the part of names up to their first number (`model.layers.3`), or otherwise the tensor's module.
    """
    if len(step.rank_bytes) < 2:
        return {}
    try:
        tensors = locate(str(step.path), fetch_weights=False).index.tensors
    except (FsdpShardError, OSError):
        return {}
    if len(tensors) * len(step.rank_bytes) > _MAX_PIECES:
        return {}
    blocks: dict[str, Counter[int]] = {}
    for name, entry in tensors.items():
        item_bytes = entry.num_bytes // max(entry.num_elements, 1)
        held = blocks.setdefault(_block(name), Counter())
        for piece in entry.pieces:
            if shard := parse_shard_name(piece.file):
                held[shard[0]] += prod(piece.shape) * item_bytes
    return {name: [held[rank] for rank in range(len(step.rank_bytes))] for name, held in blocks.items()}


def _block(name: str) -> str:
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1] or parts)
