"""Memory that this process uses, whether freed memory is kept or returned to the system, and what a GPU copies from."""

from __future__ import annotations

import ctypes
import mmap
import resource
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from fsdp_shard.utils.text import format_size

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had in RAM so far, in bytes.

    It comes from /proc if there is one: `getrusage` also counts what the parent had when it started this process.
    """
    if (kibibytes := proc_field("status", "VmHWM")) is not None:
        return kibibytes * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_resident_bytes() -> bool:
    """Have `peak_resident_bytes` count from now on; return False, and change nothing, where the system cannot."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def resident_bytes() -> int:
    """Return the memory that this process has in RAM now, in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def device_peak_bytes(device_type: str) -> int:
    """Return the most memory allocated on the current GPU so far, in bytes; for the CPU, the peak in RAM."""
    if device_type != "cuda":
        return peak_resident_bytes()
    import torch

    return torch.cuda.max_memory_allocated()


def reset_device_peak(device_type: str) -> None:
    """Have `device_peak_bytes` count from now on, where the system can."""
    if device_type != "cuda":
        reset_peak_resident_bytes()
        return
    import torch

    torch.cuda.reset_peak_memory_stats()


def disk_bytes_read() -> int:
    """Return the bytes that this process has read from a disk, without the page cache; 0 if unknown."""
    return proc_field("io", "read_bytes") or 0


def give_back_free_memory() -> None:
    """Return freed memory of this process to the system, if the C library can.

    glibc keeps memory that was freed below something still in use: units that are sharded one after the other would
    add up to a whole model.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep freed memory in this process for later allocations from now on, if the C library is glibc.

    By default glibc returns the memory of large tensors to the system when they are freed, and the system clears every
    page that the next ones touch, which takes a tenth of the time of a training step on the CPU. Tensors of more than
    32 MB, the limit of glibc, are still returned: they are what a peak is made of.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def proc_field(file: str, field: str, pid: int | str = "self") -> int | None:
    """Return the number after `field:` in a file of /proc/PID; None if there is none."""
    try:
        with open(f"/proc/{pid}/{file}", encoding="ascii", errors="replace") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        return None


def empty_pages(num_bytes: int) -> torch.Tensor:
    """Return uninitialized CPU memory [num_bytes], uint8, that shares no page with any other.

    What is on a page with something that is locked cannot be locked, and a GPU cannot copy what is locked in part.
    """
    import torch

    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def lock_pages(memory: torch.Tensor, device: torch.device) -> bool:
    """Page-lock `memory` until this tensor and all views of it are deleted.

    `torch.empty(pin_memory=True)` would take the next power of two. If the driver refuses, a warning says so: copies
    are slower, and nothing else changes.

    Args:
        memory: Contiguous CPU memory on pages of its own (`empty_pages`).
        device: The GPU of the copies.

    Returns:
        Whether it is page-locked.
    """
    import torch

    if not memory.nbytes:
        return False
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            _clear_error(device)
            warnings.warn(
                f"The driver of {device} did not page-lock {format_size(memory.nbytes)} of CPU memory, so copies "
                f"from or to it are slower; `ulimit -l` may be too small.",
                stacklevel=2,
            )
            return False
    # Or these addresses would count as locked when other memory comes to lie there, and locking that would fail.
    weakref.finalize(memory, _unlock, memory.data_ptr(), device).atexit = False
    return True


def _unlock(address: int, device: torch.device) -> None:
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()  # a copy may still use it
        torch.cuda.cudart().cudaHostUnregister(address)


def _clear_error(device: torch.device) -> None:
    """Have the error of the last call reported here: else the next kernel that is launched reports it as its own."""
    import torch

    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)  # a kernel, whatever fills memory
