"""`convert`: writes the weights of any readable checkpoint in another layout, size or dtype.

Plans every file first, then streams. Imports torch and transformers only to cast, to read GGUF, or to compare the
tensors with a config that is passed or seems to tie other tensors. The target appears complete or not at all.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.adapters.adapter_checks import refuse_adapter_within
from fsdp_shard.checkpoint.config import DEFAULT_SHARD_SIZE, ConvertSettings
from fsdp_shard.checkpoint.conversion_checks import (
    check_target,
    refuse_cast,
    refuse_part,
    refuse_plain_config,
    refuse_undecodable,
)
from fsdp_shard.checkpoint.digests import record_file, record_plan, record_tensor
from fsdp_shard.checkpoint.formats.peft import ADAPTER_CONFIG
from fsdp_shard.checkpoint.formats.registry import writer
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity.scan import damage, scan
from fsdp_shard.checkpoint.integrity.step_integrity import check_side_files
from fsdp_shard.checkpoint.io import CASTABLE, TensorSpec, atomicity, from_torch_name, main_dtype, torch_name
from fsdp_shard.checkpoint.keys.dequantized import dequantize as dequantize_weights
from fsdp_shard.checkpoint.keys.kept_dtypes import FLOAT32, kept_in_float32
from fsdp_shard.checkpoint.keys.quantized_weights import (
    quantization,
    torchao_metadata,
)
from fsdp_shard.checkpoint.keys.tied_weights import absent_ties, may_contradict, stored_twice, with_own_head
from fsdp_shard.checkpoint.location import Location, locate
from fsdp_shard.checkpoint.model_files import copy_model_files
from fsdp_shard.checkpoint.open import open_weights
from fsdp_shard.checkpoint.remote.hub_push import HubTarget, open_repository
from fsdp_shard.checkpoint.remote.hub_requests import require_hub
from fsdp_shard.checkpoint.sharded_state.write_shards import Digests
from fsdp_shard.checkpoint.steps.file_plan import TargetPlan, WriteRequest
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, Manifest
from fsdp_shard.checkpoint.steps.retry_if_deleted import retry_if_deleted
from fsdp_shard.checkpoint.transfer import Move, compare_with, move_tensors
from fsdp_shard.errors import CheckpointError, SaveError
from fsdp_shard.models import check_model_config
from fsdp_shard.utils import (
    check,
    check_writable,
    format_count,
    format_size,
    fsync_path,
    peak_resident_bytes,
    report_progress,
    say,
    write_file,
)


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    Example:
        >>> report = fsdp_shard.convert("outputs/run", "model")  # doctest: +SKIP
        >>> report.num_tensors, report.seconds, report.notes  # doctest: +SKIP

    Attributes:
        source_format: Format of the source.
        target_format: Format of the target.
        num_tensors: Number of tensors written.
        num_bytes: Their written size.
        seconds: Duration.
        peak_memory_bytes: Peak resident memory of the process.
        verified: Whether the target was read back and compared.
        left_out: Number of tensors in the source that are not weights, by kind: `optimizer`, `adapter`, `other`.
        notes: Lines about tensors that an adapter's settings drop, that the model of `config=` lacks, or that stay
            in float32.
        source: The converted checkpoint, as in `Location.to_json`: the path of a run may lead to a later step by now.
        warnings: Why the target cannot be loaded, as its config ties other tensors; also printed to standard error.
    """

    source_format: str
    target_format: str
    num_tensors: int
    num_bytes: int
    seconds: float
    peak_memory_bytes: int
    verified: bool
    left_out: dict[str, int]
    notes: tuple[str, ...] = ()
    source: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def describe(self, target: str) -> str:
        """Describe what was converted, dropped and checked; `target` is the directory."""
        left_out = [f"left out: {format_count(count, f'{kind} tensor')}" for kind, count in self.left_out.items()]
        lacking = (
            "no config.json was found with the weights: give config=PATH (a directory or hub id) for a whole model"
        )
        has_config = Path(target).expanduser().joinpath("config.json").exists()
        checked = "read back and compared" if self.verified else "not read back"
        done = f"{target}: {format_count(self.num_tensors, 'tensor')}, {format_size(self.num_bytes)}, {checked}"
        return "\n".join([*self.notes, *left_out, *([] if has_config else [lacking]), done])


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
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
    dequantize: bool = False,
) -> ConvertReport:
    """Write the checkpoint at `source` in another format, file size or dtype to the directory `target`.

    Args:
        source: A checkpoint of any format, a run directory (its latest step), or a hub ID.
        target: The directory to create.
        format: `huggingface` (whole tensors), `sharded` (one file per rank) or `dcp` (torch.distributed.checkpoint).
        max_shard_size: Largest file of the format `huggingface`, such as "2GB".
        ranks: Number of ranks that `sharded` or `dcp` are written for.
        dtype: Type to cast floating-point tensors to, a name such as "bfloat16" or a torch dtype; None to keep theirs.
        verify: Read the target back and compare it.
        overwrite: Replace an existing checkpoint at `target`.
        nest: Key to put the tensors of `dcp` under.
        sync: Wait until everything is on the disk.
        base: The base model of an adapter, a directory or hub id, if it is not where the adapter says.
        config: A model directory or hub id whose config is used, for weights without one.
        tokenizer: A directory or hub id whose tokenizer is used, if the source has none.
        dequantize: Write weights in fp8, fp4 or MXFP4 in floating point: in `dtype`, or config.json's.

    Returns:
        The report. After an error, the target is unchanged.

    Raises:
        ConfigError: The arguments are wrong.
        CheckpointError: The source is damaged, or the target must not be replaced.
        ModelError, RemoteError: The model of a hub id, or what an address leads to, cannot be fetched.
        SaveError: The target could not be written.

    Example:
        >>> convert("outputs/run", "model", max_shard_size="2GB", dtype="bfloat16")
    """
    base, config, tokenizer = (None if path is None else str(path) for path in (base, config, tokenizer))
    settings = ConvertSettings(
        source=str(source), target=str(target), format=format, max_shard_size=str(max_shard_size), ranks=ranks,
        nest=nest, dtype="keep" if dtype is None else str(dtype).removeprefix("torch."), verify=verify,
        overwrite=overwrite, sync=sync, base=base, config=config, tokenizer=tokenizer, dequantize=dequantize,
    )  # fmt: skip
    return run_conversion(settings)


def convert_location(source: Location, target: Path) -> ConvertReport:
    """Convert a located checkpoint to a Hugging Face directory, even if its path leads elsewhere by now.

    Raises:
        CheckpointError: The source is damaged or was deleted, or `target` exists.
        SaveError: The target could not be written.
    """
    settings = ConvertSettings(source=source.path, target=str(target))
    return retry_if_deleted(lambda: source, partial(_convert, settings))


def check_conversion(settings: ConvertSettings) -> None:
    """Raise an error if a setting is wrong, or the target or the hub cannot be written.

    With `push_to`, the source's headers are read and the repository is created if it does not exist, so that no
    conversion is wasted.

    Raises:
        ConfigError: A setting is wrong, the directory of the target cannot be written, there is no token for the hub,
            or the repository is public and the settings do not ask for that.
        CheckpointError, ModelError: With `push_to`: the source cannot be read, has no config, or the target must not be
            replaced.
        RemoteError: The hub rejects the token or the repository, or cannot be reached.

    Example:
        >>> fs.check_conversion(config)  # doctest: +SKIP
    """
    check(settings)
    check_writable(Path(settings.target).expanduser().parent, f"target={settings.target}")
    if settings.push_to is not None:
        require_hub()
        retry_if_deleted(partial(_find, settings), partial(_check, settings))
        say(open_repository(HubTarget(settings.push_to, settings.push_public)))


def run_conversion(settings: ConvertSettings) -> ConvertReport:
    """Convert with the settings of `fsdp-shard convert`; see `convert`.

    Example:
        >>> fs.run_conversion(config).num_tensors  # doctest: +SKIP
        273
    """
    check(settings)
    return retry_if_deleted(partial(_find, settings), partial(_convert, settings))


def _find(settings: ConvertSettings) -> Location:
    return locate(settings.source, base=settings.base, config=settings.config, tokenizer=settings.tokenizer)


def _check(settings: ConvertSettings, source: Location) -> None:
    """Raise the errors that can be detected before anything is written."""
    with source.model_index as stored, _to_write(stored, settings) as index:
        refuse_adapter_within(stored)  # what is left of it is another model, which nobody wants to publish
        _check_source_and_target(settings, source, index)
        _compare_with_given_config(settings, source, index)
        check_model_config(source.config_directory)  # without a config, nobody could load the pushed model


def _check_source_and_target(settings: ConvertSettings, source: Location, index: TensorIndex) -> None:
    target = Path(settings.target).expanduser().absolute()
    refuse_part(index)
    refuse_undecodable(index)
    refuse_plain_config(index, settings.config)
    check_target(target, index, source.model_files if settings.overwrite else None)


def _compare_with_given_config(settings: ConvertSettings, source: Location, index: TensorIndex) -> list[str]:
    """Compare the tensors with a config passed by the user; return lines about those that its model lacks.

    Raises:
        CheckpointError: They belong to another model, so the target could not be loaded.
    """
    if settings.config is None:
        return []
    from fsdp_shard.checkpoint.integrity.load_checks import compare_with_config

    problems, notes = compare_with_config(index, source.expected_config_directory)
    if problems:
        raise CheckpointError(f"config={settings.config} is not the config of {index.path}: {problems[0].message}")
    return notes


def _wrong_ties(settings: ConvertSettings, index: TensorIndex, ties: Mapping[str, str]) -> list[str]:
    """Return the errors of loading if config.json ties different tensors, or none where one is missing.

    They are warnings, as the written config can be corrected. `verify` finds all other errors of loading: building the
    model takes longer than many conversions.
    """
    if settings.config is not None or not may_contradict(index, ties):
        return []
    from fsdp_shard.checkpoint.integrity.load_checks import compare_with_config

    problems, _ = compare_with_config(index, index.model_directory)
    for problem in problems:
        say(f"warning: {problem.message}", sys.stderr)
    return [problem.message for problem in problems]


def _convert(settings: ConvertSettings, source: Location) -> ConvertReport:
    start = time.perf_counter()
    target = Path(settings.target).expanduser().absolute()
    with source.model_index as stored, _to_write(stored, settings) as index:
        _check_source_and_target(settings, source, index)
        notes = _compare_with_given_config(settings, source, index)
        plan, model_files = plan_conversion(index, settings), source.model_files
        warnings = _wrong_ties(settings, index, plan.aliases)
        adapter_config = {ADAPTER_CONFIG: source.weights / ADAPTER_CONFIG} if source.is_adapter else {}
        check_side_files({**model_files, **adapter_config})
        stamps = _stamps(index)  # shows whether a source file changes from here on
        _refuse_damage(index)
        num_bytes = plan.target.num_bytes + sum(path.stat().st_size for path in model_files.values())
        with atomicity.new_directory(target, num_bytes, replace=settings.overwrite, sync=settings.sync) as temporary:
            _write(index, settings, plan, model_files, temporary)
            if changed := sorted(name for name, _ in _stamps(index).items() ^ stamps.items()):
                raise CheckpointError(
                    f"{changed[0]} was changed while it was converted, so what was read may be of two saves; nothing "
                    "was kept."
                )
    return ConvertReport(
        source_format=index.format,
        target_format=settings.format,
        num_tensors=len(plan.moves),
        num_bytes=plan.num_weight_bytes,
        seconds=time.perf_counter() - start,
        peak_memory_bytes=peak_resident_bytes(),
        verified=settings.verify,
        left_out={kind: extra.num_tensors for kind, extra in index.extras.items()},
        notes=(*index.notes, *notes, *plan.notes),
        source=source.to_json(),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True)
class ConversionPlan:
    """The files of the target, and where each range of each tensor goes; pure data."""

    target: TargetPlan
    moves: tuple[Move, ...]
    aliases: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def num_weight_bytes(self) -> int:
        """Written size of all tensors."""
        return sum(move.target.num_bytes for move in self.moves)


def plan_conversion(index: TensorIndex, settings: ConvertSettings) -> ConversionPlan:
    """Plan the files of the target and where each range of each tensor goes, without writing any.

    Args:
        index: The source.
        settings: What to write.

    Raises:
        CheckpointError: The source has no tensors, or some that the target's format cannot describe.
    """
    if not index.tensors:
        raise CheckpointError(f"{index.root} has no tensors, so there is nothing to convert.")
    metadata = torchao_metadata(index)
    if metadata and settings.format != "huggingface":
        raise CheckpointError(
            f"{index.path} is quantized by torchao, whose description of each tensor format={settings.format} cannot "
            f"keep; use format=huggingface."
        )
    aliases = _ties(index, settings.format)
    kept = [entry for name, entry in index.tensors.items() if name not in aliases]
    in_float32, note = kept_in_float32(index, settings.dtype)
    dtypes = [FLOAT32 if entry.name in in_float32 else settings.dtype for entry in kept]
    specs = [_target_spec(entry.spec, dtype) for entry, dtype in zip(kept, dtypes, strict=True)]
    request = WriteRequest(
        max_shard_bytes=settings.max_shard_bytes,
        ranks=settings.ranks,
        step=index.step,
        aliases=aliases,
        nest=settings.nest,
        source_offsets={spec.name: index.spans(spec.name, 0, 1)[0].start for spec in specs if _is_copied(index, spec)},
        metadata=metadata,
    )
    target = writer(settings.format).plan(specs, request)
    moves = tuple(Move(spec, index.tensors[spec.name].dtype, target.extents[spec.name]) for spec in specs)
    return ConversionPlan(target, moves, aliases, notes=() if note is None else (note,))


def _is_copied(index: TensorIndex, target: TensorSpec) -> bool:
    """Return whether a tensor's bytes are copied unchanged, in long runs."""
    entry = index.tensors[target.name]
    return target.dtype == entry.dtype and target.num_elements > 0 and entry.is_in_long_runs


def _to_write(index: TensorIndex, settings: ConvertSettings) -> TensorIndex:
    """Return `index`, dequantized if requested, with a tensor for each name that readers of the format expect."""
    if settings.dequantize:
        index = dequantize_weights(index, None if settings.dtype == "keep" else from_torch_name(settings.dtype))
    else:
        refuse_cast(index, settings.dtype)
    return index if writer(settings.format).LISTS_TIED_NAMES else with_own_head(index)


def _ties(index: TensorIndex, format: str) -> dict[str, str]:
    """Return every tied name that can be known: {alias: kept}."""
    aliases = index.aliases | stored_twice(index)
    return aliases | absent_ties(index, index.model_directory) if writer(format).LISTS_TIED_NAMES else aliases


def _target_spec(spec: TensorSpec, dtype: str) -> TensorSpec:
    if dtype == "keep" or spec.dtype not in CASTABLE:
        return spec
    return TensorSpec(spec.name, from_torch_name(dtype), spec.shape)


def _write(
    index: TensorIndex, settings: ConvertSettings, plan: ConversionPlan, model_files: Mapping[str, Path], root: Path
) -> None:
    """Fill the temporary directory `root`; `model_files` are config and tokenizer, by name."""
    for name, content in plan.target.small_files.items():
        write_file(root / name, content, sync=False)
    names = copy_model_files(model_files, root, _written_dtype(index, plan), is_dequantized=settings.dequantize)
    with report_progress(plan.num_weight_bytes * (2 if settings.verify else 1), "convert", "B") as progress:
        digests = move_tensors(
            index, plan.moves, plan.target.files, root, _known_digests(index), progress, sync=settings.sync
        )
        index.finish_checksums()
        manifest = _manifest(index, plan, root, names, digests)
        write_file(root / MANIFEST, manifest.to_json(), sync=settings.sync)
        if settings.verify:
            with open_weights(root) as written:
                problem = compare_with(written, digests, progress)
            if problem is not None:
                raise SaveError(f"{problem}; the disk or the memory of this machine is at fault. Nothing was kept.")
    if settings.sync:
        for name in names:
            fsync_path(root / name)
        atomicity.sync_directories(root)


def _known_digests(index: TensorIndex) -> dict[str, tuple[str, ...]]:
    """Return the chunk digests in the source's manifest, without tensors that are decoded, as by merging an adapter."""
    manifest = index.manifest()
    if manifest is None:
        return {}
    stored = {name for name, entry in index.tensors.items() if not any(piece.codec for piece in entry.pieces)}
    return {name: record.chunks for name, record in manifest.tensors.items() if name in stored}


def _refuse_damage(index: TensorIndex) -> None:
    """Compare the sources of decoded tensors with the manifests of their files: `move_tensors` does not see them.

    They are read a second time, because digests cover whole chunks and a decoder reads any range.
    """
    for part, names in index.decoded_from():
        known = _known_digests(part)
        if not (names := [name for name in names if name in known]):
            continue
        manifest = part.manifest()
        assert manifest is not None
        if problems := damage(part, manifest, scan(part, names, ())):
            raise CheckpointError(f"{problems[0].message} The checkpoint is damaged, so it is not converted.")


def _written_dtype(index: TensorIndex, plan: ConversionPlan) -> str | None:
    """Return torch's name of the floating-point type with the most bytes; None if there is none.

    Also None for quantized weights: those bytes may be scales, and config.json has the dtype of the computation.
    """
    if quantization(index) is not None:
        return None
    dtype = main_dtype((move.target.dtype, move.target.num_bytes) for move in plan.moves)
    return None if dtype is None else torch_name(dtype)


def _manifest(index: TensorIndex, plan: ConversionPlan, root: Path, names: list[str], digests: Digests) -> Manifest:
    files = {name: record_file(root / name) for name in names}
    files |= {file.name: record_plan(file) for file in plan.target.files}
    tensors = {move.target.name: record_tensor(move.target, digests[move.target.name]) for move in plan.moves}
    return Manifest(
        layout=plan.target.layout,
        step=index.step,
        world_size=plan.target.world_size,
        files=files,
        tensors=tensors,
        aliases=dict(plan.aliases),
    )


def _stamps(index: TensorIndex) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and modification time of each source file, an adapter's too, to detect changes."""
    paths = {path for read in (index, *(part for part, _ in index.decoded_from())) for path in read.files()}
    found = {str(path): path.stat() for path in paths}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}
