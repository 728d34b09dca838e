"""A model hub of one repository, `org/name`, which lies in a directory: what huggingface_hub asks of one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves `repository` at `url`.

    `served` are the names of the files of which the content was sent, `asked` the paths of all requests.
    """

    def __init__(self, repository: Path) -> None:
        self.served: list[str] = []
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(with_content=False)

            def do_GET(self) -> None:
                self._answer(with_content=True)

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _answer(self, with_content: bool) -> None:
                path = self.path.split("?")[0]
                hub.asked.append(path)
                name = path.removeprefix(f"/org/name/resolve/{_COMMIT}/")
                if path.startswith("/api/models/org/name"):
                    content = json.dumps(_tree(repository) if "/tree/" in path else _info(repository)).encode()
                elif name != path and (repository / name).is_file():
                    content = (repository / name).read_bytes()
                    if with_content:
                        hub.served.append(name)
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{_blob(content)}"')
                self.send_header("X-Repo-Commit", _COMMIT)
                self.end_headers()
                if with_content:
                    self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def serve(repository: Path) -> Iterator[Hub]:
    hub = Hub(repository)
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        thread.join()
        hub.server.server_close()


def _names(repository: Path) -> list[str]:
    return sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())


def _info(repository: Path) -> dict[str, object]:
    return {"id": "org/name", "sha": _COMMIT, "siblings": [{"rfilename": name} for name in _names(repository)]}


def _tree(repository: Path) -> list[dict[str, object]]:
    contents = {name: (repository / name).read_bytes() for name in _names(repository)}
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}
        for name, content in contents.items()
    ]


def _blob(content: bytes) -> str:
    """The name that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
