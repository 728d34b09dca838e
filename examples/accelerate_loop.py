"""An accelerate training loop with crash-safe checkpoints.

torchrun --nproc-per-node 2 examples/accelerate_loop.py runs/loop MODEL_DIRECTORY TEXT_FILE [BATCH_SIZE]

Stop it at any moment and start it again, on the same or another number of ranks: it continues after the last saved
step. `fsdp-shard generate checkpoint=runs/loop prompt=...` generates text from any checkpoint.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_shard.integrations import AcceleratorCheckpointer

LENGTH, NUM_EPOCHS, ACCUMULATED = 32, 3, 2


def main(run: str, source: str, text: str, batch_size: int = 6) -> None:
    """Train `source` on `text`, with a checkpoint every third step."""
    data = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=data, gradient_accumulation_steps=ACCUMULATED)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(Path(text).read_text()).input_ids)
    rows: Any = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(rows, batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_EPOCHS * len(loader) // ACCUMULATED)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, _, scheduler = prepared
    with AcceleratorCheckpointer(run, accelerator, *prepared, keep_last=3, processor=tokenizer) as checkpointer:
        restored = checkpointer.restore()
        step = restored.step if restored else 0
        for _ in range(checkpointer.epoch, NUM_EPOCHS):
            for batch in checkpointer.batches():
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step += 1
                    mean = accelerator.reduce(loss.detach(), "mean").item()
                    accelerator.print(f"step {step} loss {mean:.9f}", flush=True)
                    if step % 3 == 0:
                        checkpointer.save(step)
                    if checkpointer.save_on_signal(step):
                        return


if __name__ == "__main__":
    run, source, text, *numbers = sys.argv[1:]
    main(run, source, text, *map(int, numbers[:1]))
