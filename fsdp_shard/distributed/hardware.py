"""What this machine has for its ranks: GPUs and cores."""

import os


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
