"""A model hub to push to: what huggingface_hub asks of one for uploads and downloads, with failures on demand.

Files of 1,000 bytes and more are large ones, uploaded by git-lfs's protocol; every request must have the token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.support.commands import FSDP_SHARD, Done, run

TOKEN = "hf_standinstandinstandin"
_LARGE = 1000
_COMMIT_ID = "%040x"


@dataclass
class Repository:
    """A repository: its commits by branch, each the content of all files by name."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        """Those of `main`."""
        return self.commits[self.branches["main"]]

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        oid = _COMMIT_ID % (len(self.commits) + 1)
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid


@dataclass(frozen=True)
class Failure:
    """How one request is answered: with a status, or by cutting the connection after some bytes of its body."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    cut_after: int | None = None


class HubStandIn:
    """Attributes: `repositories` by name; `asked`, (method, path) of all requests; `put`, bytes received of each large
    file by its digest, complete or not; `fail`, which may answer a request, given method, path and how often that was
    asked before; `reached`, set when a request was cut or stalled.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str]] = []
        self.put: dict[str, int] = {}
        self.blobs: dict[str, bytes] = {}
        self.fail: Callable[[str, str, int], Failure | None] = lambda method, path, count: None
        self.reached = threading.Event()
        self.stalls = False
        self.released = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def variables(self) -> dict[str, str]:
        """What points huggingface_hub here."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def create(self, name: str, *, private: bool, **files: bytes) -> Repository:
        repository = Repository(private)
        repository.commit("main", {".gitattributes": b"", **files})
        self.repositories[name] = repository
        return repository


@contextmanager
def serve_hub() -> Iterator[HubStandIn]:
    hub = HubStandIn()
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        hub.server.shutdown()
        thread.join()
        hub.server.server_close()


def push_variables(hub: HubStandIn, home: Path) -> dict[str, str]:
    cache = {"HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache")}
    return {**hub.variables, **cache, "PYTHONWARNINGS": "ignore", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def push(hub: HubStandIn, home: Path, *arguments: str | Path, **variables: str) -> Done:
    return run([*FSDP_SHARD, "push", *arguments], home, **(push_variables(hub, home) | variables))


def work_directories(home: Path) -> list[Path]:
    return list((home / "cache" / "fsdp-shard" / "push").glob("[!.]*"))


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle("GET")

    def do_HEAD(self) -> None:
        self._handle("HEAD")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PUT(self) -> None:
        self._handle("PUT")

    def _handle(self, method: str) -> None:
        path = unquote(self.path.split("?")[0])
        count = self.hub.asked.count((method, path))
        self.hub.asked.append((method, path))
        failure = self.hub.fail(method, path, count)
        if failure is not None and failure.cut_after is not None:
            self._cut(path, failure.cut_after)
            return
        body = self._body()
        if failure is not None:
            self._send(failure.status, {"error": failure.message}, **failure.headers)
        elif method == "PUT":
            digest = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == digest
            self.hub.put[digest] = self.hub.put.get(digest, 0) + len(body)
            self.hub.blobs[digest] = body
            self._send(200, {})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid credentials in Authorization header"})
        else:
            self._route(path, body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def _cut(self, path: str, num_bytes: int) -> None:
        """Read a part of the body and close the connection; or go on holding it, if the hub `stalls`."""
        digest = path.rpartition("/")[2]
        self.hub.put[digest] = self.hub.put.get(digest, 0) + len(self.rfile.read(num_bytes))
        self.hub.reached.set()
        if self.hub.stalls:
            self.hub.released.wait(60)
        self.close_connection = True
        self.connection.close()

    def _send(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _route(self, path: str, body: bytes) -> None:
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            self._send(200, {"name": "org", "type": "user", "orgs": []})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        else:
            is_api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if is_api else parts[:2]).removesuffix(".git")
            repository = self.hub.repositories.get(name)
            rest = parts[4:] if is_api else parts[2:]
            if repository is None:
                self._send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            elif rest[:1] == ["resolve"]:
                self._resolve(repository, rest[1], "/".join(rest[2:]))
            elif rest[:1] == ["info"]:
                self._batch(json.loads(body))
            else:
                self._of_repository(name, repository, rest, body)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repositories:
            self._send(409, {"error": "You already created this model repo"})
            return
        is_private = wanted.get("private", wanted.get("visibility") == "private")
        self.hub.create(name, private=bool(is_private))
        self._send(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def _of_repository(self, name: str, repository: Repository, rest: list[str], body: bytes) -> None:
        match rest:
            case ["auth-check", *_]:
                self._send(200, {})
            case [] | ["revision", _]:
                oid = self._commit_of(repository, rest[1] if rest else "main")
                if oid is not None:
                    self._send(200, {"id": name, "sha": oid, "private": repository.private, "siblings": []})
            case ["branch", branch]:
                if branch in repository.branches:
                    self._send(409, {"error": "Reference already exists"})
                else:
                    repository.branches[branch] = repository.branches["main"]
                    self._send(200, {})
            case ["tree", revision]:
                oid = self._commit_of(repository, revision)
                if oid is not None:
                    self._send(200, [_entry(*item) for item in repository.commits[oid].items()])
            case ["preupload", branch]:
                self._preupload(repository.commits[repository.branches[branch]], json.loads(body)["files"])
            case ["commit", branch]:
                self._take_commit(name, repository, branch, body)
            case _:
                self._send(404, {"error": f"no such request: {rest}"})

    def _preupload(self, files: dict[str, bytes], wanted: list[dict[str, Any]]) -> None:
        answers = []
        for one in wanted:
            is_large = one["size"] >= _LARGE
            answer = {"path": one["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
            content = files.get(one["path"])
            if content is not None:
                answer["oid"] = hashlib.sha256(content).hexdigest() if is_large else _blob(content)
            answers.append(answer)
        self._send(200, {"files": answers})

    def _commit_of(self, repository: Repository, revision: str) -> str | None:
        oid = repository.branches.get(revision, revision)
        if oid in repository.commits:
            return oid
        self._send(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        return None

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = [
            one
            if one["oid"] in self.hub.blobs
            else {**one, "actions": {"upload": {"href": f"{self.hub.url}/put/{one['oid']}"}}}
            for one in wanted["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def _take_commit(self, name: str, repository: Repository, branch: str, body: bytes) -> None:
        files = dict(repository.commits[repository.branches[branch]])
        for line in body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "header":
                repository.messages.append(value["summary"])
            elif row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif row["key"] == "deletedFile":
                del files[value["path"]]
        oid = repository.commit(branch, files)
        self._send(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    def _resolve(self, repository: Repository, revision: str, name: str) -> None:
        oid = self._commit_of(repository, revision)
        if oid is None:
            return
        content = repository.commits[oid].get(name)
        if content is None:
            self._send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            return
        self._send(200, content, ETag=f'"{_blob(content)}"', X_Repo_Commit=oid)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}
    if len(content) >= _LARGE:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry


def _blob(content: bytes) -> str:
    """The name that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
