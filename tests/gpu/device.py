"""All that the checks ask of a GPU, in one place; with GPU_REHEARSAL=1 a stand-in on the CPU answers.

The stand-in lets every line of every check run where there is no GPU. Its figures mean nothing.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

OUT = Path(os.environ.get("OUT") or Path(__file__).resolve().parent.parent.parent / "build" / "gpu")
IS_REHEARSAL = os.environ.get("GPU_REHEARSAL") == "1"


class Device(Protocol):
    """The device of a check. Bytes and seconds throughout."""

    type: str

    @property
    def name(self) -> str:
        """What the device calls itself."""

    @property
    def torch_device(self) -> torch.device:
        """The first GPU."""

    @property
    def total_bytes(self) -> int:
        """All memory of it."""

    @property
    def used_bytes(self) -> int:
        """What is in use of it, by whomever and for whatever."""

    @property
    def peak_bytes(self) -> int:
        """The peak of what tensors took since `reset`."""

    @property
    def reserved_bytes(self) -> int:
        """What torch's allocator holds, in use or not."""

    def warm(self) -> None:
        """Use the device once, so that what follows need not wait for libraries to load."""

    def restart_peak(self) -> None:
        """Let a new peak begin."""

    def reset(self) -> int:
        """Free what can be freed, let a new peak begin, and return what tensors take now."""

    def limit(self, num_bytes: int) -> None:
        """Let this process have no more memory for tensors than that."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        """The median seconds that the device takes for `work`, after one run that does not count."""

    def only_here(self, **settings: Any) -> dict[str, Any]:
        """Settings that only a GPU has."""


class Gpu:
    """The first GPU that this process sees."""

    type = "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(0)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(0)[1])

    @property
    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(0)
        return int(total - free)

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(0))

    @property
    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(0))

    def warm(self) -> None:
        square = torch.ones(256, 256, device=self.torch_device, dtype=torch.bfloat16)
        float((square @ square).sum())

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(0)

    def reset(self) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(0)
        return int(torch.cuda.memory_allocated(0))

    def limit(self, num_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(num_bytes / self.total_bytes, 0)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        work()
        pairs = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1000

    def only_here(self, **settings: Any) -> dict[str, Any]:
        return settings


class StandIn:
    """The CPU in the place of a GPU: its memory is that of this process, and it has no settings of its own."""

    type = "cpu"
    name = "stand-in on the CPU"
    total_bytes = 8 << 30

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def used_bytes(self) -> int:
        return resident_bytes()

    @property
    def peak_bytes(self) -> int:
        return resident_bytes()

    @property
    def reserved_bytes(self) -> int:
        return resident_bytes()

    def warm(self) -> None:
        pass

    def restart_peak(self) -> None:
        pass

    def reset(self) -> int:
        gc.collect()
        return 0

    def limit(self, num_bytes: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        del repeats
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def only_here(self, **settings: Any) -> dict[str, Any]:
        del settings
        return {}


def open_device() -> Device:
    """The first GPU or, in a rehearsal, its stand-in."""
    return StandIn() if IS_REHEARSAL else Gpu()


def gpu_names() -> list[str]:
    """The GPUs that this process sees. Makes a context, so a process that forks others must not call it."""
    if not torch.cuda.is_available():
        return []
    torch.zeros(1, device="cuda")
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def held_on_gpu(most: int = 3) -> str:
    """The largest tensors on GPUs that Python objects hold, and the types of these: what keeps memory in use."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor) and found.is_cuda]
    tensors.sort(key=lambda tensor: -tensor.nbytes)
    names = []
    for tensor in tensors[:most]:
        holders = {type(holder).__name__ for holder in gc.get_referrers(tensor) if holder is not tensors}
        names.append(f"{list(tensor.shape)} {tensor.dtype} in {sorted(holders)}")
    return "; ".join(names) or "no Python object"


def resident_bytes() -> int:
    """The memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))
