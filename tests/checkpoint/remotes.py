"""Remote stores to test with: `shelf://`, a directory, and moto's S3 server where it is installed.

`pip install s3fs "moto[s3]" flask flask-cors` lets the tests of S3 run; python-dateutil must be older than 3 for it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Shelf(LocalFileSystem):
    """`shelf:///some/directory`, which keeps objects as files. `before` is called with each operation and its path."""

    protocol = ("shelf",)
    before: Callable[[str, str], None] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("shelf://")))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        _told("put", rpath)
        super().put_file(lpath, rpath, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        _told("pipe", path)
        super().pipe_file(path, value, mode=mode, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        _told("ls", path)
        return super().ls(path, detail=detail, **options)


def _told(operation: str, path: str) -> None:
    if Shelf.before is not None:
        Shelf.before(operation, path)


fsspec.register_implementation("shelf", Shelf, clobber=True)


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of an empty bucket of a real S3 server; what finds and opens it is in the environment."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a-key-of-the-tests",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        bucket = f"bucket-{uuid.uuid4()}"  # what a server of moto's has outlives it
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
        yield f"s3://{bucket}"
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def shelf(place: Path) -> str:
    """The address of an empty shelf."""
    (place / "shelf").mkdir()
    return f"shelf://{place}/shelf"
