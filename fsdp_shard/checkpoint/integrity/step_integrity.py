"""Compares a step directory with its manifest, before a run resumes from it or after it was saved.

`check_files` is cheap: it checks the size of every file and the content of small ones. `check_content` reads all bytes,
each rank a part. Both raise at the first problem.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from fsdp_shard.checkpoint import digests
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import in_threads, member
from fsdp_shard.checkpoint.model_files import is_model_file
from fsdp_shard.checkpoint.open import open_weights
from fsdp_shard.checkpoint.steps.file_plan import parse_shard_name
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import open_regular

_SMALL_BYTES = 16 << 20
_SPREAD = 0x9E3779B1  # a prime, whose multiples spread evenly over any number of parts

Job = Callable[[], None]  # a check of some bytes


def check_files(directory: Path) -> Manifest:
    """Check that a step has all of its files in full size.

    Small files are also compared with their digests: config, tokenizer and trainer state are read before the rest.

    Args:
        directory: The step directory.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: A file is missing or damaged (the first one is named), or there is no manifest.
    """
    manifest = _manifest(directory)
    for name, record in manifest.files.items():
        _check_size(directory, name, record)
        if record.digest is not None and record.size <= _SMALL_BYTES:
            _check_file(member(directory, name), record)
    return manifest


def _manifest(directory: Path) -> Manifest:
    manifest = read_manifest(directory)
    if manifest is None:
        raise CheckpointError(f"{directory} has no manifest of fsdp-shard, so it cannot be checked.")
    return manifest


def _check_size(directory: Path, name: str, record: FileRecord) -> None:
    path = member(directory, name)
    if (size := path.stat().st_size) != record.size:
        raise CheckpointError(f"{path} has {size} bytes, but {record.size} were written: the checkpoint is damaged.")


def check_side_files(files: Mapping[str, Path]) -> None:
    """Compare config, tokenizer and other model files with the manifests of their directories, if there are any.

    Args:
        files: Name in the directory -> path.

    Raises:
        CheckpointError: A file was changed; the first one is named.
    """
    manifests: dict[Path, Manifest | None] = {}
    for name, path in files.items():
        root = path.parents[name.count("/")]
        if root not in manifests:
            manifests[root] = read_manifest(root)
        manifest = manifests[root]
        record = None if manifest is None else manifest.files.get(name)
        if record is not None and record.digest is not None and digests.file_digest(path) != record.digest:
            raise _changed_error(path, "is not what was written")
    for root, manifest in manifests.items():
        for name in manifest.files if manifest is not None else ():
            if is_model_file(name) and name not in files and not (root / name).exists():
                raise _changed_error(root / name, "is missing")


def _changed_error(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {how}, according to the {MANIFEST} of the checkpoint. Restore it; or, if the change is yours, give a "
        "directory with the files as you want them as config=PATH and tokenizer=PATH."
    )


def check_content(directory: Path, part: int = 0, num_parts: int = 1) -> None:
    """Compare one part of a step's bytes with their digests; the first part includes `check_files`.

    Args:
        directory: The step directory.
        part: Number of the part to read, such as the rank.
        num_parts: Number of parts, about equally large, each from few rank files. With as many parts as ranks wrote
            the step, each is about the file of the rank of its number. The first part includes all small tensors.

    Raises:
        CheckpointError: Bytes are damaged; names the first file and range.
    """
    manifest = _manifest(directory) if part else check_files(directory)
    with open_weights(directory) as index:
        jobs = [*_file_jobs(directory, manifest, part, num_parts), *_tensor_jobs(index, manifest, part, num_parts)]
        in_threads(_run, jobs)


def drop_cache(directory: Path, rank: int) -> None:
    """Evict a rank's files of a step from its page cache, as far as the system allows, to read them from disk."""
    for name in _manifest(directory).files:
        parsed = parse_shard_name(PurePosixPath(name).name)
        if parsed is None or parsed[0] == rank:
            with os.fdopen(open_regular(member(directory, name)), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(jobs: Iterator[Job]) -> None:
    for check in jobs:
        check()


def _file_jobs(directory: Path, manifest: Manifest, part: int, num_parts: int) -> Iterator[Job]:
    for number, (name, record) in enumerate(manifest.files.items()):
        parsed = parse_shard_name(PurePosixPath(name).name)
        reader = number % num_parts if parsed is None else parsed[0] * num_parts // parsed[1]
        if reader == part and (record.header_digest is not None or record.size > _SMALL_BYTES):
            yield partial(_check_member, directory, name, record)


def _check_member(directory: Path, name: str, record: FileRecord) -> None:
    _check_size(directory, name, record)
    _check_file(member(directory, name), record)


def _check_file(path: Path, record: FileRecord) -> None:
    found = digests.header_digest(path) if record.digest is None else digests.file_digest(path)
    if found != (record.header_digest if record.digest is None else record.digest):
        what = "the header of " if record.digest is None else ""
        raise CheckpointError(f"{what}{path} is not what was written: the checkpoint is damaged.")


def _tensor_jobs(index: TensorIndex, manifest: Manifest, part: int, num_parts: int) -> Iterator[Job]:
    for number, entry in enumerate(index.tensors.values()):
        chunks, total = manifest.tensors[entry.name].chunks, digests.num_chunks(entry.num_bytes)
        if entry.num_bytes <= digests.SMALL_BYTES:
            first, stop = 0, total if part == 0 else 0
        else:
            # Like rows over ranks. Tensors with fewer chunks than parts each begin at a different part.
            shift = number * _SPREAD % num_parts
            first, stop = (-(-(edge * total - shift) // num_parts) for edge in (part, part + 1))
        for start in range(first, stop, digests.JOB_CHUNKS):
            yield partial(_check, index, entry.name, range(start, min(start + digests.JOB_CHUNKS, stop)), chunks)


def _check(index: TensorIndex, name: str, numbers: range, expected: Sequence[str]) -> None:
    for number, digest in zip(numbers, digests.read_chunk_digests(index, name, numbers), strict=True):
        if digest.hex() != expected[number]:
            where = digests.describe_chunk(index, name, number)
            raise CheckpointError(f"{where} is not what was written: the checkpoint is damaged.")
