"""Real torch_checkpointing (0.1.1), on gloo ranks: saves a small sharded state. It wrote the files in
tests/checkpoint/formats/by_torch_checkpointing, from this directory, with

    torchrun --nproc-per-node 2 torch_checkpointing_writer.py DIR/default default
    torchrun --nproc-per-node 2 torch_checkpointing_writer.py DIR/described described
    torchrun --nproc-per-node 1 torch_checkpointing_writer.py DIR/one-rank default
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def weights() -> dict[str, torch.Tensor]:
    """Sizes that two ranks do not divide, two dtypes, one tensor that is cut along its columns, one that is whole."""
    return {
        "up.weight": torch.arange(15.0).reshape(5, 3),
        "up.bias": torch.arange(5.0).bfloat16(),
        "down.weight": -torch.arange(10.0).reshape(2, 5),
        "scale": torch.tensor([2.5]),
    }


def state() -> dict[str, Any]:
    """The same as DTensors, with a moment of an optimizer, and with states that are no tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"down.weight": Shard(1), "scale": Replicate()}
    model = {
        name: distribute_tensor(tensor, mesh, [placements.get(name, Shard(0))]) for name, tensor in weights().items()
    }
    moments = {"up.weight": {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(model["up.weight"])}}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}, "step": 7}


def save_default(path: str) -> None:
    """As its tutorial does, with what its troubleshooting guide says for CPUs."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    manager = CheckpointManager(
        CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    pending = manager.save(path, state())
    assert pending is not None
    pending.result()
    dist.barrier()
    manager.close()


def save_described(path: str) -> None:
    """With resharders, and so with `metadata.pkl`, and the model as safetensors under names of its own."""
    from torch_checkpointing.builder import make_sync_checkpoint_saver
    from torch_checkpointing.checkpoint_base import CheckpointBase, CheckpointItem
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
    from torch_checkpointing.types import RankInfo

    class MetadataManager(DefaultMetadataManager):
        """Its own gathers through tensors on CUDA."""

        def _all_gather_pickled_data(self, data: Any, process_group: Any = None) -> dict[int, Any]:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, data, process_group)
            return dict(enumerate(gathered))

    class State(CheckpointBase):
        def get_items(self) -> dict[str, CheckpointItem]:
            layout = LayoutInfo(f"weights/part-{dist.get_rank()}.safetensors", SafetensorsSerialization())
            return {
                name: CheckpointItem(
                    value=value,
                    requires_copy=True,
                    layout=layout if name == "model" else None,
                    resharder=None if name == "step" else DefaultResharder(),
                )
                for name, value in state().items()
            }

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise NotImplementedError("it is only saved")

    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = RankInfo(global_rank=rank, global_world_size=world_size, role_rank=rank, role_world_size=world_size)
    saver = make_sync_checkpoint_saver(
        config=SyncCheckpointSaverConfig(),
        rank_info=ranks,
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        checkpoint_metadata_manager=MetadataManager(rank_info=ranks),
    )
    saver.save(path, State())
    dist.barrier()
    saver.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"default": save_default, "described": save_described}[sys.argv[2]](sys.argv[1])
    dist.destroy_process_group()
