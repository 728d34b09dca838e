"""Tensors of every awkward kind, whole and as DTensors: what each reader of distributed checkpoints must get right."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.files import random_tensor

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
]


def tensors() -> dict[str, tuple[torch.Tensor, str]]:
    """name -> (tensor, on which dims it is cut; "-" where a rank keeps it whole, "r" where it is replicated)."""
    found = {
        "even": (random_tensor((12, 5), torch.float32), "0"),
        "uneven": (random_tensor((5, 3), torch.bfloat16, 1), "0"),
        "one row": (random_tensor((1, 3), torch.float32, 2), "0"),
        "columns": (random_tensor((3, 7), torch.float32, 3), "1"),
        "both": (random_tensor((4, 6, 2), torch.int16, 4), "01"),
        "empty": (torch.zeros(0, 4), "0"),
        "scalar": (random_tensor((), torch.float64, 5), "-"),
        "replicated": (random_tensor((3, 3), torch.float32, 6), "r"),
    }
    for number, dtype in enumerate(DTYPES):
        found[f"{dtype}"] = (random_tensor((3, 4), dtype, number), "0")
    return found


def plain() -> dict[str, torch.Tensor]:
    return {name: tensor for name, (tensor, _) in tensors().items()}


def distributed(dims: tuple[int, ...]) -> dict[str, Any]:
    """`tensors` on a mesh of `dims` of this process's ranks: a 2-D one cuts along its last dim, or along both."""
    mesh = init_device_mesh("cpu", dims)
    state: dict[str, Any] = {}
    for name, (tensor, cut) in tensors().items():
        if cut == "-":
            state[name] = tensor
            continue
        along = [Replicate() if cut == "r" else Shard(int(cut[-1]))]
        first = [] if len(dims) == 1 else [Shard(0) if cut == "01" else Replicate()]
        state[name] = distribute_tensor(tensor, mesh, [*first, *along], src_data_rank=None)
    return state
