"""Steps of a remote store on this machine: downloaded, compared with their digests, and only then given their name.

A run that goes on from the remote store gets its step into the run directory; commands that read a checkpoint get it
into a cache (`XDG_CACHE_HOME`, else ~/.cache), where it stays for the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from fsdp_shard.checkpoint.io import atomicity
from fsdp_shard.checkpoint.io.files import has_file
from fsdp_shard.checkpoint.remote.store import RemoteStore
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, Manifest, parse_manifest
from fsdp_shard.checkpoint.steps.step_integrity import check_content
from fsdp_shard.checkpoint.steps.step_store import Store, parse_step, step_name
from fsdp_shard.errors import CheckpointError, SaveError
from fsdp_shard.utils import format_size, user_cache


def fetch_latest(remote: RemoteStore, store: Store) -> int | None:
    """Bring the latest step of the remote store into `store`, where that has none as late; returns the remote's."""
    latest, here = remote.latest(), store.latest()
    if latest is not None and (here is None or here < latest):
        fetch_step(remote, latest, store.path(latest), replace=False)
        store.set_latest(latest)
    return latest


def local_copy(url: str) -> Path:
    """The step directory of a remote run (its latest step) or step, in the cache; downloaded where it is not there."""
    parent, _, name = url.rstrip("/").rpartition("/")
    step = parse_step(name)
    remote = RemoteStore(url if step is None else parent, "the address")
    found = remote.latest() if step is None else step if remote.has(step) else None
    if found is None:
        raise CheckpointError(
            f"{url} has no finished checkpoint of fsdp-shard: there is no {MANIFEST} of a step. Copy what another "
            "program has written there to this machine, and give that directory."
        )
    key = hashlib.blake2b(remote.url.encode(), digest_size=12).hexdigest()
    return fetch_step(remote, found, user_cache("remote") / key / step_name(found), replace=True)


def fetch_step(remote: RemoteStore, step: int, target: Path, *, replace: bool) -> Path:
    """Download a committed step to `target`, unless it lies there already; every byte is compared with its digest.

    Several processes may call this at once: one downloads, the others wait for it. `replace` another step there.
    Raises RemoteError, CheckpointError when it is not what its manifest says, SaveError when it cannot be written.
    """
    with _alone(target.parent):
        content = remote.manifest(step)
        if has_file(target, MANIFEST) and (target / MANIFEST).read_bytes() == content:
            return target
        manifest = parse_manifest(content, remote.address(step, MANIFEST))
        _check_names(manifest, remote.address(step))
        num_bytes = sum(record.size for record in manifest.files.values())
        print(f"downloading {remote.address(step)} ({format_size(num_bytes)}) to {target}", file=sys.stderr, flush=True)
        with atomicity.new_directory(target, num_bytes, replace=replace) as temporary:
            for name in manifest.files:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                remote.fetch(step, name, temporary / name)
                atomicity.fsync_file(temporary / name)
            atomicity.write_file(temporary / MANIFEST, content)
            try:
                check_content(temporary)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{remote.address(step)} is not what was uploaded, and nothing of it was kept: {error}"
                ) from error
            atomicity.fsync_tree(temporary)
    return target


def _check_names(manifest: Manifest, where: str) -> None:
    """Refuse names that would lie outside of the directory: they come from elsewhere."""
    for name in manifest.files:
        pure = PurePosixPath(name)
        is_plain = bool(name) and str(pure) == name and not pure.is_absolute() and ".." not in pure.parts
        if not is_plain or name == MANIFEST or "\0" in name or "\\" in name:
            raise CheckpointError(
                f"{where} names {name!r} as a file of it, which it cannot be; nothing was downloaded."
            )


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep other processes that download into `directory` waiting; the system lets go of the lock of a dead one."""
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
