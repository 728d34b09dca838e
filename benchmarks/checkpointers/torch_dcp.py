"""torch's Distributed Checkpoint, in the background and not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save, save as dcp_save
from transformers import PreTrainedModel

from checkpointers.side import KEPT, LoopSide, numbered


class Dcp(LoopSide):
    name = "dcp.save"
    note = (
        "torch writes only the step's directory. The loop removes the remains of killed saves, replaces the file "
        "`latest` after a save, and deletes old steps."
    )

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self) -> int | None:
        latest = self.directory / "latest"
        if not latest.exists():
            return None
        step = int(latest.read_text())
        state = self.state()
        dcp_load(state, checkpoint_id=self.path(self.directory, step))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return step

    def save(self, step: int) -> None:
        dcp_save(self.state(), checkpoint_id=self.fresh(step))
        self.publish(step)

    def fresh(self, step: int) -> Path:
        """The directory of a step, without what a killed save has left there."""
        path = self.path(self.directory, step)
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return path

    def publish(self, step: int) -> None:
        """Say which step is the newest, and delete old ones."""
        if dist.get_rank() == 0:
            partial = self.directory / "latest.partial"
            partial.write_text(str(step))
            partial.replace(self.directory / "latest")
            for old in numbered(self.directory, r"step_(\d+)")[:-KEPT]:
                shutil.rmtree(self.path(self.directory, old))


class DcpAsync(Dcp):
    name = "dcp.async_save"
    in_background = True
    note = "Like dcp.save, on its own gloo group; the loop waits for the previous save and then replaces `latest`."

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        super().__init__(directory, model)
        self.group = dist.new_group(backend="gloo")
        self.pending: tuple[int, Any] | None = None

    def save(self, step: int) -> None:
        path = self.fresh(step)
        future = dcp_async_save(self.state(), checkpoint_id=path, process_group=self.group)
        self.pending = step, future

    def wait(self) -> None:
        if self.pending is not None:
            step, future = self.pending
            future.result()
            self.publish(step)
            self.pending = None
