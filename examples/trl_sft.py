"""TRL's SFTTrainer with crash-safe checkpoints.

torchrun --nproc-per-node 2 examples/trl_sft.py runs/sft MODEL_DIRECTORY TEXT_FILE [full | lora]

Stop it at any moment and start it again, on the same or another number of ranks: it continues after the last saved
step. `fsdp-shard generate checkpoint=runs/sft prompt=...` generates text from any checkpoint. With a LoRA, use the
steps to resume; the adapter itself is saved in runs/sft/adapter at the end.
"""

import os
import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from fsdp_shard.integrations import CheckpointerCallback

BATCH_SIZE, LENGTH = 12, 64


def main(run: str, source: str, text: str, trained: str = "full") -> None:
    """Train `source`, or a LoRA of it, on the lines of `text`, with a checkpoint every third step."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings = SFTConfig(
        run,
        per_device_train_batch_size=BATCH_SIZE // num_ranks,
        num_train_epochs=3,
        learning_rate=1e-3,
        max_length=LENGTH,
        dataloader_drop_last=True,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",  # the callback saves
    )
    lines = [line for line in Path(text).read_text().splitlines() if line.strip()]
    callback = CheckpointerCallback(run, every=3, keep_last=3)
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(source, dtype="float32"),
        settings,
        train_dataset=Dataset.from_dict({"text": lines}),
        processing_class=AutoTokenizer.from_pretrained(source),
        callbacks=[callback],
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM") if trained == "lora" else None,
    )
    trainer.train(resume_from_checkpoint=callback.resume_from(trainer))
    if trained == "lora":
        trainer.save_model(os.path.join(run, "adapter"))


if __name__ == "__main__":
    main(*sys.argv[1:])
