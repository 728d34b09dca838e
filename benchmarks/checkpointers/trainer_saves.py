"""The Trainer's own saves, which are made in its own loop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.distributed.configuration_utils import DistributedConfig

from checkpointers.side import KEPT, LENGTH, LR, Log, Side, checksum, flush, numbered, slowest


class Finished(Exception):
    """Ends the loop of the Trainer, which has no way to end it before its first step."""


class _Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    def __init__(self, vocab_size: int) -> None:
        self.ids = torch.randint(0, vocab_size, (4096, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return {"input_ids": self.ids[number], "labels": self.ids[number]}


class _Reports(TrainerCallback):
    """Reports of the Trainer's loop what `Side.run` reports of ours."""

    def __init__(self, log: Log, last: int) -> None:
        self.log, self.last, self.start, self.number = log, last, 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds, step = time.perf_counter() - self.start, state.global_step or None
        found = checksum(kwargs["model"], kwargs["optimizer"])
        self.log.write(event="restored", step=step, checksum=found)
        self.log.write(event="again", seconds=slowest(seconds))
        if (step or 0) >= self.last:
            raise Finished

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            found = checksum(kwargs["model"], kwargs["optimizer"])
            self.log.write(event="saving", step=state.global_step, checksum=found)
            dist.barrier()
            self.start = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds, step = slowest(time.perf_counter() - self.start), state.global_step
        self.number += 1
        self.log.write(event="durable", step=step)
        if self.log.in_turns and self.number % 2 == 0:
            flush(TrainerSaves.path(Path(args.output_dir), step))
            self.log.write(event="on disk", step=step, seconds=slowest(time.perf_counter() - self.start))
        else:
            self.log.write(event="stalled", step=step, seconds=seconds)


class TrainerSaves(Side):
    name = "Trainer's saves"
    package = "transformers"
    note = (
        "The Trainer runs its own loop with the same model. On CPUs it runs DDP, whatever `fsdp=` says: rank 0 writes "
        "everything. Restore times run from `train(resume_from_checkpoint=True)` to the first step, including all "
        "other preparation."
    )

    def prepare(self, model: PreTrainedModel) -> tuple[Any, Any]:
        return model, None

    @classmethod
    def path(cls, directory: Path, step: int) -> Path:
        return directory / f"checkpoint-{step}"

    def run(self, log: Log, last: int) -> None:
        settings = TrainingArguments(
            str(self.directory),
            max_steps=last or 1 << 20,
            per_device_train_batch_size=1,
            learning_rate=LR,
            lr_scheduler_type="constant",
            use_cpu=True,
            save_steps=log.every,
            save_total_limit=KEPT,
            ignore_data_skip=True,
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        )
        reports = _Reports(log, last)
        rows = _Rows(self.model.config.vocab_size)
        engine = Trainer(
            model=self.model,
            args=settings,
            train_dataset=rows,
            data_collator=default_data_collator,
            callbacks=[reports],
        )
        found = numbered(self.directory, r"checkpoint-(\d+)")
        dist.barrier()
        reports.start = time.perf_counter()
        try:
            engine.train(resume_from_checkpoint=bool(found))
        except Finished:
            return


class TrainerSharded(TrainerSaves):
    name = "Trainer's saves, DistributedConfig"
    note = (
        "Like the Trainer's saves, with the model sharded by transformers itself "
        "(`DistributedConfig(fsdp_size=N)`, FSDP2)."
    )

    def prepare(self, model: PreTrainedModel) -> tuple[Any, Any]:
        place = self.directory / "unsharded"  # only `from_pretrained` shards
        if dist.get_rank() == 0:
            model.save_pretrained(place)
        dist.barrier()
        config = DistributedConfig(fsdp_size=dist.get_world_size())
        sharded = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, distributed_config=config, device_map="cpu"
        )
        return sharded, None
