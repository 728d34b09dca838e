"""How much memory this rank has held, measured where the model lives."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held since the process began: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most resident memory of this process since it began.

    Linux's VmHWM where there is one: unlike getrusage's figure it starts afresh with a new program.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    if (match := re.search(r"VmHWM:\s*(\d+) kB", status)) is not None:
        return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
