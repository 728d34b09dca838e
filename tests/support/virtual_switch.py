"""An Ethernet switch with a network interface for each of several hosts: frames go from one host to the others.

Run as a program with the number of hosts and the delay of each frame in milliseconds. It makes the interfaces port0,
port1, ... in the network namespace that it runs in, from which they can be moved to those of the hosts, writes `ready`
and forwards until it is killed. It is there because not every kernel has netem, which delays packets.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_SET_INTERFACE = 0x400454CA  # TUNSETIFF of linux/if_tun.h, and flags: Ethernet frames, without a header of their own
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME_BYTES = 65536


def open_ports(count: int) -> list[int]:
    """Make the interfaces; the files from which their frames are read, and to which they are written."""
    files = []
    for port in range(count):
        files.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(files[-1], _SET_INTERFACE, struct.pack("16sH22x", f"port{port}".encode(), _TAP_WITHOUT_HEADER))
    return files


def forward(files: list[int], delay_seconds: float) -> None:
    """Pass each frame on to all other ports, which drop what is not for them, after a delay."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # when to send, where it came from, the frame
    while True:
        seconds = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        for source in select.select(files, [], [], seconds)[0]:
            with suppress(OSError):  # a link that is down
                waiting.append((time.monotonic() + delay_seconds, source, os.read(source, _FRAME_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            for target in files:
                if target != source:
                    with suppress(OSError):
                        os.write(target, frame)


if __name__ == "__main__":
    opened = open_ports(int(sys.argv[1]))
    print("ready", flush=True)
    forward(opened, float(sys.argv[2]) / 1000)
