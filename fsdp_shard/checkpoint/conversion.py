"""`convert`: the weights of any checkpoint that can be read, written in another layout, size or dtype.

Plans every file first, then streams; imports neither torch nor transformers unless it casts or reads GGUF. The target
appears complete or not at all.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.config import DEFAULT_SHARD_SIZE, ConvertConfig
from fsdp_shard.checkpoint.digests import chunk_digest, record_file, tensor_digest
from fsdp_shard.checkpoint.formats.registry import recognize, writer
from fsdp_shard.checkpoint.index import Span, TensorIndex
from fsdp_shard.checkpoint.io import atomicity
from fsdp_shard.checkpoint.io.dtypes import CASTABLE, TensorSpec, from_torch_name, torch_name
from fsdp_shard.checkpoint.keys.tied_weights import absent_ties, stored_twice, with_own_head
from fsdp_shard.checkpoint.lora_merge import open_weights
from fsdp_shard.checkpoint.model_files import carried_names, carry, names_in, side_bytes
from fsdp_shard.checkpoint.open import here, open_checkpoint
from fsdp_shard.checkpoint.steps.file_plan import DCP_METADATA, INDEX_FILE, TargetPlan, WriteRequest
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, FileRecord, Manifest, TensorRecord
from fsdp_shard.checkpoint.transfer import Move, Progress, compare_with, move_tensors
from fsdp_shard.errors import CheckpointError, SaveError
from fsdp_shard.utils import check, parse_size, peak_resident_bytes

_WEIGHTS = frozenset({".safetensors", ".distcp", ".bin", ".pt", ".pth", ".gguf"})
_STATES = ("optimizer", "scheduler", "rng_state", "training_args", "scaler")  # what trainers have beside weights


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. `num_bytes` of weights as written; `peak_memory_bytes` of the whole process.

    `left_out` counts the tensors that are no weights and stay behind, by kind: `optimizer`, `adapter`, `other`.
    """

    source_format: str
    target_format: str
    num_tensors: int
    num_bytes: int
    seconds: float
    peak_memory_bytes: int
    verified: bool
    left_out: dict[str, int]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    format: str = "huggingface",
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    ranks: int | None = None,
    dtype: Any = None,
    verify: bool = True,
    overwrite: bool = False,
    nest: str | None = None,
    sync: bool = True,
    base: str | Path | None = None,
) -> ConvertReport:
    """Write the checkpoint at `source` to the directory `target`; see ConvertConfig for the settings.

    `dtype` is None or "keep", a name such as "bfloat16", or a torch dtype. Raises CheckpointError when the source is
    damaged, ConfigError or CheckpointError when the target cannot be, SaveError when writing failed; in each case
    nothing is left at the target but what was there before.
    """
    start = time.perf_counter()
    wanted = None if dtype is None or dtype == "keep" else str(dtype).removeprefix("torch.")
    settings = ConvertConfig(
        source=str(source),
        target=str(target),
        format=format,
        max_shard_size=str(max_shard_size),
        ranks=ranks,
        nest=nest,
        dtype=wanted or "keep",
        verify=verify,
        overwrite=overwrite,
        sync=sync,
        base=None if base is None else str(base),
    )
    check(settings)
    place = Path(target).expanduser().absolute()
    with open_weights(here(source), base) as stored, _to_write(stored, format) as index:
        _refuse_part(index)
        _check_target(place, index, overwrite)
        plan = plan_conversion(index, settings, _ties(index, format))
        stamps = _stamps(index)
        room = plan.target.num_bytes + side_bytes(index)
        with atomicity.new_directory(place, room, replace=overwrite, sync=sync) as temporary:
            _write(index, plan, temporary, verify=verify, sync=sync)
            if _stamps(index) != stamps:
                raise CheckpointError(
                    f"{index.place} was changed while it was converted, so what was read may be of two saves; nothing "
                    "was kept."
                )
    return ConvertReport(
        source_format=index.format,
        target_format=format,
        num_tensors=len(plan.moves),
        num_bytes=sum(move.target.num_bytes for move in plan.moves),
        seconds=time.perf_counter() - start,
        peak_memory_bytes=peak_resident_bytes(),
        verified=verify,
        left_out={kind: extra.num_tensors for kind, extra in index.extras.items()},
    )


@dataclass(frozen=True)
class ConversionPlan:
    """Everything that will be written but for side files, and what moves where; pure data."""

    target: TargetPlan
    moves: tuple[Move, ...]
    aliases: Mapping[str, str]


def plan_conversion(index: TensorIndex, settings: ConvertConfig, aliases: Mapping[str, str]) -> ConversionPlan:
    """Plan the target's files and where each range of each tensor goes. Reads nothing, writes nothing.

    `aliases` {tied name: kept name} are not written a second time.
    """
    if not index.tensors:
        raise CheckpointError(f"{index.root} has no tensors, so there is nothing to convert.")
    kept = [entry for name, entry in index.tensors.items() if name not in aliases]
    specs = [_target_spec(entry.spec, settings.dtype) for entry in kept]
    limit = parse_size(settings.max_shard_size, "max_shard_size")
    phases = {spec.name: spans[0].start for spec in specs if (spans := _copied(index, spec))}
    request = WriteRequest(limit, settings.ranks, index.step, aliases, settings.nest, phases)
    target = writer(settings.format).plan(specs, request)
    moves = [Move(spec, index.tensors[spec.name].dtype, target.extents[spec.name]) for spec in specs]
    return ConversionPlan(target, tuple(moves), aliases)


def _copied(index: TensorIndex, target: TensorSpec) -> list[Span] | None:
    """Where the first element of a tensor lies that keeps its dtype."""
    if target.dtype != index.tensors[target.name].dtype or not target.num_elements:
        return None
    return index.places(target.name, 0, 1) if index.is_in_long_runs(target.name) else None


def _to_write(index: TensorIndex, format: str) -> TensorIndex:
    """`index` with a tensor of each name that readers of `format` look for."""
    return index if writer(format).LISTS_TIED_NAMES else with_own_head(index, index.side or index.root)


def _ties(index: TensorIndex, format: str) -> dict[str, str]:
    """Every tied name that can be known: {alias: kept}."""
    side = index.side or index.root
    aliases = index.aliases | stored_twice(index, side)
    return aliases | absent_ties(index, side) if writer(format).LISTS_TIED_NAMES else aliases


def _target_spec(spec: TensorSpec, dtype: str) -> TensorSpec:
    if dtype == "keep" or spec.dtype not in CASTABLE:
        return spec
    return TensorSpec(spec.name, from_torch_name(dtype), spec.shape)


def _write(index: TensorIndex, plan: ConversionPlan, root: Path, *, verify: bool, sync: bool) -> None:
    """Fill the temporary directory `root`."""
    total = sum(move.target.num_bytes for move in plan.moves) * (2 if verify else 1)
    source = index.manifest()
    expected = {name: record.chunks for name, record in source.tensors.items()} if source else {}
    # The manifest is of what is stored: not of what an adapter makes of it.
    changed = {name for name, entry in index.tensors.items() if any(piece.codec for piece in entry.pieces)}
    expected = {name: chunks for name, chunks in expected.items() if name not in changed}
    for name, content in plan.target.small_files.items():
        (root / name).write_bytes(content)
    names = carry(index, root, _written_dtype(plan))
    with _progress(total) as progress:
        chunks = move_tensors(index, plan.moves, plan.target.files, root, expected, progress, sync=sync)
        _write_manifest(index, plan, root, names, chunks)
        if verify:
            with open_checkpoint(root) as written:
                problem = compare_with(written, chunks, progress)
            if problem is not None:
                raise SaveError(f"{problem}; the disk or the memory of this machine is at fault. Nothing was kept.")
    if sync:
        for name in [*names, MANIFEST]:
            atomicity.fsync_file(root / name)
        atomicity.fsync_tree(root)


def _written_dtype(plan: ConversionPlan) -> str | None:
    """torch's name of the floating-point type that takes most bytes; None if there is none."""
    sizes: Counter[str] = Counter()
    for move in plan.moves:
        if move.target.dtype in CASTABLE:
            sizes[move.target.dtype] += move.target.num_bytes
    return torch_name(sizes.most_common(1)[0][0]) if sizes else None


def _write_manifest(
    index: TensorIndex, plan: ConversionPlan, root: Path, names: list[str], chunks: Mapping[str, list[bytes]]
) -> None:
    files = {name: record_file(root / name) for name in names}
    for file in plan.target.files:
        files[file.name] = FileRecord(file.num_bytes, header_digest=chunk_digest(file.header).hex())
    tensors = {}
    for move in plan.moves:
        spec = move.target
        parts = chunks[spec.name]
        digest = tensor_digest(spec.dtype, spec.shape, parts)
        tensors[spec.name] = TensorRecord(spec.dtype, spec.shape, digest, tuple(chunk.hex() for chunk in parts))
    manifest = Manifest(plan.target.layout, index.step, plan.target.world_size, {}, files, tensors, dict(plan.aliases))
    (root / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _stamps(index: TensorIndex) -> dict[str, tuple[int, int, int]]:
    """What shows whether a source file is still the same: its inode, size and time of change."""
    files = {piece.file for entry in index.tensors.values() for piece in entry.pieces}
    found = {name: (index.root / name).stat() for name in sorted(files)}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def _refuse_part(index: TensorIndex) -> None:
    part = re.search(r"-\d{5}-of-(\d{5})\.safetensors$", index.file.name if index.file else "")
    if part is not None and int(part[1]) > 1:
        raise CheckpointError(
            f"{index.file} is one of {int(part[1])} files that hold a model together; give their directory."
        )


def _check_target(target: Path, index: TensorIndex, overwrite: bool) -> None:
    """Refuse a target that would destroy something, or that `overwrite` was not given for."""
    atomicity.recover(target)
    if index.root.resolve().is_relative_to(target.resolve()) and index.root.resolve() != target.resolve():
        raise CheckpointError(f"{target} contains the source {index.root}; give another target.")
    if target.is_symlink() or os.path.ismount(target):
        kind = "a link" if target.is_symlink() else "a mount point"
        raise CheckpointError(f"{target} is {kind}, whose name no directory can take; give a target below it.")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already; give another target, or overwrite=true to replace it.")
    if not target.is_dir() or recognize(target) is None:
        raise CheckpointError(
            f"{target} exists and is not a checkpoint directory, so overwrite=true does not replace it."
        )
    if foreign := _foreign(target, carried_names(index)):
        some = ", ".join(foreign[:4]) + (f" and {len(foreign) - 4} more" if len(foreign) > 4 else "")
        raise CheckpointError(
            f"{target} holds {some} beside its weights, which overwrite=true would delete; move that away, or give "
            "another target."
        )


def _foreign(target: Path, carried: Collection[str]) -> list[str]:
    """What lies in a checkpoint directory and is neither weights nor written anew, as `carried` files are."""
    extras: list[str] = []
    try:
        with open_checkpoint(target) as index:
            known = {piece.file for entry in index.tensors.values() for piece in entry.pieces}
            extras = [f"{extra.num_tensors} {kind} tensors" for kind, extra in index.extras.items()]
    except CheckpointError:  # a damaged checkpoint may be replaced too: then its files are known by their names
        files = (entry.name for entry in target.iterdir() if entry.suffix in _WEIGHTS and not entry.is_dir())
        known = {name for name in files if not name.startswith(_STATES)}
    known |= {MANIFEST, INDEX_FILE, DCP_METADATA, "pytorch_model.bin.index.json", *carried}
    return extras + [name for name in names_in(target) if name not in known]


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """Something to tell the bytes done to: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=total, unit="B", unit_scale=True, desc="convert", leave=False) as bar:
        yield _locked(lock, bar.update)


def _locked(lock: threading.Lock, update: Callable[[int], object]) -> Progress:
    def call(num_bytes: int) -> None:
        with lock:
            update(num_bytes)

    return call
