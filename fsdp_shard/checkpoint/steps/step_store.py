"""The step directories of a run: which are complete, which is the latest, how one more is committed. Imports no torch.

Only rank 0 calls `begin`, `commit` and `prune`; each writer syncs its own files (`atomic.fsync_file`) before `commit`.
A step directory is complete or absent: it gets its name by one rename, after everything in it is on the disk.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
from collections.abc import Sequence, Set
from pathlib import Path

from fsdp_shard.checkpoint.io import atomicity
from fsdp_shard.checkpoint.io.atomicity import fsync_directory as fsync_directory, fsync_file as fsync_file
from fsdp_shard.checkpoint.io.fault_points import fault_point
from fsdp_shard.checkpoint.io.files import has_file, member
from fsdp_shard.checkpoint.steps.manifest import (
    MANIFEST,
    FileRecord as FileRecord,
    Manifest as Manifest,
    TensorRecord as TensorRecord,
    read_manifest as read_manifest,
)
from fsdp_shard.errors import CheckpointError, SaveError, StorageError
from fsdp_shard.utils import format_size

CHECKPOINTS = "checkpoints"  # under a run directory
LATEST, BEST = "latest", "best"
OPTIMIZER = "optimizer"  # under a step directory
_NO_OPTIMIZER = f".{OPTIMIZER}.deleted"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a step directory's name, or None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


class Store:
    """The checkpoints of one run, in `root` (RUN_DIR/checkpoints)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / step_name(step)

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        if not self.root.is_dir():
            return []
        found = ((parse_step(entry.name), entry) for entry in self.root.iterdir())
        return sorted(step for step, entry in found if step is not None and has_file(entry, MANIFEST))

    def latest(self) -> int | None:
        """The highest committed step. The pointer `latest` is for people: a crash may leave it one step behind."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step that `best` points to, if it is there."""
        pointed = self.pointer(BEST)
        return pointed if pointed in self.steps() else None

    def pointer(self, name: str) -> int | None:
        try:
            return parse_step((self.root / name).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError):
            return None

    def begin(self, step: int, num_bytes: int = 0) -> Path:
        """A fresh, empty directory to write a step of `num_bytes` into; what an earlier attempt left there is deleted.

        Raises StorageError where the disk has less free, SaveError where the step is there already.
        """
        target, temporary = self.path(step), self._partial(step)
        if os.path.lexists(target):
            raise SaveError(f"{target} is there already, and a finished checkpoint is never written over.")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            atomicity.make_directories(temporary)
            free = shutil.disk_usage(temporary).free
        except OSError as error:
            raise StorageError(f"{temporary} cannot be created: {describe(error)}; nothing was saved.") from error
        if free < num_bytes:
            self.discard(step)
            raise StorageError(
                f"{self.root} has {format_size(free)} free, but step {step} takes {format_size(num_bytes)}; free some "
                f"space, or keep less (checkpoint.keep_last). Nothing was written (ENOSPC)."
            )
        return temporary

    def discard(self, step: int) -> None:
        """Remove what was written of a step that cannot be finished; what cannot be removed is left to the next run."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def _partial(self, step: int) -> Path:
        return self.root / f".{step_name(step)}.partial"

    def commit(self, temporary: Path, step: int, manifest: Manifest) -> Path:
        """Write the manifest, sync the directories, and give them their final name; returns the step's directory.

        The files themselves are on the disk already (`fsync_file` by whoever wrote them). A committed directory of the
        same step is never written over: that is a SaveError.
        """
        target = self.path(step)
        if step in self.steps():
            raise SaveError(f"{target} is there already, and a finished checkpoint is never written over.")
        try:
            atomicity.write_text(temporary / MANIFEST, manifest.to_json())
            fault_point("manifest-written")
            atomicity.fsync_tree(temporary)
            fault_point("directory-synced")
            os.rename(temporary, target)  # fails where something has come there only now
            fault_point("renamed")
            fsync_directory(target.parent)
            fault_point("committed")
        except OSError as error:
            raise StorageError(
                f"{target} could not be committed: {describe(error)}; earlier steps are kept."
            ) from error
        return target

    def set_latest(self, step: int) -> None:
        self._point(LATEST, step)

    def set_best(self, step: int) -> None:
        self._point(BEST, step)

    def _point(self, name: str, step: int) -> None:
        try:
            atomicity.write_text(self.root / name, step_name(step) + "\n")
        except OSError as error:
            raise StorageError(f"{self.root / name} could not be written: {describe(error)}.") from error

    def complete_steps(self) -> list[int]:
        """The steps that have each of their files in full size, ascending: what retention counts."""
        return [step for step in self.steps() if _is_complete(self.path(step))]

    def prune(self, keep_last: int, keep_every: int | None = None) -> list[int]:
        """Delete all but the `keep_last` highest steps, each `keep_every`-th one, and what latest and best point to.

        Returns the deleted steps. A step loses its name first, so that a crash in between leaves no half one. Steps
        that lack something are neither counted nor deleted: a sound one is never given up for them.
        """
        doomed = retired(self.complete_steps(), keep_last, keep_every, {self.pointer(LATEST), self.best()})
        for step in doomed:
            self.delete(step)
        return doomed

    def delete(self, step: int) -> None:
        """Delete a committed step, which loses its name first."""
        hidden = self.root / f".{step_name(step)}.deleted"
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(self.path(step), hidden)
        fsync_directory(self.root)  # before its files go: the name must not come back without them
        fault_point("hidden")
        shutil.rmtree(hidden)
        fault_point("deleted")

    def drop_optimizer(self, keep_last: int) -> list[int]:
        """Make all steps but the `keep_last` highest ones weights only; returns those that had more.

        First a manifest that no longer lists the optimizer state takes the place of the old one, so a crash in between
        leaves a finished step of weights, with files that `clean_leftovers` knows to be none of it.
        """
        steps = self.complete_steps()
        heavy = [step for step in steps[: max(len(steps) - keep_last, 0)] if (self.path(step) / OPTIMIZER).is_dir()]
        for step in heavy:
            manifest = read_manifest(self.path(step))
            assert manifest is not None, "a complete step has one"
            kept = {name: record for name, record in manifest.files.items() if not is_of_optimizer(name)}
            atomicity.write_text(self.path(step) / MANIFEST, dataclasses.replace(manifest, files=kept).to_json())
            fault_point("slimmed")
            _remove_optimizer(self.path(step))
        return heavy

    def clean_leftovers(self) -> list[str]:
        """Delete what interrupted saves and deletions left; call it before a run writes. Returns the names."""
        if not self.root.is_dir():
            return []
        found = []
        for entry in sorted(self.root.iterdir()):
            match = re.fullmatch(r"\.(step-\d{8,})\.(partial|deleted|replaced)", entry.name)
            if match is None:
                continue
            found.append(entry.name)
            if match[2] == "replaced":
                atomicity.recover(self.root / match[1])
            else:
                shutil.rmtree(entry)
        for step in self.steps():
            found += _clean_step(self.path(step))
        return found


def retired(steps: Sequence[int], keep_last: int, keep_every: int | None, pinned: Set[int | None]) -> list[int]:
    """Those of `steps`, ascending, that retention deletes."""
    milestones = {step for step in steps if keep_every is not None and step % keep_every == 0}
    kept = {*steps[max(len(steps) - keep_last, 0) :], *milestones, *pinned}
    return [step for step in steps if step not in kept]


def is_of_optimizer(name: str) -> bool:
    """Whether a file of a step holds optimizer state."""
    return name.startswith(f"{OPTIMIZER}/")


def has_optimizer(manifest: Manifest) -> bool:
    """Whether a step has optimizer state: by what it lists, not by what lies there."""
    return any(map(is_of_optimizer, manifest.files))


def _is_complete(directory: Path) -> bool:
    try:
        manifest = read_manifest(directory)
        files = {} if manifest is None else manifest.files
        return bool(files) and all(member(directory, name).stat().st_size == files[name].size for name in files)
    except (CheckpointError, OSError):
        return False


def _remove_optimizer(directory: Path) -> None:
    """Remove the optimizer state of a step whose manifest lists none; its name goes first."""
    hidden = directory / _NO_OPTIMIZER
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(directory / OPTIMIZER, hidden)
    shutil.rmtree(hidden)


def _clean_step(directory: Path) -> list[str]:
    """Finish what `drop_optimizer` began in a step; the names of what was removed."""
    found = []
    if (directory / _NO_OPTIMIZER).is_dir():
        shutil.rmtree(directory / _NO_OPTIMIZER)
        found.append(f"{directory.name}/{_NO_OPTIMIZER}")
    if (directory / OPTIMIZER).is_dir() and _is_complete(directory):
        manifest = read_manifest(directory)
        if manifest is not None and not has_optimizer(manifest):
            _remove_optimizer(directory)
            found.append(f"{directory.name}/{OPTIMIZER}")
    return found


def describe(error: OSError) -> str:
    """File, reason and errno of an error of the system."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"
