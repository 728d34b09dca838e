"""The GPUs and cores of this machine, and the device presets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import shipped

if TYPE_CHECKING:
    import torch


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


def device_preset(name: str) -> dict[str, Any]:
    """Return the values in conf/device/NAME.yaml, by the names of the `device.*` settings."""
    from omegaconf import OmegaConf

    # Not PyYAML, which reads 989.4e12 as text.
    values: Any = OmegaConf.to_container(OmegaConf.load(shipped("conf") / "device" / f"{name}.yaml"))
    del values["defaults"]
    return dict(values)
