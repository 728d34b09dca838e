"""A custom `fully_shard` training loop with crash-safe checkpoints.

torchrun --nproc-per-node 2 examples/fsdp2_loop.py runs/loop MODEL_DIRECTORY TEXT_FILE [STEPS]

Stop it at any moment and start it again, on the same or another number of ranks: it continues after the last saved
step. `fsdp-shard generate checkpoint=runs/loop prompt=...` generates text from any checkpoint.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fsdp_shard as fs

BATCH_SIZE, LENGTH = 12, 64


def main(run: str, source: str, text: str, num_steps: int = 20) -> None:
    """Train `source` on `text`, with a checkpoint every fifth step."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(Path(text).read_text()).input_ids)
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    fs.load_weights(model, source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)

    with fs.Checkpointer(run, keep_last=3, processor=tokenizer) as checkpointer:
        restored = checkpointer.restore(model, optimizer, scheduler=scheduler)
        first = restored.step + 1 if restored else 1
        for step in range(first, num_steps + 1):
            order = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE) % len(windows)
            rows = windows[order].chunk(world_size)[rank]
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            dist.all_reduce(total := loss.detach().clone())
            if rank == 0:
                print(f"step {step} loss {float(total) / world_size:.9f}", flush=True)
            if step % 5 == 0 or step == num_steps:
                checkpointer.save(step, model, optimizer, scheduler=scheduler)
            if checkpointer.save_on_signal(step, model, optimizer, scheduler=scheduler):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    run, source, text, *numbers = sys.argv[1:]
    main(run, source, text, *map(int, numbers[:1]))
