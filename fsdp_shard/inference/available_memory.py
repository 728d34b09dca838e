"""What this machine has free, and which of its devices a plan may name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.config import Device

_KEPT_FREE = 0.1  # for activations, the KV cache and everybody else
_CGROUP = Path("/sys/fs/cgroup")


def machine_budgets(local_rank: int = 0, num_ranks: int = 1) -> dict[Device, int]:
    """Bytes to plan with on each GPU and on the CPU: nine tenths of what is free now.

    One of several ranks has one GPU, where there are any, and its part of the CPU's memory.
    """
    import torch

    budgets: dict[Device, int] = {}
    if torch.cuda.is_available():
        ordinals = range(torch.cuda.device_count()) if num_ranks == 1 else [local_rank]
        budgets = {ordinal: _part(torch.cuda.mem_get_info(ordinal)[0]) for ordinal in ordinals}
    return budgets | {"cpu": _part(free_cpu_bytes() // num_ranks)}


def check_devices(devices: Iterable[Device]) -> None:
    """Raise PlanError when one of `devices` is a GPU that this machine does not have."""
    import torch

    wanted = sorted(device for device in devices if isinstance(device, int))
    count = torch.cuda.device_count() if wanted and torch.cuda.is_available() else 0
    if wanted and wanted[-1] >= count:
        has = f"has only {count} GPUs, numbered from 0" if count else "has no GPU that torch can use"
        raise PlanError(f"The device map names GPU {wanted[-1]}, but this machine {has}; name devices that are there.")


def free_cpu_bytes() -> int:
    """Memory that this process could still take: what the kernel calls available, within the cgroup's limit."""
    limits = [_available_bytes(), _cgroup_free_bytes()]
    return min(limit for limit in limits if limit is not None)


def peak_gpu_bytes() -> dict[int, int]:
    """The most that this process has had allocated on each GPU."""
    import torch

    return {ordinal: torch.cuda.max_memory_allocated(ordinal) for ordinal in range(torch.cuda.device_count())}


def _part(num_bytes: int) -> int:
    return int(num_bytes * (1 - _KEPT_FREE))


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no Linux: half of what is built in


def _cgroup_free_bytes() -> int | None:
    """What a container (cgroup v2) may still take; its page cache does not count, for the kernel gives that up."""
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, limit - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None  # no such file, or `max`: no limit
