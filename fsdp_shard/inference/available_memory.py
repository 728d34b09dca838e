"""Queries the memory, GPUs, threads and disk space available on this machine."""

import os
import resource
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from fsdp_shard.distributed import gpu_number
from fsdp_shard.errors import PlanError
from fsdp_shard.inference.config import Device
from fsdp_shard.utils import format_count, nearest_existing

_RESERVED = 0.1  # for activations, the KV cache and other processes
_CGROUP = Path("/sys/fs/cgroup")


def machine_budgets(local_rank: int = 0, num_ranks: int = 1, *, use_gpus: bool = True) -> dict[Device, int]:
    """Return the bytes to plan with on each GPU and the CPU: nine tenths of the currently free memory.

    Args:
        local_rank: The index of this rank on the machine.
        num_ranks: Number of ranks on the machine; each of several has one GPU and its share of the CPU memory.
        use_gpus: False for ranks without GPUs (`launch.device=cpu`).

    Returns:
        GPU number or `cpu` -> bytes.
    """
    import torch

    budgets: dict[Device, int] = {}
    if use_gpus and torch.cuda.is_available():
        ordinals = range(torch.cuda.device_count()) if num_ranks == 1 else [gpu_number(local_rank)]
        budgets = {ordinal: _part(torch.cuda.mem_get_info(ordinal)[0]) for ordinal in ordinals}
    return budgets | {"cpu": _part(free_cpu_bytes() // num_ranks)}


def check_devices(devices: Iterable[Device]) -> None:
    """Raise PlanError if one of `devices` is a GPU that this machine does not have."""
    import torch

    wanted = sorted(device for device in devices if isinstance(device, int))
    count = torch.cuda.device_count() if wanted and torch.cuda.is_available() else 0
    if wanted and wanted[-1] >= count:
        has = f"has only {format_count(count, 'GPU')}, numbered from 0" if count else "has no GPU that torch can use"
        raise PlanError(f"The device map names GPU {wanted[-1]}, but this machine {has}; name existing devices.")


def free_cpu_bytes() -> int:
    """Bytes that this process can still allocate: what the kernel calls available, within the cgroup's limit."""
    return int(min(psutil.virtual_memory().available, _cgroup_free_bytes()))


def free_threads() -> int:
    """Number of threads that this process can still start, by the limits of its user and cgroup."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    allowed = sys.maxsize if limit == resource.RLIM_INFINITY or os.geteuid() == 0 else limit
    for group in (_CGROUP, _CGROUP / "pids"):
        with suppress(OSError, ValueError):  # no such file, or `max`: no limit
            most = int((group / "pids.max").read_text(encoding="ascii"))
            allowed = min(allowed, most - int((group / "pids.current").read_text(encoding="ascii")))
    return max(allowed, 0)


def free_disk_bytes(directory: Path) -> int:
    """Free bytes on the disk where `directory` is, or would be."""
    return shutil.disk_usage(nearest_existing(directory)).free


def _part(num_bytes: int) -> int:
    return int(num_bytes * (1 - _RESERVED))


def _cgroup_free_bytes() -> int:
    """Bytes that a container (cgroup v2) may still use; its page cache does not count, as the kernel can drop it."""
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, limit - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return sys.maxsize  # no such file, or `max`: no limit
