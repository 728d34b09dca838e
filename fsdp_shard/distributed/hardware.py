"""The GPUs and cores of this machine, and the device presets."""

import os
from typing import Any

from fsdp_shard.utils import shipped


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_number(local_rank: int) -> int:
    """Return the GPU number for a local rank; 0 if each rank sees only its own GPU."""
    return 0 if count_gpus() == 1 else local_rank


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def device_preset(name: str) -> dict[str, Any]:
    """Return the values in conf/device/NAME.yaml, by the names of the `device.*` settings."""
    from omegaconf import OmegaConf

    # Not PyYAML, which reads 989.4e12 as text.
    values: Any = OmegaConf.to_container(OmegaConf.load(shipped("conf") / "device" / f"{name}.yaml"))
    del values["defaults"]
    return dict(values)
