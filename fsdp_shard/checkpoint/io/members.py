"""Finds the files of a checkpoint by name, without leaving its directory.

Every name from an index, a manifest or a header passes through `member`.
"""

import os
import re
import stat
from itertools import islice
from pathlib import Path, PurePosixPath

from fsdp_shard.errors import CheckpointError, deleted_meanwhile
from fsdp_shard.utils import limits, refuse_excess

_NOT_IN_NAMES = re.compile(r"[\0\\\ud800-\udfff]")  # a lone surrogate is not valid text


def member(root: Path, name: object) -> Path:
    """Return the path of a checkpoint file inside the checkpoint's directory.

    Args:
        root: The directory.
        name: The name in an index, a manifest or a header.

    Returns:
        The path. Links of a Hugging Face hub cache (`models--*/snapshots/REVISION/FILE -> ../../blobs/HASH`) may lead
        out of `root` as far as `models--*`.

    Raises:
        CheckpointError: The name is absolute or has `..`, a symbolic link leads out of `root`, or no regular file has
            this name.
    """
    if not isinstance(name, str) or not name or _NOT_IN_NAMES.search(name):
        raise CheckpointError(f"{root} names {name!r} as a file, which is not a file name.")
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise CheckpointError(f"{root} names the file {name}, which would lie outside the directory; it is not read.")
    path, base = root / pure, root.resolve()
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError):
        refuse_deleted(root)
        raise CheckpointError(f"{path} is missing: the checkpoint names it, but there is no such file.") from None
    if not real.is_relative_to(base) and not real.is_relative_to(_hub_base(base) or base):
        raise CheckpointError(
            f"{path} is a link to {real}, outside the directory; it is not followed. Copy the file in its place."
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a regular file, so it is not read.")
    return path


def refuse_deleted(path: Path) -> None:
    """Raise CheckpointError if a checkpoint found earlier has been deleted."""
    if not path.exists():
        raise CheckpointError(deleted_meanwhile(path))


def _hub_base(root: Path) -> Path | None:
    is_snapshot = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    return root.parent.parent if is_snapshot else None


def has_file(root: Path, name: str) -> bool:
    """Whether `root` has a regular file `name`, or a link to one (`member` checks where it leads)."""
    return os.path.isfile(root / name)


def refuse_many_entries(path: Path) -> None:
    """Raise CheckpointError if a directory has more entries than any checkpoint, as they are scanned repeatedly."""
    if path.is_dir():
        with os.scandir(path) as entries:
            count = sum(1 for _ in islice(entries, limits().directory_entries + 1))
        refuse_excess(count, "directory_entries", f"{path} has too many files to be a checkpoint")
