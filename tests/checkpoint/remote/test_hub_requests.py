"""Which errors of a request to the hub are of the connection."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_shard.checkpoint.remote.hub_requests import request
from fsdp_shard.errors import RemoteError


def _connect() -> object:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    return socket.create_connection(address)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Path("absent").read_bytes, r"the upload failed \(FileNotFoundError"),
        (_connect, r"the connection to the hub failed \(ConnectionRefusedError"),
        (lambda: socket.getaddrinfo("127.0.0.1", "no-such-service"), r"the connection to the hub failed \(gaierror"),
    ],
)
def test_only_errors_of_the_connection_are_called_so(call: Callable[[], object], said: str) -> None:
    with pytest.raises(RemoteError, match=said):
        request("org/name is not complete", call)
