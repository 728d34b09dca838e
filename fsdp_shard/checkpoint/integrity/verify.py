"""`verify`: every byte of a checkpoint against the digests in its manifest, or against another checkpoint.

Where there is neither, what can be checked without: structure, config.json against the shapes, NaN and infinities.
Imports no torch, unless two checkpoints hold a tensor in different dtypes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from fsdp_shard.checkpoint.digests import file_digest, frame_digest, header_digest
from fsdp_shard.checkpoint.formats import trainer_layouts
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity import compare
from fsdp_shard.checkpoint.integrity.config_shapes import config_problems
from fsdp_shard.checkpoint.integrity.non_finite import DTYPES
from fsdp_shard.checkpoint.integrity.scan import Scan, damage, non_finite, scan
from fsdp_shard.checkpoint.integrity.verify_report import Place, Problem, VerifyReport
from fsdp_shard.checkpoint.io.dtypes import itemsize
from fsdp_shard.checkpoint.io.files import has_file, member, read_json
from fsdp_shard.checkpoint.open import here, open_checkpoint
from fsdp_shard.checkpoint.steps.manifest import FileRecord, Manifest, read_manifest
from fsdp_shard.errors import CheckpointError

_CONFIG = "config.json"


def verify(path: str | Path, against: str | Path | None = None) -> VerifyReport:
    """Check a checkpoint: its structure, and every byte against the digests of its manifest where it has one.

    Without a manifest: NaN and infinities, and config.json against the shapes. With `against`, the contents of the two
    checkpoints are compared instead, in whatever format, layout and floating-point dtype each is; a manifest that
    either has is checked too.

    Raises nothing for a damaged checkpoint: all that is wrong is in `problems`, each with file, tensor and bytes. Only
    a path where there is nothing at all is a CheckpointError.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        one = _Checkpoint(here(path), stack)
        two = None if against is None else _Checkpoint(here(against), stack)
        one.open()
        num_cast = 0
        if two is None:
            one.check_alone()
        else:
            two.open()
            num_cast = _compare(one, two)
        problems = [*one.problems, *(two.problems if two else ())]
        index = one.index
        return VerifyReport(
            path=str(path),
            format=index.format if index else None,
            num_tensors=len(index.tensors) if index else 0,
            num_bytes=index.num_bytes if index else 0,
            content_checked=one.manifest is not None and index is not None,
            seconds=time.perf_counter() - start,
            problems=tuple(problems),
            checked=tuple(one.checked),
            against=None if against is None else str(against),
            num_cast=num_cast,
            not_read=tuple(index.extras) if index else (),
        )


class _Checkpoint:
    """One checkpoint while it is checked. What goes wrong with it is added to `problems`, never raised."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        if not path.exists():
            raise CheckpointError(f"{path} does not exist; give a checkpoint file, a directory, or a run directory.")
        self.path, self._stack = path, stack
        self.problems: list[Problem] = []
        self.checked: list[str] = []
        self.manifest: Manifest | None = None
        self.index: TensorIndex | None = None

    def open(self) -> None:
        """Structure: the files of the manifest, the headers, and what lies in weight files around the tensors."""
        try:
            self._read_manifest(trainer_layouts.resolve(self.path))
            self.index = self._stack.enter_context(open_checkpoint(self.path))
            if self.manifest is None:
                self._read_manifest(self.index.root)  # what `path` leads to may lie deeper
            self.checked.append("structure")
            if self.manifest is not None:
                known = {problem.file for problem in self.problems}
                self.problems += _frame_problems(self.index, self.manifest, known)
        except (CheckpointError, OSError) as error:
            self._fail(error)

    def _read_manifest(self, root: Path) -> None:
        """Take the manifest of `root`, if it has one, and look at the files that it lists."""
        self.manifest = read_manifest(root) if self.path.is_dir() else None
        if self.manifest is not None:
            self.problems += _file_problems(root, self.manifest)

    def check_alone(self) -> None:
        """The content, as far as it can be known."""
        if self.index is not None and not self.index.tensors:
            self.problems.append(Problem(f"{self.index.place} has no tensors.", ()))
        if self.index is not None and self.manifest is None:
            self._check_config(self.index)
        self.read((), searches=self.manifest is None)

    def read(self, digested: Collection[str], *, searches: bool) -> Scan:
        """Read what has to be read, once: all that the manifest has digests of, and the tensors `digested`.

        `searches` says whether to look for NaN and infinities.
        """
        if self.index is None:
            return Scan()
        if self.manifest is not None:
            digested = self.index.names
        tensors = self.index.tensors.values()
        searched = {entry.name for entry in tensors if entry.dtype in DTYPES} if searches else set[str]()
        try:
            found = scan(self.index, digested, searched)
        except (CheckpointError, OSError) as error:
            self._fail(error)
            return Scan()
        if self.manifest is not None:
            self.problems += damage(self.index, self.manifest, found)
        if searches:
            self.checked.append("NaN and infinities")
            self.problems += non_finite(self.index, found)
        return found

    def _check_config(self, index: TensorIndex) -> None:
        side = index.side or index.root
        if not self.path.is_dir() or not has_file(side, _CONFIG):
            return  # of one file among several nothing is known of the others
        try:
            path = member(side, _CONFIG)
            config = read_json(path)
            if not isinstance(config, dict):
                raise CheckpointError(f"{path} is not a JSON object, so it is no model's config.")
        except CheckpointError as error:
            self.problems.append(Problem(str(error), (Place(_CONFIG),)))
            return
        self.checked.append(_CONFIG)
        tied = {name: index.entry(name).shape for name in index.aliases}
        self.problems += [
            Problem(f"{path} does not fit the weights: {text}", (Place(_CONFIG),))
            for text in config_problems(config, index.shapes | tied)
        ]

    def _fail(self, error: Exception) -> None:
        if not self.problems:  # else the file that is behind it is named already
            self.problems.append(Problem(str(error)))


def _compare(one: _Checkpoint, two: _Checkpoint) -> int:
    """Compare the contents of two checkpoints; what differs is a problem of the first. How many tensors were cast."""
    if one.index is None or two.index is None:
        return 0
    pairs, problems = compare.described_differences(one.index, two.index, compare.match(one.index, two.index))
    alike = [pair for pair in pairs if pair.is_same_dtype]
    found = (
        one.read({pair.one.name for pair in alike}, searches=False),
        two.read({pair.two.name for pair in alike}, searches=False),
    )
    one.problems += problems
    for pair in pairs:
        if pair.is_same_dtype and (problem := compare.first_difference(one.index, two.index, pair, *found)):
            one.problems.append(problem)
    cast = [pair for pair in pairs if not pair.is_same_dtype]
    try:
        one.problems += compare.cast_differences(one.index, two.index, cast)
    except (CheckpointError, OSError) as error:
        one.problems.append(Problem(str(error)))
    return len(cast)


def _file_problems(root: Path, manifest: Manifest) -> Iterator[Problem]:
    """What is wrong with files as a whole."""
    for name, record in manifest.files.items():
        try:
            path = member(root, name)
            size = path.stat().st_size
            if size != record.size:
                yield Problem(f"{path} has {size} bytes, but {record.size} were written.", (Place(name),))
            elif record.digest is not None and file_digest(path) != record.digest:
                yield Problem(f"{path} does not have the content that was written.", (Place(name, 0, size),))
            elif _has_other_header(path, record):
                yield Problem(f"the header of {path} is not the one that was written.", (Place(name),))
        except CheckpointError as error:
            yield Problem(str(error), (Place(name),))


def _has_other_header(path: Path, record: FileRecord) -> bool:
    """Of a safetensors file, which says itself where its tensors begin: so this is known even if it opens no more."""
    is_safetensors = path.suffix == ".safetensors"
    return is_safetensors and record.header_digest is not None and header_digest(path) != record.header_digest


def _frame_problems(index: TensorIndex, manifest: Manifest, known: Collection[str | None]) -> Iterator[Problem]:
    """Weight files of other formats whose bytes around the tensors are not those that were written."""
    owned: dict[str, list[tuple[int, int]]] = {}
    for entry in index.tensors.values():
        for piece in entry.pieces:
            num_bytes = math.prod(piece.shape) * itemsize(entry.dtype) if piece.codec is None else piece.codec.num_bytes
            owned.setdefault(piece.file, []).append((piece.start, piece.start + num_bytes))
    for name, record in manifest.files.items():
        if record.header_digest is None or name.endswith(".safetensors") or name in known:
            continue
        path = member(index.root, name)
        if frame_digest(path, owned.get(name, ())) != record.header_digest:
            yield Problem(
                f"{path}: the bytes around its tensors, which say what they are, are not those that were written.",
                (Place(name),),
            )
