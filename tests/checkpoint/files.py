"""Small checkpoints of any dtype: by safetensors' own writer, and split over ranks by our planner."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io.safetensors_format import TensorSpec, from_torch_name
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.checkpoint.piece_reader import tensor_bytes
from fsdp_shard.checkpoint.steps import file_plan
from fsdp_shard.errors import CheckpointError

Tensors = Mapping[str, torch.Tensor]


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, from_torch_name(str(tensor.dtype)), tuple(tensor.shape))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor_bytes(tensor.clone(memory_format=torch.contiguous_format))) if tensor.numel() else b""


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, so NaN and infinities too where there are any (booleans are 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    num_bytes = torch.empty(tuple(shape), dtype=dtype).nbytes
    bits = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).reshape(tuple(shape)) if num_bytes else torch.empty(tuple(shape), dtype=dtype)


def uneven(seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows that no rank count divides, a scalar, tensors without elements, several dtypes."""
    return {
        "rows": random_tensor((7, 5), torch.float32, seed),
        "half": random_tensor((3, 2, 4), torch.bfloat16, seed + 1),
        "scalar": random_tensor((), torch.float32, seed + 2),
        "empty": random_tensor((0, 4), torch.float32),
        "narrow": random_tensor((5, 0), torch.bfloat16),
        "flags": random_tensor((11,), torch.bool, seed + 3),
    }


def write_huggingface(root: Path, tensors: Tensors, **metadata: str) -> Path:
    """A directory as `save_pretrained` makes it, through safetensors' own writer; no model is compared with it."""
    root.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), root / "model.safetensors", metadata={"format": "pt", **metadata})
    (root / "config.json").write_text('{"model_type": "lamma", "dtype": "float32"}')
    return root


def write_ranks(
    root: Path,
    tensors: Tensors,
    edges: Mapping[str, Sequence[int]],
    *,
    step: int | None = None,
    save: str = "one",
    aliases: Mapping[str, str] | None = None,
) -> Path:
    """Our rank files; `edges[name]` are the flat element positions between which each rank's range lies."""
    root.mkdir(parents=True, exist_ok=True)
    world_size = len(next(iter(edges.values()))) - 1
    for rank in range(world_size):
        pieces = [
            (spec_of(name, tensor), edges[name][rank], edges[name][rank + 1] - edges[name][rank])
            for name, tensor in tensors.items()
        ]
        plan = file_plan.plan_sharded(pieces, rank, world_size, step=step, save_id=save, aliases=aliases or {})
        data = bytearray(plan.header) + bytearray(plan.num_bytes - len(plan.header))
        for spec, start, count in pieces:
            if count:
                size = tensors[spec.name].element_size()
                part = raw_bytes(tensors[spec.name])[start * size : (start + count) * size]
                data[plan.tensors[spec.name] : plan.tensors[spec.name] + len(part)] = part
        (root / plan.name).write_bytes(data)
    return root


def even_edges(tensors: Tensors, world_size: int) -> dict[str, list[int]]:
    """Flat ranges of nearly equal size, so most begin in the middle of a row."""
    return {name: [t.numel() * rank // world_size for rank in range(world_size + 1)] for name, t in tensors.items()}


def assert_same(index: TensorIndex, tensors: Tensors) -> None:
    """The index holds exactly these tensors, bit for bit."""
    assert set(index.names) == set(tensors)
    for name, tensor in tensors.items():
        found = index.read(name)
        assert found.dtype == tensor.dtype, name
        assert found.shape == tensor.shape, name
        assert raw_bytes(found) == raw_bytes(tensor), name


def assert_refused(root: Path, message: str) -> None:
    """Opening `root` is one CheckpointError on one line, which matches `message` and names a place in `root`."""
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(root)
    assert str(root) in str(caught.value)
    assert "\n" not in str(caught.value)


def edit_header(path: Path, change: Any) -> None:
    """Rewrite the header of a safetensors file as `change(document)` leaves or returns it; the data stays."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    document = json.loads(data[8 : 8 + length])
    replaced = change(document)
    text = replaced if isinstance(replaced, bytes) else json.dumps(document).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
