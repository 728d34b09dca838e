"""What this machine has for its ranks, GPUs and cores, and the presets of devices."""

import os
from typing import Any

from fsdp_shard.utils import shipped


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_number(local_rank: int) -> int:
    """Return the number of the GPU of the rank with this number on its machine; 0 if each rank sees only its own."""
    return 0 if count_gpus() == 1 else local_rank


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def device_preset(name: str) -> dict[str, Any]:
    """Return the figures of conf/device/NAME.yaml, by the names of the settings `device.*`."""
    from omegaconf import OmegaConf

    # Not PyYAML, which takes 989.4e12 for text.
    values: Any = OmegaConf.to_container(OmegaConf.load(shipped("conf") / "device" / f"{name}.yaml"))
    del values["defaults"]
    return dict(values)
