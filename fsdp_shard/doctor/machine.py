"""Checks this machine as ranks would find it: library versions, cores, memory, GPUs."""

import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from fsdp_shard.distributed import LaunchConfig, check_machine, count_gpus, num_cores, uses_gpus
from fsdp_shard.doctor.findings import Finding, local_ranks, ok, problem, warning
from fsdp_shard.inference import free_cpu_bytes
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.utils import format_count, format_size, installed_versions

_SHOWN = ("torch", "transformers", "accelerate", "datasets", "safetensors", "hydra-core")
_SHARED_MEMORY_BYTES = 1 << 30  # for a machine's GPUs; containers have 64 MB by default
_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the most important libraries that are installed."""
    return {"python": platform.python_version(), **installed_versions(_SHOWN)}


def check_software(requirements: Iterable[str] | None = None) -> Iterator[Finding]:
    """Compare the installed libraries with this package's requirements, or with `requirements`."""
    if requirements is None:
        try:
            requirements = metadata.requires("fsdp-shard") or ()
        except metadata.PackageNotFoundError:
            yield warning("fsdp-shard itself is not installed, so versions of libraries cannot be compared.")
            requirements = ()
    unmet = [text for text in map(_unmet, map(Requirement, requirements)) if text]
    if unmet:
        yield problem(f"{'; '.join(unmet)}. Install the required versions, preferably with constraints.txt.")
    yield ok(", ".join(f"{name} {version}" for name, version in versions().items()))


def _unmet(requirement: Requirement) -> str | None:
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed, but {requirement} is required"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement.name} {version} is installed, but {requirement} is required"


def check_hardware(launch: LaunchConfig, shard: ShardConfig) -> Iterator[Finding]:
    """Check that there is a device for each rank, and find anything that would slow ranks down."""
    yield from _hidden_gpus(launch)
    check_machine(launch)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = f"{format_size(free_cpu_bytes())} of {format_size(total)} of memory free"
    yield ok(f"{platform.node()}: {format_count(num_cores(), 'core')}, {memory}, {_gpus()}")
    yield from _gpu_limits(launch) if uses_gpus(launch) else _cpu_limits(launch, shard)


def _hidden_gpus(launch: LaunchConfig) -> Iterator[Finding]:
    """Find why torch sees no GPU although a GPU driver is loaded."""
    if launch.device == "cpu" or count_gpus() or not _DRIVER.exists():
        return
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} was built without CUDA; install a build with it"
    elif visible is not None:
        why = f"CUDA_VISIBLE_DEVICES={visible!r} hides them or names others; unset it, or name those that exist"
    else:
        why = f"the driver is perhaps older than CUDA {torch.version.cuda} of torch {torch.__version__}; see nvidia-smi"
    yield warning(f"this machine has an NVIDIA driver ({_DRIVER}), but torch finds no GPU: {why}.")


def _gpus() -> str:
    import torch

    count = count_gpus()
    found = [torch.cuda.get_device_properties(ordinal) for ordinal in range(count)]
    named = ", ".join(f"{each.name} with {format_size(each.total_memory)}" for each in found)
    return f"{format_count(count, 'GPU')} ({named})" if count else "no GPU"


def _gpu_limits(launch: LaunchConfig) -> Iterator[Finding]:
    num_ranks, named = local_ranks(launch)
    if (count := count_gpus()) > num_ranks:
        yield warning(f"{named} leaves {count - num_ranks} of {count} GPUs idle.")
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else _SHARED_MEMORY_BYTES
    if num_ranks > 1 and shared < _SHARED_MEMORY_BYTES:
        yield warning(
            f"/dev/shm has only {format_size(shared)}; GPUs of a machine that cannot access each other communicate "
            f"through it. Give the container more (docker run --shm-size=8g)."
        )


def _cpu_limits(launch: LaunchConfig, shard: ShardConfig) -> Iterator[Finding]:
    num_ranks, named = local_ranks(launch)
    if num_ranks > num_cores():
        yield warning(f"{named} is more than the {format_count(num_cores(), 'core')} they run on.")
    if shard.param_dtype != "float32" and not _computes_in_bfloat16():
        yield warning(
            f"this CPU has no instructions for shard.param_dtype={shard.param_dtype}, which is many times slower than "
            f"float32 here; set shard=float32."
        )


def _computes_in_bfloat16() -> bool:
    """Whether the CPU's flags include matrix products in bfloat16; True if the flags are unknown."""
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return True
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), None)
    return flags is None or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)
