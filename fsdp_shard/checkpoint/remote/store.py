"""The steps of a run on a remote store that fsspec supports (s3://, gs://, ...): listing, uploading, deleting.

As on disk, a step is complete or absent: its manifest is written last, as one object that must not exist yet, and
deleted first. Readers list manifests, so no pointer to the latest step can be wrong. Only this module imports fsspec,
when a store is opened.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint.io import fault_point
from fsdp_shard.checkpoint.steps.manifest import MANIFEST
from fsdp_shard.checkpoint.steps.step_store import BEST, parse_step, step_name
from fsdp_shard.errors import ConfigError, FsdpShardError, RemoteError, SaveError
from fsdp_shard.utils import ADDRESS, missing_file_system, redact

_PARTS_AT_ONCE = 2  # of 50 MB each in memory, when a large file is uploaded in parts
_LONGEST_REASON = 300
_LOCAL = ("file", "local")


def check_remote(url: str, name: str) -> None:
    """Raise ConfigError unless `url` is the address of a directory without secrets.

    Args:
        url: The address.
        name: Name of its setting, for errors; empty if it is from no setting.
    """
    match = ADDRESS.fullmatch(url)
    prefix = f"{name}=" if name else ""
    if match is None or not match[2].strip("/"):
        raise ConfigError(f"{prefix}{url} is not the address of a remote directory, such as s3://bucket/run.")
    if match[1].lower() in _LOCAL:
        raise ConfigError(f"{prefix}{url} is a local directory: give it as {'run_dir' if name else 'a path'} instead.")
    user, at, _ = match[2].partition("/")[0].rpartition("@")
    if "?" in url or (at and ":" in user):
        raise ConfigError(
            f"{prefix}{match[1]}://*** has a password or options in it. Remove them: credentials and endpoint come "
            "from the environment, such as AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL."
        )


class RemoteStore:
    """The steps under `url`. Every method raises RemoteError with the address if the server refuses or fails.

    Args:
        url: The address of the run.
        setting: Name of the address's setting, for errors; empty if it is from no setting.
    """

    def __init__(self, url: str, setting: str = "checkpoint.remote") -> None:
        check_remote(url, setting)
        self.url = url.rstrip("/")
        self._fs, self._root = _open(self.url, f"{setting}={self.url}" if setting else self.url)

    def address(self, step: int, name: str = "") -> str:
        """Return the address of a step or of a file in it."""
        return f"{self.url}/{step_name(step)}" + (f"/{name}" if name else "")

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return [step for step in self._all_steps() if self.has(step)]

    def latest(self) -> int | None:
        """Return the highest committed step."""
        return next((step for step in reversed(self._all_steps()) if self.has(step)), None)

    def has(self, step: int) -> bool:
        """Return whether the step is committed."""
        with self._requesting(f"{self.address(step)} cannot be checked"):
            return bool(self._fs.exists(self._path(step, MANIFEST)))

    def manifest(self, step: int) -> bytes:
        """Return the manifest of a committed step."""
        return self.read(step, MANIFEST)

    def read(self, step: int, name: str) -> bytes:
        """Read a small file of a step."""
        with self._requesting(f"{self.address(step, name)} cannot be read"):
            return bytes(self._fs.cat_file(self._path(step, name)))

    def best(self) -> int | None:
        """Return the step that was last marked as the best."""
        with self._requesting(f"{self.url}/{BEST} cannot be read"):
            try:
                content: bytes = self._fs.cat_file(f"{self._root}/{BEST}")
            except FileNotFoundError:
                return None
        return parse_step(content.decode("utf-8", errors="replace").strip())

    def set_best(self, step: int) -> None:
        """Mark a step as the best."""
        with self._requesting(f"{self.url}/{BEST} cannot be written"):
            self._fs.pipe_file(f"{self._root}/{BEST}", f"{step_name(step)}\n".encode())

    def begin(self, step: int, manifest: bytes) -> bool:
        """Prepare the upload of a step: delete the remains of an interrupted upload.

        Args:
            step: The step.
            manifest: Content of its manifest.

        Returns:
            Whether there is anything to upload: False if exactly this step exists already.

        Raises:
            SaveError: Another step of this number exists, which is never overwritten.
        """
        if not self.has(step):
            self._remove_files(step)
            return True
        if self.manifest(step) != manifest:
            raise self._taken_error(step)
        return False

    def put(self, step: int, directory: Path, names: Sequence[str]) -> None:
        """Upload files of a step from `directory`; large ones in parts."""
        for name in names:
            with self._requesting(f"{self.address(step, name)} could not be written"):
                self._fs.put_file(str(directory / name), self._path(step, name))

    def commit(self, step: int, manifest: bytes, sizes: Mapping[str, int]) -> None:
        """Upload a step's manifest, which commits it, after comparing the `sizes` of its uploaded files."""
        found = self._sizes(step)
        for name, size in sizes.items():
            if found.get(name) != size:
                raise RemoteError(
                    f"{self.address(step, name)} has {found.get(name, 'no')} bytes after the upload, expected {size}."
                )
        with self._requesting(f"{self.address(step, MANIFEST)} could not be written"):
            try:
                self._fs.pipe_file(self._path(step, MANIFEST), manifest, mode="create")
            except FileExistsError:
                # It may be ours if the response to a first attempt was lost.
                if self.manifest(step) != manifest:
                    raise self._taken_error(step) from None

    def delete(self, step: int) -> None:
        """Delete a step, its manifest first."""
        with self._requesting(f"{self.address(step, MANIFEST)} could not be deleted"):
            self._fs.rm_file(self._path(step, MANIFEST))
        fault_point("remote-hidden")
        self._remove_files(step)
        fault_point("remote-deleted")

    def clean(self, before: int) -> None:
        """Delete the remains of interrupted uploads and deletions of steps before `before`."""
        for step in self._all_steps():
            if step < before and not self.has(step):
                self._remove_files(step)

    def fetch(self, step: int, name: str, target: Path) -> None:
        """Download one file of a step."""
        with self._requesting(f"{self.address(step, name)} cannot be read"):
            self._fs.get_file(self._path(step, name), str(target))

    def _taken_error(self, step: int) -> SaveError:
        return SaveError(
            f"{self.address(step)} exists already, from another run, and a committed checkpoint is never overwritten. "
            "Give another checkpoint.remote."
        )

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/{step_name(step)}" + (f"/{name}" if name else "")

    def _all_steps(self) -> list[int]:
        """List the steps with any file, ascending."""
        with self._requesting(f"{self.url} cannot be listed"):
            self._fs.invalidate_cache()
            try:
                names = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                self._check_bucket()
                return []
        steps = (parse_step(name.rstrip("/").rpartition("/")[2]) for name in names)
        return sorted(step for step in steps if step is not None)

    def _check_bucket(self) -> None:
        """A directory that does not exist is an empty one, but a bucket must be created by its owner."""
        bucket = self._root.partition("/")[0]
        if bucket and not self._fs.exists(bucket):
            raise RemoteError(
                f"{self.url} cannot be used: there is no bucket {bucket}, or it cannot be reached. Create it, or "
                "correct the address, the endpoint (AWS_ENDPOINT_URL) or the credentials."
            )

    def _sizes(self, step: int) -> dict[str, int]:
        """Return the sizes of the files of a step, committed or not, by name."""
        with self._requesting(f"{self.address(step)} cannot be listed"):
            self._fs.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._fs.find(self._path(step), detail=True)
        start = len(self._path(step)) + 1
        return {path[start:]: int(entry["size"]) for path, entry in found.items()}

    def _remove_files(self, step: int) -> None:
        names = self._sizes(step)
        with self._requesting(f"{self.address(step)} could not be deleted"):
            if names:
                self._fs.rm(self._path(step), recursive=True)

    @contextmanager
    def _requesting(self, what: str) -> Iterator[None]:
        """Raise RemoteError, without secrets, for any exception of a store's library."""
        try:
            yield
        except FsdpShardError:
            raise
        except Exception as error:
            reason = (" ".join(str(error).split()) or "no reason given")[:_LONGEST_REASON]
            raise RemoteError(f"{what}: {type(error).__name__}: {redact(reason)}") from error


def _open(url: str, shown: str) -> tuple[Any, str]:
    """Return the fsspec file system of a store, and the path of the directory in it. Errors begin with `shown`."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        store, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except ImportError as error:
        raise missing_file_system(shown, url, error) from error
    except ValueError as error:
        raise ConfigError(f"{shown}: fsspec does not support {scheme}://: {error}") from error
    if hasattr(store, "max_concurrency"):
        store.max_concurrency = _PARTS_AT_ONCE
    return store, str(root).rstrip("/")
