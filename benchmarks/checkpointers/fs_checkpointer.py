"""`fs.Checkpointer`, in the background and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel

from checkpointers.side import KEPT, LoopSide
from fsdp_shard import Checkpointer


class Ours(LoopSide):
    name = "fs.Checkpointer"
    package = "fsdp_shard"
    note = "As in docs/own-loop.md: before restoring, every byte is compared with its digest."
    in_background = True
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        super().__init__(directory, model)
        self.checkpointer = Checkpointer(directory, keep_last=KEPT, **self.settings)

    @classmethod
    def path(cls, directory: Path, step: int) -> Path:
        return directory / "checkpoints" / f"step-{step:08}"

    def restore(self) -> int | None:
        restored = self.checkpointer.restore(self.model, self.optimizer)
        return restored.step if restored else None

    def save(self, step: int) -> None:
        self.checkpointer.save(step, self.model, self.optimizer)

    def wait(self) -> None:
        self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.close()


class OursSynchronous(Ours):
    name = "fs.Checkpointer, asynchronous=False"
    note = ""
    in_background = False
    settings: ClassVar[dict[str, Any]] = {"asynchronous": False}
