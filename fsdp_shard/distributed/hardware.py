"""The GPUs, cores and NUMA nodes of this machine, the device presets, and the names that torch gives to GPUs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.distributed.config import LaunchConfig
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import shipped_directory

if TYPE_CHECKING:
    import torch

_NUMA_NODES = Path("/sys/devices/system/node")
# torch's names for the GPUs of the presets. Other GPUs of the same family (PCIe, NVL, 40 GB) have other figures.
_PRESETS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}
# For the first pattern that matches: the preset that holds the dense bfloat16 operations per second or, without a
# preset, their number from the data sheets of NVIDIA and AMD.
_PEAK_FLOPS: tuple[tuple[str, str | float], ...] = (
    (r"\bGB200\b", 2.5e15),
    (r"\bB200\b", "b200"),
    (r"\bH200\b|\bGH200\b", "h200"),
    (r"\bH100\b.*\bPCIe\b", 756e12),
    (r"\bH100\b.*\bNVL\b", 835e12),
    (r"\bH100\b", "h100"),
    (r"\bA100\b", "a100"),
    (r"\bL40S\b", "l40s"),
    (r"\bRTX 4090$", "rtx4090"),  # neither the 4090 D nor the laptop GPU
    (r"\bL4\b", 121e12),
    (r"\bA10\b", 125e12),
    (r"\bMI300X\b", 1307.4e12),
    (r"\bMI250X\b", 191.5e12),
)


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_number(local_rank: int) -> int:
    """Return the GPU number for a local rank; 0 if each rank sees only its own GPU."""
    return 0 if count_gpus() == 1 else local_rank


def init_device(device: str, local_rank: int) -> torch.device:
    """The device of this rank; where its launcher shows each rank one GPU of its own, that is number 0."""
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_visible, index = count_gpus(), gpu_number(local_rank)
    if index >= num_visible:
        raise ConfigError(
            f"The rank with LOCAL_RANK={local_rank} has no GPU: it sees {num_visible} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}). Start as many ranks on a machine "
            f"as it has GPUs, or show each rank one of its own."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def can_bind_to_numa_nodes() -> bool:
    """Return whether torch can bind ranks: it requires the program numactl, although it does not run it."""
    return shutil.which("numactl") is not None


def wants_numa_binding(settings: LaunchConfig) -> bool:
    """Return whether ranks started here should be bound, if possible."""
    binding, num_gpus = settings.numa_binding, 0 if settings.device == "cpu" else count_gpus()
    return binding != "none" and num_gpus >= (1 if binding == "node" else 2)


def describe_missing_numactl(settings: LaunchConfig) -> list[str]:
    """On a rank that our launcher started, report that a missing program prevents the binding, if that matters."""
    from fsdp_shard.distributed.key_value_store import ATTEMPT

    has_one_node = len(list(_NUMA_NODES.glob("node[0-9]*"))) < 2
    if ATTEMPT not in os.environ or has_one_node or can_bind_to_numa_nodes() or not wants_numa_binding(settings):
        return []
    return [
        f"launch.numa_binding={settings.numa_binding} binds no rank to the processors near its GPU: the program "
        f"numactl is not installed (apt-get install numactl)"
    ]


def device_preset(name: str) -> dict[str, Any]:
    """Return the values in conf/device/NAME.yaml, by the names of the `device.*` settings."""
    from omegaconf import OmegaConf

    # Not PyYAML, which reads 989.4e12 as text.
    values: Any = OmegaConf.to_container(OmegaConf.load(shipped_directory("conf") / "device" / f"{name}.yaml"))
    del values["defaults"]
    return dict(values)


def preset_of(gpu: str) -> str | None:
    """Return the device preset of a GPU, given its name in torch; None if no preset has all of its figures."""
    return _PRESETS.get(gpu)


def peak_flops(gpu: str) -> float | None:
    """Return the dense bfloat16 operations per second of a GPU, given its name in torch; None if it is unknown."""
    peak = next((peak for pattern, peak in _PEAK_FLOPS if re.search(pattern, gpu, re.IGNORECASE)), None)
    return float(device_preset(peak)["bf16_flops"]) if isinstance(peak, str) else peak
