"""Pushes a model's files to a Hugging Face hub repository in one commit; private unless it is to be public.

huggingface_hub uploads them. Data that the hub already has, also from an interrupted attempt, is not sent again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.remote.hub_requests import request, require_hub
from fsdp_shard.checkpoint.remote.stale_hub_files import stale_files
from fsdp_shard.checkpoint.steps.manifest import KIND, MANIFEST
from fsdp_shard.errors import ConfigError, RemoteError
from fsdp_shard.utils import format_count, format_size

if TYPE_CHECKING:
    from huggingface_hub import CommitOperation, HfApi

CARD = "README.md"
CARD_MARK = (
    "<!-- Made by fsdp-shard push. Remove this line to keep your changes: the next push then leaves this file. -->"
)
_MAX_READ = 1_000_000  # bytes of a manifest that may be ours
_NAME = r"[A-Za-z0-9]([\w.-]{0,94}\w)?"
_HUB_ID = re.compile(rf"(?!.*(--|\.\.|\.git$)){_NAME}/{_NAME}", re.ASCII)
_BRANCH = re.compile(r"[\w][\w./-]*", re.ASCII)


@dataclass(frozen=True)
class HubTarget:
    """A hub repository to push to.

    Attributes:
        repo_id: Its name, org/name.
        public: Whether everybody may read it if it is created.
        revision: The branch to write, created if it does not exist; None for `main`.
    """

    repo_id: str
    public: bool = False
    revision: str | None = None

    def check(self, name: str) -> None:
        """Raise ConfigError unless repository and branch names are valid; `name` is the setting's."""
        if not is_hub_id(self.repo_id):
            raise ConfigError(
                f"{name}{self.repo_id} is not the name of a repository; expected org/name: letters, digits, '-', '_' "
                "and '.', without '--' and '..', and with neither '-', '.' nor '.git' at an end."
            )
        if self.revision is not None and (not _BRANCH.fullmatch(self.revision) or ".." in self.revision):
            raise ConfigError(f"{self.revision} is not the name of a branch; expected one such as main or v1.0.")


@dataclass(frozen=True)
class PushReport:
    """The result of a push.

    Attributes:
        repo_id: The repository.
        url: The address of the commit.
        is_private: Whether the repository is private.
        written: Size in bytes of each new or changed file of the commit, by name.
        unchanged: The same for files that the repository already had.
        deleted: Files of an earlier model that the commit deletes.
        kept_card: Whether the repository's README.md was kept.
    """

    repo_id: str
    url: str
    is_private: bool
    written: Mapping[str, int]
    unchanged: Mapping[str, int]
    deleted: tuple[str, ...] = ()
    kept_card: bool = False

    def describe(self) -> str:
        """Describe what was pushed, one line each."""
        width = max(map(len, [*self.written, *self.unchanged, *self.deleted]), default=0)
        lines = [f"  {name:<{width}}  {format_size(size)}" for name, size in self.written.items()]
        lines += [f"  {name:<{width}}  unchanged" for name in self.unchanged]
        lines += [f"  {name:<{width}}  deleted: it is of an earlier model" for name in self.deleted]
        if self.kept_card:
            lines.append(f"  {CARD} in the repository was not written by fsdp-shard, so it was kept")
        total = format_size(sum(self.written.values()))
        done = f"{format_count(len(self.written), 'file')}, {total} in {self.url}"
        if not self.written and not self.deleted:
            done = f"nothing has changed since {self.url}"
        return "\n".join([*lines, f"{self.repo_id} ({'private' if self.is_private else 'public'}): {done}"])


class HubRepository:
    """A writable repository, made by `open_repository`.

    Attributes:
        target: The requested target.
        is_private: Whether it is private.
        is_new: Whether it was just created.
    """

    def __init__(self, api: HfApi, target: HubTarget, *, is_private: bool, is_new: bool) -> None:
        self._api, self.target, self.is_private, self.is_new = api, target, is_private, is_new

    def __str__(self) -> str:
        visibility = "private" if self.is_private else "public"
        if self.is_new:
            return f"{self.target.repo_id}: created, {visibility}"
        ignored = "; --public (convert: push_public=true) does not change that" if self.target.public else ""
        return f"{self.target.repo_id}: exists, and stays {visibility}{ignored if self.is_private else ''}"

    def upload(self, files: Mapping[str, Path | bytes], message: str, *, has_own_card: bool) -> PushReport:
        """Make one commit of `files` that also deletes files of another model.

        Args:
            files: Name in the repository -> the file, or its content.
            message: The commit message.
            has_own_card: Whether the user wrote the README.md in `files`, so that it replaces an existing one.

        Raises:
            RemoteError: The hub rejects a request or fails, or its content afterwards differs from what was sent.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        repo_id, revision, what = self.target.repo_id, self.target.revision, f"{self.target.repo_id} is not complete"
        before = self._list(revision)
        kept_card = CARD in files and CARD in before and not has_own_card and CARD_MARK.encode() not in self._read(CARD)
        sent = {name: file for name, file in files.items() if not (kept_card and name == CARD)}
        stale = stale_files(before, sent)
        if MANIFEST in before and MANIFEST not in sent and _is_our_manifest(self._read(MANIFEST)):
            stale = (*stale, MANIFEST)
        operations: list[CommitOperation] = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in sent.items()),
            *(CommitOperationDelete(path_in_repo=name, is_folder=False) for name in stale),
        ]
        commit = request(
            what,
            lambda: self._api.create_commit(repo_id, operations, commit_message=message, revision=revision),
        )
        after = self._list(commit.oid)
        sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in sent.items()}
        for name, size in sizes.items():
            if name not in after or after[name][0] != size:
                found = f"{after[name][0]} bytes of" if name in after else "no"
                raise RemoteError(f"{repo_id} has {found} {name} after the push, expected {size} bytes; push it again.")
        is_same = {name: before.get(name) == after[name] for name in sizes}
        return PushReport(
            repo_id=repo_id,
            url=commit.commit_url,
            is_private=self.is_private,
            written={name: size for name, size in sizes.items() if not is_same[name]},
            unchanged={name: size for name, size in sizes.items() if is_same[name]},
            deleted=stale,
            kept_card=kept_card,
        )

    def _list(self, revision: str | None) -> dict[str, tuple[int, str]]:
        """Return size in bytes and git's digest of each file."""
        from huggingface_hub.hf_api import RepoFile

        repo_id = self.target.repo_id
        found = request(
            f"{repo_id} cannot be listed",
            lambda: list(self._api.list_repo_tree(repo_id, recursive=True, revision=revision)),
        )
        return {one.path: (one.size, one.blob_id) for one in found if isinstance(one, RepoFile)}

    def _read(self, name: str) -> bytes:
        """Read the first bytes of a file in the repository."""
        repo_id, revision = self.target.repo_id, self.target.revision
        with TemporaryDirectory(prefix="fsdp-shard-") as directory:
            file = request(
                f"{name} of {repo_id} cannot be read",
                lambda: self._api.hf_hub_download(repo_id, name, revision=revision, local_dir=directory),
            )
            with open(file, "rb") as stream:
                return stream.read(_MAX_READ)


def open_repository(target: HubTarget) -> HubRepository:
    """Find or create the repository, and check that it is writable.

    Raises:
        ConfigError: There is no token, requests are forbidden, or the repository is public without being asked for.
        RemoteError: The hub rejects the token or the repository, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    require_hub()
    api, repo_id = HfApi(), target.repo_id
    request(f"{repo_id} cannot be pushed to", api.whoami)

    def visibility() -> bool | None:
        try:
            return bool(api.repo_info(repo_id).private)
        except RepositoryNotFoundError:
            return None

    is_private = request(f"{repo_id} cannot be looked up", visibility)
    is_new = is_private is None
    if is_private is False and not target.public:
        raise ConfigError(
            f"{repo_id} exists and is public, so a push would publish the model; allow that with --public "
            "(convert: push_public=true), make the repository private, or give another one."
        )
    if is_new:
        request(f"{repo_id} cannot be created", lambda: api.create_repo(repo_id, private=not target.public))
        # An organization may only allow private repositories.
        is_private = request(f"{repo_id} cannot be looked up", visibility)
        if is_private is False and not target.public:
            raise RemoteError(f"The hub has made {repo_id} public although it was to be private; nothing was pushed.")
    else:
        request(f"{repo_id} cannot be written", lambda: api.auth_check(repo_id, write=True))
    branch = target.revision
    if branch is not None:
        request(
            f"The branch {branch} of {repo_id} cannot be created",
            lambda: api.create_branch(repo_id, branch=branch, exist_ok=True),
        )
    return HubRepository(api, target, is_private=bool(is_private), is_new=is_new)


def is_hub_id(name: str) -> bool:
    """Return whether `name` can name a repository, org/name."""
    return _HUB_ID.fullmatch(name) is not None


def _is_our_manifest(content: bytes) -> bool:
    """Return whether a manifest.json was pushed with a model, and is not a web site's or the like."""
    return b'"kind": ' + json.dumps(KIND).encode() in content
