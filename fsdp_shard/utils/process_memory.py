"""Memory of this process: its use, keeping or returning freed memory, and page-locked memory for GPU copies."""

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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a lack of memory of the machine or a GPU; torch has no class for the first."""
    is_said = any(phrase in str(error) for phrase in ("can't allocate memory", "out of memory"))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_said)


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had in RAM so far, in bytes.

    The figure comes from /proc if it exists: `getrusage` also counts the parent's memory when it started this process.
    """
    if (kibibytes := proc_field("status", "VmHWM")) is not None:
        return kibibytes * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_resident_bytes() -> bool:
    """Make `peak_resident_bytes` count from now on; return False and change nothing where the system cannot."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def resident_bytes() -> int:
    """Return the current resident memory of this process, in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def device_peak_bytes(device_type: str) -> int:
    """Return the most memory allocated on the current GPU so far, in bytes; for the CPU, the peak in RAM."""
    if device_type != "cuda":
        return peak_resident_bytes()
    import torch

    return torch.cuda.max_memory_allocated()


def reset_device_peak(device_type: str) -> None:
    """Make `device_peak_bytes` count from now on, where the system can."""
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

    glibc keeps freed memory below an allocation still in use: units sharded one after the other would add up to a whole
    model.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep freed memory in this process for later allocations from now on, if the C library is glibc.

    By default glibc returns the memory of large tensors to the system when they are freed, and the system clears every
    page that later ones touch, which takes a tenth of a training step on the CPU. Tensors over 32 MB, glibc's limit,
    are still returned: peaks consist of them.
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

    Memory on a page that is partly locked cannot be locked, and a GPU cannot copy partly locked memory.
    """
    import torch

    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def lock_pages(memory: torch.Tensor, device: torch.device) -> bool:
    """Page-lock `memory` until this tensor and all views of it are deleted. Forked processes do not have it.

    `torch.empty(pin_memory=True)` would allocate the next power of two. If the driver refuses, a warning is issued and
    copies are slower; nothing else changes.

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
    # A fork copies such pages at once, as a GPU may write into them, and no child needs them.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), ctypes.c_int(mmap.MADV_DONTFORK)
    )
    # Otherwise these addresses would still count as locked for later memory there, and locking it would fail.
    weakref.finalize(memory, _unlock, memory.data_ptr(), device).atexit = False
    return True


def _unlock(address: int, device: torch.device) -> None:
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()  # a copy may still use it
        torch.cuda.cudart().cudaHostUnregister(address)


def _clear_error(device: torch.device) -> None:
    """Make the last call's error appear here: otherwise the next kernel launch reports it as its own."""
    import torch

    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)  # any kernel
