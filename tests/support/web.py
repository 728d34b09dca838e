"""A web server that sends the files of a directory, as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(SimpleHTTPRequestHandler):
    """Sends files as a whole only, and prints nothing."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed."""


@contextmanager
def served(directory: Path, handler: type[Handler] = Handler) -> Iterator[str]:
    """The address at which the files of `directory` are."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=directory))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
