"""How much memory this process has in use, and how freed memory is kept or given back."""

from __future__ import annotations

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, shared libraries and forked pages included."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most memory that this process has had in RAM so far.

    From /proc where there is one: `getrusage` also counts what the parent had when it started us.
    """
    return _status("VmHWM")


def device_peak_bytes(device_type: str) -> int:
    """The most memory that this process has had allocated on its current GPU; on the CPU, the peak of its RAM."""
    if device_type != "cuda":
        return peak_resident_bytes()
    import torch

    return torch.cuda.max_memory_allocated()


def disk_bytes_read() -> int:
    """What this process has had read from a disk so far; what the page cache had does not count. 0 where not known."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))
    except (OSError, StopIteration):
        return 0


def give_back_free_memory() -> None:
    """Return freed memory of this process to the machine, where the C library can.

    glibc keeps what was freed below something still in use: whole units that are sharded one after the other would
    add up to a whole model.
    """
    import ctypes

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for what comes next, where it is glibc: of the process, from now on.

    It hands large tensors' memory back when they are freed, and the system clears every page that the next ones touch:
    a tenth of the time of a training step on the CPU went there. Tensors beyond 32 MB, the most that it lets us ask
    for, still come and go: they are what a peak is made of.
    """
    import ctypes

    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def _status(field: str) -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        import resource
        import sys

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
