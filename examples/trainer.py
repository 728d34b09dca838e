"""The Trainer of transformers with crash-safe checkpoints; TRL's trainers work the same way.

torchrun --nproc-per-node 2 examples/trainer.py runs/trainer MODEL_DIRECTORY TEXT_FILE [ddp | fsdp] [ARGUMENT=VALUE ...]

Stop it at any moment and start it again, on the same or another number of ranks: it continues after the last saved
step. `fsdp-shard generate checkpoint=runs/trainer prompt=...` generates text from any checkpoint.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator
from transformers.distributed.configuration_utils import DistributedConfig

from fsdp_shard.integrations import CheckpointerCallback

BATCH_SIZE, LENGTH = 12, 32


def main(run: str, source: str, text: str, wrapper: str = "ddp", *given: str) -> None:
    """Train `source` on `text`, with a checkpoint every third step."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH_SIZE // num_ranks,
        "num_train_epochs": 3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",  # the callback saves
    }
    settings |= {name: json.loads(value) for name, value in (one.split("=") for one in given)}
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(Path(text).read_text()).input_ids)
    rows: Any = [{"input_ids": row, "labels": row} for row in ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)]
    sharded = {"distributed_config": DistributedConfig(fsdp_size=num_ranks), "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32", **(sharded if wrapper == "fsdp" else {}))

    callback = CheckpointerCallback(run, every=3, keep_last=3, monitor="eval_loss")
    trainer = Trainer(
        model,
        TrainingArguments(run, **settings),
        data_collator=default_data_collator,
        train_dataset=rows[BATCH_SIZE:],
        eval_dataset=rows[:BATCH_SIZE],
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=callback.resume_from(trainer))
    if trainer.is_world_process_zero():
        print("\n".join(f"step {one['step']} loss {one['loss']}" for one in trainer.state.log_history if "loss" in one))


if __name__ == "__main__":
    main(*sys.argv[1:])
