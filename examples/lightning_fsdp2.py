"""Lightning's Trainer with crash-safe checkpoints that resume under any strategy on any number of ranks.

torchrun --nproc-per-node 2 examples/lightning_fsdp2.py runs/lightning MODEL_DIRECTORY TEXT_FILE [STEPS] [STRATEGY]

STRATEGY is fsdp2, ddp or auto (one device). `fsdp-shard generate checkpoint=runs/lightning prompt=...` generates text.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_shard.integrations import LightningCheckpoint, ResumableLoader


class CausalModel(LightningModule):
    def __init__(self, source: str, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and self.device_mesh is not None:
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=rows, labels=rows).loss
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        print(f"step {self.global_step + 1} loss {float(mean):.9f}\n" * self.trainer.is_global_zero, end="", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(run: str, source: str, text: str, num_steps: str = "20", strategy: str = "fsdp2") -> None:
    seed_everything(1)
    ranks, tokenizer = int(os.environ.get("WORLD_SIZE", "1")), AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(Path(text).read_text()).input_ids)
    windows = ids[: len(ids) // 64 * 64].view(-1, 64)
    sharded = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    saved = LightningCheckpoint(run, every=3, module="model", processor=tokenizer, keep_last=3)
    options: Any = {"accelerator": "cpu", "devices": ranks, "strategy": sharded if strategy == "fsdp2" else strategy}
    trainer = Trainer(**options, callbacks=[saved], max_steps=int(num_steps), logger=False, enable_progress_bar=False)
    trainer.fit(CausalModel(source, int(num_steps)), ResumableLoader(windows, 12, shuffle=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
