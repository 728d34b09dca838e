"""accelerate's `save_state`, and the savers that it has for FSDP2."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from transformers import PreTrainedModel

from checkpointers.side import KEPT, LR, LoopSide, numbered


class Progress:
    """The step, as an object that accelerate saves beside the model."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Accelerate(LoopSide):
    name = "accelerate save_state"
    package = "accelerate"
    note = (
        "On CPUs an Accelerator always runs DDP, whatever is requested, and so does this side: rank 0 writes "
        "everything, and no tensor is divided. `automatic_checkpoint_naming` finds the newest step and deletes old "
        "ones."
    )

    def prepare(self, model: PreTrainedModel) -> tuple[Any, Any]:
        project = ProjectConfiguration(str(self.directory), automatic_checkpoint_naming=True, total_limit=KEPT)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        prepared, optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
        return prepared, optimizer

    @classmethod
    def path(cls, directory: Path, step: int) -> Path:
        return directory / "checkpoints" / f"checkpoint_{step}"

    def restore(self) -> int | None:
        if not numbered(self.directory / "checkpoints", r"checkpoint_(\d+)"):
            return None
        self.accelerator.load_state()
        return self.progress.step

    def save(self, step: int) -> None:
        self.progress.step = self.accelerator.project_configuration.iteration = step
        self.accelerator.save_state()


class AccelerateFsdp2(LoopSide):
    name = "accelerate, its FSDP2 savers"
    package = "accelerate"
    note = (
        "The loop calls the functions that `save_state` uses under FSDP2 on GPUs (`save_fsdp_model`, then "
        "`save_fsdp_optimizer`), because an Accelerator has no FSDP on CPUs. As there, the newest step is the one with "
        "the highest number."
    )

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        super().__init__(directory, model)
        self.accelerator = Accelerator(cpu=True)
        self.plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")

    def restore(self) -> int | None:
        if not (steps := numbered(self.directory, r"step_(\d+)")):
            return None
        path = str(self.path(self.directory, steps[-1]))
        load_fsdp_model(self.plugin, self.accelerator, self.model, path)
        load_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, path)
        return steps[-1]

    def save(self, step: int) -> None:
        steps = numbered(self.directory, r"step_(\d+)")
        if dist.get_rank() == 0:  # before the save, as `total_limit` does
            for old in steps[: max(len(steps) + 1 - KEPT, 0)]:
                shutil.rmtree(self.path(self.directory, old))
        dist.barrier()
        path = str(self.path(self.directory, step))
        save_fsdp_model(self.plugin, self.accelerator, self.model, path)
        save_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, path)
