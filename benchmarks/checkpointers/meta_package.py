"""Meta's package `torch_checkpointing`; only where it is installed."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedModel

from checkpointers.side import KEPT, LoopSide, numbered


class TorchCheckpointing(LoopSide):
    name = "torch_checkpointing"
    package = "torch_checkpointing"
    in_background = True
    note = (
        "Version 0.1.1, alpha. Pinned memory and direct writes are off, as its troubleshooting guide recommends for "
        "CPUs. There is no resharder: with one, the first multi-rank save creates a CUDA tensor. The newest step is "
        "found as in its tutorial; the loop deletes old steps."
    )

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(directory, model)
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        process = CheckpointProcessConfig(subprocess_init_timeout_secs=100)  # its own 30 s are few on a busy machine
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging, process_config=process),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self.pending: Future[Any] | None = None

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self) -> int | None:
        if not (steps := numbered(self.directory, r"step_(\d+)")):
            return None
        state = dict(self.manager.load(str(self.path(self.directory, steps[-1])), into=self.state(), strict=True))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return steps[-1]

    def optimizer_step(self) -> None:
        with self.manager.lock():
            self.optimizer.step()

    def save(self, step: int) -> None:
        self.pending = self.manager.save(str(self.path(self.directory, step)), self.state())

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None
            dist.barrier()
            if dist.get_rank() == 0:
                for old in numbered(self.directory, r"step_(\d+)")[:-KEPT]:
                    shutil.rmtree(self.path(self.directory, old))

    def close(self) -> None:
        self.manager.close()
