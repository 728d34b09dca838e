"""Downloads steps from a remote store, compares them with their digests, and only then renames them into place.

A run that resumes from the remote store downloads into its run directory. Commands that read a checkpoint download into
a cache (`XDG_CACHE_HOME`, else ~/.cache), where the next command finds it.
"""

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from fsdp_shard.checkpoint.integrity.step_integrity import check_content
from fsdp_shard.checkpoint.io import atomicity, has_file
from fsdp_shard.checkpoint.remote.same_run import check_same_run
from fsdp_shard.checkpoint.remote.store import RemoteStore
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, Manifest, parse_manifest
from fsdp_shard.checkpoint.steps.step_reference import choose_step
from fsdp_shard.checkpoint.steps.step_store import StepStore, parse_step, step_name
from fsdp_shard.errors import CheckpointError, RemoteError, SaveError
from fsdp_shard.utils import format_size, fsync_path, read_bounded, user_cache, write_file


def fetch_latest(remote: RemoteStore, store: StepStore) -> int | None:
    """Download the latest step of a remote store unless `store` has it or a later one; return the remote's step.

    The best step comes too, and first: without it, the next step would be the best, and retention would delete it.

    Raises:
        ConfigError: Both have steps, which are of different runs.
    """
    check_same_run(remote, store)
    latest, local = remote.latest(), store.latest()
    if latest is not None and (local is None or local < latest):
        best = remote.best()
        if best is not None and remote.has(best):
            fetch_step(remote, best, store.path(best), replace=False)
            store.set_best(best)
        fetch_step(remote, latest, store.path(latest), replace=False)
        store.set_latest(latest)
    return latest


def local_copy(url: str, wanted: str | None = None) -> Path:
    """Download a remote run (its latest step) or step to the cache, unless it is cached.

    If a running training deletes the latest step meanwhile, the next latest is downloaded.

    Args:
        url: Address of the run or the step.
        wanted: Another step of the run: the part after the @ in RUN@best.

    Returns:
        The step directory in the cache.

    Raises:
        CheckpointError: There is no committed step, or it differs from the upload.
        RemoteError: The store cannot be read.
        SaveError: The cache cannot be written.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    step = parse_step(name)
    remote = RemoteStore(url if step is None else parent, setting="")
    key = hashlib.blake2b(remote.url.encode(), digest_size=12).hexdigest()
    while True:
        found = remote.latest() if step is None else step if remote.has(step) else None
        if wanted is not None:
            found = choose_step(wanted, remote.steps(), remote.best(), url)
        if found is None:
            raise CheckpointError(
                f"{url} has no finished checkpoint of fsdp-shard: no step there has a {MANIFEST}. Copy checkpoints of "
                "other programs to this machine, and give that directory."
            )
        try:
            return fetch_step(remote, found, user_cache("remote") / key / step_name(found), replace=True)
        except RemoteError:  # retention may have deleted the step meanwhile: choose again
            if step is not None or remote.has(found):
                raise


def fetch_step(remote: RemoteStore, step: int, target: Path, *, replace: bool) -> Path:
    """Download a committed step, unless it exists, and compare every byte with its digest.

    Several processes may call this at the same time: one downloads, the others wait for it.

    Args:
        remote: The store.
        step: The step.
        target: The directory to create.
        replace: Replace another step at `target`.

    Returns:
        `target`.

    Raises:
        RemoteError: The store cannot be read.
        CheckpointError: The step differs from its manifest.
        SaveError: `target` cannot be written.
    """
    with _exclusive(target.parent):
        content = remote.manifest(step)
        if has_file(target, MANIFEST) and read_bounded(target / MANIFEST, "metadata_bytes") == content:
            return target
        manifest = parse_manifest(content, remote.address(step, MANIFEST))
        _check_names(manifest, remote.address(step))
        num_bytes = sum(record.size for record in manifest.files.values())
        print(f"downloading {remote.address(step)} ({format_size(num_bytes)}) to {target}", file=sys.stderr, flush=True)
        with atomicity.new_directory(target, num_bytes, replace=replace) as temporary:
            for name in manifest.files:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                remote.fetch(step, name, temporary / name)
                fsync_path(temporary / name)
            write_file(temporary / MANIFEST, content)
            try:
                check_content(temporary)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{remote.address(step)} is not what was uploaded, and nothing of it was kept: {error}"
                ) from error
            atomicity.sync_directories(temporary)
    return target


def _check_names(manifest: Manifest, where: str) -> None:
    """Reject names that lead out of the directory: a manifest from a remote store is not trusted."""
    for name in manifest.files:
        pure = PurePosixPath(name)
        is_plain = bool(name) and str(pure) == name and not pure.is_absolute() and ".." not in pure.parts
        if not is_plain or name == MANIFEST or "\0" in name or "\\" in name:
            raise CheckpointError(
                f"{where} lists a file {name!r}, which is not a valid name in a checkpoint; nothing was downloaded."
            )


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Lock `directory` against other downloads; the system releases the lock when its process ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SaveError(f"{directory} cannot be written, so nothing can be downloaded: {error.strerror}.") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
