"""The step directories of a run: finding committed steps and the latest one, and committing new ones. Imports no torch.

Only rank 0 calls `begin`, `commit` and `prune`; each writer syncs its own files before `commit`. A step directory is
committed or absent: one rename gives it its name after everything in it is on disk.
"""

import dataclasses
import os
import re
import shutil
from collections.abc import Sequence, Set
from pathlib import Path

from fsdp_shard.checkpoint.io import atomicity, fault_point, has_file, member
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, Manifest, has_listed_files, read_manifest
from fsdp_shard.errors import CheckpointError, SaveError, StorageError, os_error_text
from fsdp_shard.utils import fsync_path, has_content, read_bounded, write_atomically

CHECKPOINTS = "checkpoints"  # under a run directory
LATEST, BEST = "latest", "best"
CONFIG_FILE = "config.yaml"  # under a run directory: the settings that made its newest step
CONFIG_START = "# To repeat this run: fsdp-shard "  # first words of such a file; the command follows
# Under a step directory.
OPTIMIZER, AVERAGE, TRAINER, RUN_CONFIG = "optimizer", "ema", "trainer.json", "run_config.yaml"
_NO_OPTIMIZER = f".{OPTIMIZER}.deleted"
_POINTER_BYTES = 64  # longer than the name of any step


def step_name(step: int) -> str:
    """Return the name of the directory of a step, such as step-00000010."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step in a step directory's name, or None for other names."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def recorded_command(run_dir: Path) -> list[str]:
    """The command in the first line of a run directory's config.yaml, split into words; empty without such a file."""
    file = run_dir / CONFIG_FILE
    try:
        if not file.is_file():
            return []
        with file.open("rb") as stream:
            first = stream.readline(500).decode("utf-8", "replace")
    except OSError:
        return []
    return first.removeprefix(CONFIG_START).split() if first.startswith(CONFIG_START) else []


class StepStore:
    """The checkpoints of one run, in `root` (RUN_DIR/checkpoints)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """The directory of a step, existing or not."""
        return self.root / step_name(step)

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        if not self.root.is_dir():
            return []
        found = ((parse_step(entry.name), entry) for entry in self.root.iterdir())
        return sorted(step for step, entry in found if step is not None and has_file(entry, MANIFEST))

    def latest(self) -> int | None:
        """The highest committed step. The pointer `latest` is for users: a crash may leave it one step behind."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step to which `best` points, if it exists."""
        pointed = self.pointer(BEST)
        return pointed if pointed in self.steps() else None

    def pointer(self, name: str) -> int | None:
        """The step that the file `name` (`latest` or `best`) names; None if there is no such file."""
        if not has_file(self.root, name):  # a FIFO would block forever
            return None
        try:
            with (self.root / name).open("rb") as file:
                return parse_step(file.read(_POINTER_BYTES).decode("ascii", "replace").strip())
        except OSError:
            return None

    def begin(self, step: int, num_bytes: int = 0) -> Path:
        """Create an empty directory for writing a step, and delete leftovers of an earlier attempt.

        Args:
            step: The step.
            num_bytes: Disk space that the step needs.

        Returns:
            The temporary directory.

        Raises:
            StorageError: The disk has too little space, or the directory cannot be created.
            SaveError: The step exists already.
        """
        temporary = self._partial(step)
        self.require_new(step)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            atomicity.make_directories(temporary)
            advice = "keep fewer checkpoints (checkpoint.keep_last)"
            atomicity.require_space(self.root, num_bytes, f"step {step}", advice)
        except StorageError:
            self.discard(step)
            raise
        except OSError as error:
            raise StorageError(f"{temporary} cannot be created: {os_error_text(error)}; nothing was saved.") from error
        return temporary

    def require_new(self, step: int) -> None:
        """Raise SaveError if a step exists."""
        if os.path.lexists(self.path(step)):
            raise SaveError(f"{self.path(step)} exists already, and a committed checkpoint is never overwritten.")

    def discard(self, step: int) -> None:
        """Delete the files of a step that cannot be finished; the next run deletes any remains."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def _partial(self, step: int) -> Path:
        return self.root / f".{step_name(step)}.partial"

    def commit(self, temporary: Path, step: int, manifest: Manifest) -> Path:
        """Write the manifest, sync the directories and rename the temporary one.

        The files must already be on disk, synced by their writers.

        Args:
            temporary: The directory that `begin` created.
            step: The step.
            manifest: The content of the step.

        Returns:
            The step directory.

        Raises:
            StorageError: The disk is full or fails.
            SaveError: The step exists already.
        """
        target = self.path(step)
        self.require_new(step)
        try:
            write_atomically(temporary / MANIFEST, manifest.to_json(), sync=True)
            fault_point("manifest-written")
            atomicity.sync_directories(temporary)
            fault_point("directory-synced")
            os.rename(temporary, target)  # fails if a directory with files was just created there
            fault_point("renamed")
            fsync_path(target.parent)
            fault_point("committed")
        except OSError as error:
            raise StorageError(
                f"{target} could not be committed: {os_error_text(error)}; earlier steps are kept."
            ) from error
        return target

    def set_latest(self, step: int) -> None:
        """Make `latest` point to a step, and write its settings to the run directory's config.yaml."""
        self._set_pointer(LATEST, step)
        if has_file(self.path(step), RUN_CONFIG):
            self.set_config(read_bounded(member(self.path(step), RUN_CONFIG), "settings_bytes"))

    def set_config(self, content: bytes) -> None:
        """Write the run directory's config.yaml, unless it already has this content."""
        file = self.root.parent / CONFIG_FILE
        if not has_content(file, content):
            self._write(file, content)

    def set_best(self, step: int) -> None:
        """Make `best` point to a step."""
        self._set_pointer(BEST, step)

    def _set_pointer(self, name: str, step: int) -> None:
        self._write(self.root / name, (step_name(step) + "\n").encode())

    def _write(self, file: Path, content: bytes) -> None:
        try:
            write_atomically(file, content, sync=True)
        except OSError as error:
            raise StorageError(f"{file} could not be written: {os_error_text(error)}.") from error

    def complete_steps(self) -> list[int]:
        """The steps with all of their files in full size, ascending, which retention counts."""
        return [step for step in self.steps() if _complete_manifest(self.path(step)) is not None]

    def prune(self, keep_last: int, keep_every: int | None = None) -> list[int]:
        """Delete the steps that retention does not keep.

        Steps that lack a file are neither counted nor deleted, so no complete step is deleted in their favor.

        Args:
            keep_last: Number of latest steps to keep; the targets of `latest` and `best` are also kept.
            keep_every: Also keep steps that this number divides.

        Returns:
            The deleted steps.
        """
        deleted = steps_to_delete(self.complete_steps(), keep_last, keep_every, {self.pointer(LATEST), self.best()})
        for step in deleted:
            self.delete(step)
        return deleted

    def delete(self, step: int) -> None:
        """Delete a committed step. It loses its name first, so a crash leaves no partial step."""
        hidden = self.root / f".{step_name(step)}.deleted"
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(self.path(step), hidden)
        fsync_path(self.root)  # before its files are deleted: the name must not reappear without them
        fault_point("hidden")
        shutil.rmtree(hidden)
        fault_point("deleted")

    def drop_optimizer(self, keep_last: int) -> list[int]:
        """Delete the optimizer state of all steps except the `keep_last` highest; return the steps that had one.

        The manifest is first replaced with one that does not list the optimizer state. A crash therefore leaves a
        committed step with weights, and files that `clean_leftovers` recognizes as leftovers.
        """
        steps = self.complete_steps()
        older = steps[: max(len(steps) - keep_last, 0)]
        with_optimizer = [step for step in older if (self.path(step) / OPTIMIZER).is_dir()]
        for step in with_optimizer:
            manifest = read_manifest(self.path(step))
            assert manifest is not None, "a complete step has one"
            kept = {name: record for name, record in manifest.files.items() if not _is_optimizer_file(name)}
            slimmed = dataclasses.replace(manifest, files=kept)
            write_atomically(self.path(step) / MANIFEST, slimmed.to_json(), sync=True)
            fault_point("slimmed")
            _remove_optimizer(self.path(step))
        return with_optimizer

    def recover(self) -> int | None:
        """Undo what interrupted saves and deletions left, before a run writes; return the latest step, None if none."""
        self.clean_leftovers()
        if (latest := self.latest()) is not None:
            self.set_latest(latest)
        return latest

    def clean_leftovers(self) -> None:
        """Delete leftovers of interrupted saves and deletions."""
        if not self.root.is_dir():
            return
        names = sorted(entry.name for entry in self.root.iterdir())
        matches = [re.fullmatch(r"\.(step-\d{8,})\.(partial|deleted|replaced)", name) for name in names]
        for match in filter(None, matches):
            if (self.root / match[0]).is_symlink():
                continue  # saves never create links
            if match[2] == "replaced":
                atomicity.recover(self.root / match[1])
            else:
                shutil.rmtree(self.root / match[0])
        for step in self.steps():
            _clean_step(self.path(step))


def steps_to_delete(steps: Sequence[int], keep_last: int, keep_every: int | None, always: Set[int | None]) -> list[int]:
    """The `steps`, ascending, that retention deletes; those in `always` are kept."""
    milestones = {step for step in steps if keep_every is not None and step % keep_every == 0}
    kept = {*steps[max(len(steps) - keep_last, 0) :], *milestones, *always}
    return [step for step in steps if step not in kept]


def _is_optimizer_file(name: str) -> bool:
    return name.startswith(f"{OPTIMIZER}/")


def has_optimizer(manifest: Manifest) -> bool:
    """Whether a step has optimizer state, according to its manifest."""
    return any(map(_is_optimizer_file, manifest.files))


def _complete_manifest(directory: Path) -> Manifest | None:
    """The manifest of a step with all of its files in full size; None for other steps."""
    try:
        manifest = read_manifest(directory)
    except (CheckpointError, OSError):
        return None
    is_complete = manifest is not None and manifest.files and has_listed_files(directory, manifest)
    return manifest if is_complete else None


def _remove_optimizer(directory: Path) -> None:
    """Delete the optimizer state of a step whose manifest does not list it; it is renamed first."""
    hidden = directory / _NO_OPTIMIZER
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(directory / OPTIMIZER, hidden)
    shutil.rmtree(hidden)


def _clean_step(directory: Path) -> None:
    """Finish an interrupted `drop_optimizer` of a step."""
    if (directory / _NO_OPTIMIZER).is_dir():
        shutil.rmtree(directory / _NO_OPTIMIZER)
    manifest = _complete_manifest(directory) if (directory / OPTIMIZER).is_dir() else None
    if manifest is not None and not has_optimizer(manifest):
        _remove_optimizer(directory)
