"""Hosts on one machine: network namespaces with names and addresses of their own, behind a switch that can delay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.commands import ROOT, environment

_SWITCH = Path(__file__).with_name("virtual_switch.py")


@dataclass(frozen=True)
class Host:
    """A host that commands can be started on.

    Attributes:
        name: Its host name, which all hosts resolve.
        address: Its only address beside the loopback's.
        namespace: Its network namespace.
        names: A file for /etc/hosts of all hosts.
    """

    name: str
    address: str
    namespace: str
    names: Path

    def start(self, command: Sequence[str | Path], cwd: Path, **variables: str) -> subprocess.Popen[str]:
        """Start `command` there, with its standard output and error as one text."""
        # A host name and /etc/hosts of its own, seen by this process and its children only.
        script = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        own = ["unshare", "--uts", "--mount", "sh", "-c", script, self.name, self.names]
        return subprocess.Popen(
            [str(part) for part in (*_in_namespace(self.namespace), *own, *command)],
            cwd=cwd,
            env=environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def set_link(self, state: str) -> None:
        """Set the link to the switch `up` or `down`; connections stay, and nothing passes."""
        _ip("-n", self.namespace, "link", "set", "eth0", state)


@contextmanager
def hosts(count: int, directory: Path, delay_ms: float = 0) -> Iterator[list[Host]]:
    """That many hosts with addresses 10.77.0.1, 10.77.0.2, ..., of which none reaches anything else.

    Args:
        count: Number of hosts.
        directory: Where the file with their names is written.
        delay_ms: How long the switch holds each frame, in milliseconds.
    """
    prefix = f"fsdp-shard-{os.getpid()}"
    switch, names = f"{prefix}-switch", directory / "hosts"
    made = [Host(f"host{at}", f"10.77.0.{at + 1}", f"{prefix}-{at}", names) for at in range(count)]
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made))
    namespaces = [switch, *(host.namespace for host in made)]
    process = None
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
        command = [*_in_namespace(switch), sys.executable, str(_SWITCH), str(count), str(delay_ms)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for at, host in enumerate(made):
            _ip("-n", switch, "link", "set", f"port{at}", "netns", host.namespace, "name", "eth0")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            host.set_link("up")
        yield made
    finally:
        if process is not None:
            process.kill()
            process.communicate()
        for namespace in namespaces:
            _ip("netns", "delete", namespace, check=False)


@cache
def why_no_hosts() -> str:
    """Why hosts cannot be made here, or an empty text: they need root, `ip`, and namespaces and interfaces to make."""
    if missing := [name for name in ("ip", "unshare", "nsenter", "mount") if shutil.which(name) is None]:
        return f"needs {', '.join(missing)} (of the packages iproute2 and util-linux)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "tuntap", "add", "dev", "port0", "mode", "tap"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"may not make network namespaces here: {tried.stderr.strip()}"


def _in_namespace(namespace: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{namespace}"]


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 or not check, f"ip {' '.join(arguments)}: {done.stderr}"
