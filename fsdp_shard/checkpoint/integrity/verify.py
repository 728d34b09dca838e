"""`verify`: checks every byte of a checkpoint against the digests in its manifest, or against another checkpoint.

It also checks everything else it can: structure, the CRCs in files of torch, the model of config.json, NaN and
infinities. torch is imported to build that model, or if two checkpoints store a tensor in different dtypes or names.
"""

import math
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from fsdp_shard.checkpoint.adapters.adapter_checks import refuse_adapter_within
from fsdp_shard.checkpoint.digests import file_digest, frame_digest, header_digest, tensor_digest
from fsdp_shard.checkpoint.formats import native_sharded
from fsdp_shard.checkpoint.formats.peft import ADAPTER_CONFIG
from fsdp_shard.checkpoint.formats.trainer_layouts import latest_step_directory
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.integrity import compare
from fsdp_shard.checkpoint.integrity.compared_locations import (
    differences_of_adapters,
    notes_on_bases,
    refuse_unused_base,
)
from fsdp_shard.checkpoint.integrity.load_checks import compare_with_base, compare_with_config
from fsdp_shard.checkpoint.integrity.model_view import under_model_names
from fsdp_shard.checkpoint.integrity.non_finite import DTYPES
from fsdp_shard.checkpoint.integrity.scan import Scan, checksum_problems, damage, non_finite, scan
from fsdp_shard.checkpoint.integrity.verify_report import ByteRange, Problem, VerifyReport, size_problem
from fsdp_shard.checkpoint.io import has_file, itemsize, member
from fsdp_shard.checkpoint.location import Location, local_path, locate
from fsdp_shard.checkpoint.model_files import CONFIG
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, Manifest, read_manifest, read_manifest_of_folder
from fsdp_shard.checkpoint.steps.retry_if_deleted import retry_if_deleted
from fsdp_shard.checkpoint.steps.shard_headers import has_described_headers
from fsdp_shard.checkpoint.steps.shard_index import SHARD_INDEX, read_shard_index
from fsdp_shard.checkpoint.steps.step_store import AVERAGE, OPTIMIZER
from fsdp_shard.errors import CheckpointError


def verify(path: str | Path, against: str | Path | None = None, *, base: str | None = None) -> VerifyReport:
    """Check a checkpoint, alone or against another one.

    Every byte is compared with the digests of the manifest, if there is one; a step's manifest also covers its ema/.
    Without a manifest, the structure, the CRCs in files of torch, NaN and infinities are checked. In either case the
    tensors are compared with the model of config.json, and an adapter's with its settings and its base. With `against`,
    the contents of both are compared across formats, layouts and floating-point dtypes, and the manifests of both are
    checked. If only one is an adapter, it is merged into its base first. If only one stores some name, both are
    compared under the names of the model of config.json.

    Args:
        path: A checkpoint file, directory, run directory or remote address.
        against: Another checkpoint.
        base: Base model of a compared adapter, if it is not at the path in adapter_config.json.

    Returns:
        The report. Its `problems` list every error with file, tensor and bytes.

    Raises:
        CheckpointError: A path does not exist, `base` has no effect, or a compared checkpoint holds an adapter together
            with its base. A damaged checkpoint raises nothing.
        RemoteError: What an address leads to cannot be fetched.

    Example:
        >>> report = fsdp_shard.verify("runs/one")  # doctest: +SKIP
        >>> report.is_sound, report.num_tensors  # doctest: +SKIP
        (True, 272)
    """
    if against is None and base is not None:
        raise CheckpointError(
            f"The base model {base} is for an adapter that is compared with a model; give one, or remove it."
        )
    return retry_if_deleted(lambda: _ComparedPaths(path, against, base), _verify)


class _ComparedPaths:
    """The paths to verify, as a source for `retry_if_deleted`.

    That looks at `weights` after the read to see whether anything was deleted.
    """

    def __init__(self, path: str | Path, against: str | Path | None, base: str | None) -> None:
        self.path, self.against, self.base = path, against, base
        given = [local_path(path), *([] if against is None else [local_path(against)])]
        for each in given:
            if not each.exists():
                raise CheckpointError(f"{each} does not exist; give a file, a directory, or a run directory.")
        self.paths = [_step_of(each) for each in given]

    @property
    def weights(self) -> Path:
        """The first path that was deleted; if none was, the first path."""
        return next((path for path in self.paths if not path.exists()), self.paths[0])


def _step_of(path: Path) -> Path:
    """Return the latest step of a run; other paths, and runs without steps, are returned unchanged."""
    try:
        return latest_step_directory(path)
    except CheckpointError:
        return path


def _verify(paths: _ComparedPaths) -> VerifyReport:
    start = time.perf_counter()
    path, against = paths.path, paths.against
    with ExitStack() as stack:
        first, *others = [_Checkpoint(each, stack, paths.base) for each in paths.paths]
        second = others[0] if others else None
        first.open()
        num_cast = 0
        if second is None:
            first.check_alone()
        else:
            second.open()
            refuse_unused_base(paths.base, first.location, second.location)
            if first.is_adapter != second.is_adapter:
                first.merge()
                second.merge()
            elif first.location is not None and second.location is not None:
                first.problems += map(Problem, differences_of_adapters(first.location, second.location))
                first.notes += notes_on_bases(first.location, second.location)
            num_cast = _compare(first, second)
        seconds = time.perf_counter() - start
        if second is None:
            first.check_loading()
        problems = [*first.problems, *(second.problems if second else ())]
        index = first.stored or first.index
        return VerifyReport(
            path=str(path),
            format=index.format if index else None,
            num_tensors=len(index.tensors) if index else 0,
            num_bytes=index.num_bytes if index else 0,
            content_checked=first.has_digests and index is not None,
            seconds=seconds,
            problems=tuple(problems),
            checked=tuple(first.checked),
            against=None if against is None else str(against),
            num_cast=num_cast,
            not_read=tuple(index.extras) if index else (),
            notes=tuple(first.notes),
        )


class _Checkpoint:
    """A checkpoint under verification. Its errors are added to `problems`, never raised."""

    def __init__(self, path: Path, stack: ExitStack, base: str | None) -> None:
        self.path, self._stack, self._base = path, stack, base
        self.problems: list[Problem] = []
        self.checked: list[str] = []
        self.notes: list[str] = []
        self.manifest: Manifest | None = None
        self.has_digests = False
        self.location: Location | None = None
        self.index: TensorIndex | None = None
        self.stored: TensorIndex | None = None  # if `index` shows it under other names

    @property
    def is_adapter(self) -> bool:
        """Whether the checkpoint could be opened and is an adapter."""
        return self.location is not None and self.location.is_adapter

    def open(self) -> None:
        """Check the structure: files of the manifest, headers, and the bytes around the tensors in weight files."""
        self._open()
        if self.problems and self.manifest is not None and self._has_other_manifest(self.manifest):
            self.problems.clear()
            self.checked.clear()
            self._open()

    def _has_other_manifest(self, manifest: Manifest) -> bool:
        """Return whether the manifest was replaced meanwhile: training may drop the optimizer state of an old step."""
        try:
            now = read_manifest(self.path)
        except CheckpointError:
            return False
        return now is not None and now != manifest

    def _open(self) -> None:
        try:
            self.location = location = locate(self.path).based_on(self._base)
            self.manifest = read_manifest(location.weights) if self.path.is_dir() else None
            self.has_digests = self.manifest is not None
            if self.manifest is not None:
                self.problems += _contradictions(location.weights, self.manifest)
                self.problems += _file_problems(location.weights, self.manifest)
            elif self.path.is_dir() and (outer := read_manifest_of_folder(location.weights)) is not None:
                self.has_digests = True
                self.problems += _file_problems(location.weights.parent, outer)
            index_problems = list(_index_problems(location.weights))
            self.index = self._stack.enter_context(location.index)
            self.checked.append("structure")
            self.problems += index_problems
            if self.manifest is not None:
                known = {problem.file for problem in self.problems}
                self.problems += _frame_problems(self.index, self.manifest, known)
        except (CheckpointError, OSError) as error:
            self._fail(error)

    def merge(self) -> None:
        """Replace an adapter, whose own bytes are already checked, with the merged model."""
        if self.location is None or not self.location.is_adapter:
            return
        self.read((), searches=False)
        self.manifest = None  # the adapter alone
        try:
            self.index = self._stack.enter_context(self.location.model_index)
        except (CheckpointError, OSError) as error:
            self.index = None
            self._fail(error)

    def show(self, view: TensorIndex) -> None:
        """Replace the index with a view of it under other names, after its own bytes are checked."""
        assert self.index is not None, "it has a view"
        self.read((), searches=False)
        self.manifest = None  # the stored tensors alone
        view.reader.checksums = self.index.reader.checksums  # all were compared, and their problems are listed
        self.stored, self.index = self.index, self._stack.enter_context(view)

    def check_alone(self) -> None:
        """Check the content without comparing it with another checkpoint."""
        if self.index is not None and not self.index.tensors:
            self.problems.append(Problem(f"{self.index.path} has no tensors.", ()))
        self.read((), searches=self.manifest is None)

    def check_loading(self) -> None:
        """Compare the tensors with those of the model, which takes transformers seconds to import."""
        if self.index is not None and self.path.is_dir():  # one file may be one of several
            self._check_loading(self.index)

    def read(self, digested: Collection[str], *, searches: bool) -> Scan:
        """Read once the tensors with digests in the manifest and those in `digested`.

        With `searches`, also search for NaN and infinities.
        """
        if self.index is None:
            return Scan()
        if self.manifest is not None:
            digested = self.index.names
        tensors = self.index.tensors.values()
        searched = {entry.name for entry in tensors if entry.dtype in DTYPES} if searches else set[str]()
        self.index.reader.checksums.raises = False
        try:
            found = scan(self.index, digested, searched)
            if self.stored is None:
                self.problems += checksum_problems(self.index)
        except (CheckpointError, OSError) as error:
            self._fail(error)
            return Scan()
        if self.manifest is not None:
            self.problems += damage(self.index, self.manifest, found)
        if searches:
            self.checked.append("NaN and infinities")
            self.problems += non_finite(self.index, found)
        return found

    def _check_loading(self, index: TensorIndex) -> None:
        """Compare the tensors with the model that loads them."""
        location = self.location
        assert location is not None, "it was opened"
        if location.is_adapter:
            self.checked.append(ADAPTER_CONFIG)
            found, notes = compare_with_base(location, index)
        elif has_file(location.expected_config_directory, CONFIG):
            self.checked.append(CONFIG)
            try:
                refuse_adapter_within(index)
            except CheckpointError as error:
                self.problems.append(Problem(str(error)))
            found, notes = compare_with_config(index, location.expected_config_directory)
        else:
            return
        self.problems += found
        self.notes += notes

    def _fail(self, error: Exception) -> None:
        if not self.problems:  # otherwise the damaged file was named already
            self.problems.append(Problem(str(error)))


def _compare(first: _Checkpoint, second: _Checkpoint) -> int:
    """Compare two checkpoints; differences are problems of the first. Return the number of casts."""
    if first.index is None or second.index is None:
        return 0
    matching = compare.match(first.index, second.index)
    if (matching.only_one or matching.only_two) and first.location is not None and second.location is not None:
        views = under_model_names(first.index, second.index, (first.location, second.location))
        if views is not None:
            first.show(views[0])
            second.show(views[1])
            matching = compare.match(*views)
    pairs, problems = compare.described_differences(first.index, second.index, matching)
    alike = [pair for pair in pairs if pair.is_same_dtype]
    found = (
        first.read({pair.one.name for pair in alike}, searches=False),
        second.read({pair.two.name for pair in alike}, searches=False),
    )
    first.problems += problems
    for pair in pairs:
        if pair.is_same_dtype and (problem := compare.first_difference(first.index, second.index, pair, *found)):
            first.problems.append(problem)
    cast = [pair for pair in pairs if not pair.is_same_dtype]
    try:
        first.problems += compare.cast_differences(first.index, second.index, cast)
    except (CheckpointError, OSError) as error:
        first.problems.append(Problem(str(error)))
    return len(cast)


def _contradictions(root: Path, manifest: Manifest) -> Iterator[Problem]:
    """Find tensors whose digest contradicts their chunk digests in the manifest."""
    for name, record in manifest.tensors.items():
        try:
            chunks = [bytes.fromhex(chunk) for chunk in record.chunks]
        except ValueError:
            chunks = []
        if tensor_digest(record.dtype, record.shape, chunks) != record.digest:
            text = f"{root / MANIFEST} contradicts itself: the digest of tensor {name} is not that of its chunks."
            yield Problem(text, (ByteRange(MANIFEST),), name)


def _file_problems(root: Path, manifest: Manifest) -> Iterator[Problem]:
    """Find files of the manifest that are missing or changed."""
    for name, record in manifest.files.items():
        path, problem = root / name, size_problem(root, name, record)
        if problem is not None:
            yield problem
        elif record.digest is not None and file_digest(path) != record.digest:
            text = f"{path} does not have the content that was written."
            yield Problem(text, (ByteRange(name, 0, record.size),))
        elif name.endswith(".safetensors") and record.header_digest and header_digest(path) != record.header_digest:
            # Only these files contain the positions of their tensors, so it works even if they cannot be opened.
            yield Problem(f"the header of {path} is not the one that was written.", (ByteRange(name),))


def _index_problems(root: Path) -> Iterator[Problem]:
    """Find contradictions of indexes and headers of rank files, in the step and its folders.

    Raises CheckpointError if either cannot be read.
    """
    for folder in (root, root / OPTIMIZER, root / AVERAGE):
        if not has_file(folder, SHARD_INDEX):
            continue
        path = folder / SHARD_INDEX
        whole_file = ByteRange(str(path.relative_to(root)))
        if has_described_headers(folder, read_shard_index(folder)):
            continue
        index, headers = native_sharded.read(folder), native_sharded.read_headers(folder)
        if (index.step, index.metadata, index.aliases) != (headers.step, headers.metadata, headers.aliases):
            yield Problem(f"{path} is of another save than the rank files.", (whole_file,))
        for name in sorted(index.tensors.keys() | headers.tensors.keys()):
            indexed, stored = index.tensors.get(name), headers.tensors.get(name)
            if indexed is None or stored is None or not indexed.is_stored_as(stored):
                yield Problem(
                    f"{path} and the headers of the rank files disagree about the dtype, shape or position of tensor "
                    f"{name}.",
                    (whole_file,),
                    name,
                )
                break


def _frame_problems(index: TensorIndex, manifest: Manifest, known: Collection[str | None]) -> Iterator[Problem]:
    """Find weight files of other formats whose bytes outside tensors were changed."""
    framed = {
        name: record.header_digest
        for name, record in manifest.files.items()
        if record.header_digest is not None and not name.endswith(".safetensors") and name not in known
    }
    if not framed:
        return
    owned: dict[str, list[tuple[int, int]]] = {}
    for entry in index.tensors.values():
        for piece in entry.pieces:
            num_bytes = math.prod(piece.shape) * itemsize(entry.dtype) if piece.codec is None else piece.codec.num_bytes
            owned.setdefault(piece.file, []).append((piece.start, piece.start + num_bytes))
    for name, written in framed.items():
        path = member(index.root, name)
        if frame_digest(path, owned.get(name, ())) != written:
            yield Problem(
                f"{path}: the bytes around its tensors, which describe them, are not those that were written.",
                (ByteRange(name),),
            )
