"""What people keep the checkpoints of a loop of their own with, each behind one class: what `checkpointer.py` compares.

A new one is one class here and a line in `SIDES`. Each is used as its own documentation says, on the same model in the
same loop; what it cannot do on CPUs, or leaves to the loop, stands in its `note`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import xxhash
from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save, save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.distributed.configuration_utils import DistributedConfig

from fsdp_shard import Checkpointer
from fsdp_shard.checkpoint import tensor_bytes

LR = 1e-3
LENGTH = 16  # tokens of a row
KEPT = 2  # steps that are kept, by whoever keeps them
SIZES: dict[str, dict[str, Any]] = {
    "5M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4096},
    "quick": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 512},
}


class Log:
    """What rank 0 reports of a run, a line of JSON each, so that it is there when the run is killed.

    Args:
        path: The file.
        every: The steps from one save to the next.
        in_turns: Wait at once for every second save: between the others, training goes on as it does anywhere else.
        again: Restore twice, and time the second: the first imports what is not used before.
    """

    def __init__(self, path: Path, every: int, *, in_turns: bool, again: bool) -> None:
        self.every, self.in_turns, self.again = every, in_turns, again
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if dist.get_rank() == 0 else None

    def write(self, **event: Any) -> None:
        if self._file is not None:
            os.write(self._file, (json.dumps(event) + "\n").encode())


class Finished(Exception):
    """Ends the loop of a library that has no way to end it."""


class Side(ABC):
    """One of those that are compared, in a process of its own a rank.

    Args:
        directory: Where it keeps its steps; there already.
        model: The model, wrapped by nobody.
    """

    name: ClassVar[str]
    package: ClassVar[str] = "torch"
    note: ClassVar[str] = ""
    in_background: ClassVar[bool] = False  # `save` returns before the step is on the disk

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        self.directory = directory
        self.model, self.optimizer = self.prepare(model)

    def prepare(self, model: PreTrainedModel) -> tuple[Any, Any]:
        """The model as it is trained, and its optimizer."""
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=LR)

    @classmethod
    def path(cls, directory: Path, step: int) -> Path:
        """Where a step lies."""
        return directory / f"step_{step}"

    @abstractmethod
    def run(self, log: Log, last: int) -> None:
        """Restore the newest step and train up to `last`, with a save every few steps."""

    def close(self) -> None:
        """End what runs in the background."""
        return


class LoopSide(Side):
    """One that saves and restores in the loop of `run`."""

    @abstractmethod
    def restore(self) -> int | None:
        """Fill model and optimizer from the newest step that it finds, and return it."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Save a step; `wait` waits for one that is saved in the background."""

    def wait(self) -> None:
        """Return when the last step is on the disk."""
        return

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def run(self, log: Log, last: int) -> None:
        """Restore the newest step and train up to `last`, with a save every few steps."""
        first = self.restore()
        log.write(event="restored", step=first, checksum=checksum(self.model, self.optimizer))
        if log.again:
            dist.barrier()
            start = time.perf_counter()
            self.restore()
            log.write(event="again", seconds=slowest(time.perf_counter() - start))
        usual: list[float] = []  # seconds of the optimizer's steps that no save was before
        stall, saved, number = 0.0, None, 0
        for step in range((first or 0) + 1, last + 1):
            ids = batch(step, self.model)
            self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            start = time.perf_counter()
            self.optimizer_step()
            waited = time.perf_counter() - start
            self.optimizer.zero_grad()
            if saved is None:
                usual.append(waited)
            else:  # a copy that is only made, or waited for, when the optimizer is about to change what is saved
                stall += max(waited - sorted(usual)[len(usual) // 2], 0.0)
                log.write(event="stalled", step=saved, seconds=slowest(stall))
                saved = None
            if step % log.every:
                continue
            self.wait()
            if number and self.in_background:
                log.write(event="durable", step=step - log.every)
            log.write(event="saving", step=step, checksum=checksum(self.model, self.optimizer))
            dist.barrier()
            start = time.perf_counter()
            self.save(step)
            stall, saved = time.perf_counter() - start, step
            if not self.in_background:
                log.write(event="durable", step=step)
            number += 1
            if log.in_turns and number % 2 == 0:
                self.wait()
                flush(self.path(self.directory, step))
                log.write(event="on disk", step=step, seconds=slowest(time.perf_counter() - start))
                saved = None
        self.wait()
        if number:
            log.write(event="durable", step=last // log.every * log.every)


def batch(step: int, model: Any) -> torch.Tensor:
    """A row of token ids, another for each step and rank."""
    config = getattr(model, "module", model).config
    generator = torch.Generator().manual_seed(step * 64 + dist.get_rank())
    return torch.randint(0, config.vocab_size, (1, LENGTH), generator=generator)


def checksum(model: torch.nn.Module, optimizer: Any) -> str:
    """Of all parameters and their optimizer states, unsharded, by name: the same however they are divided."""
    digest = xxhash.xxh3_128()
    for name, parameter in sorted(model.named_parameters()):
        state = optimizer.state.get(parameter, {})
        for part, tensor in (("", parameter), *sorted(state.items())):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digest.update(f"{name.removeprefix('module.')} {part}".encode())
            digest.update(tensor_bytes(whole.detach().contiguous().reshape(-1)))
    return digest.hexdigest()


def flush(step: Path) -> None:
    """Have the files of a step on the disk: that takes long only if whoever has written them has left it to others."""
    if dist.get_rank() == 0:
        for file in step.rglob("*"):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier()


def slowest(seconds: float) -> float:
    """The most that any rank has measured."""
    dist.all_reduce(most := torch.tensor(seconds, dtype=torch.float64), dist.ReduceOp.MAX)
    return float(most)


def build(size: str, seed: int) -> PreTrainedModel:
    """A Llama with random weights, the same on all ranks."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES[size], num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def numbered(directory: Path, pattern: str) -> list[int]:
    """The numbers in the names of the directories that match, ascending."""
    found = (re.fullmatch(pattern, path.name) for path in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


# ---- ours


class Ours(LoopSide):
    name = "fs.Checkpointer"
    package = "fsdp_shard"
    note = "As in docs/own-loop.md: restoring compares every byte with its digest first."
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


# ---- torch


class Dcp(LoopSide):
    name = "dcp.save"
    note = (
        "What is torch's own ends with the step's directory. The loop removes what a killed save has left there, "
        "replaces the file `latest` after the save, and deletes old steps."
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
    note = "As dcp.save, on a gloo group of its own; the loop waits for the previous save and then replaces `latest`."

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


# ---- accelerate


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
        "On CPUs an Accelerator runs DDP, whatever is asked for, and so does this side: rank 0 writes all, and no "
        "tensor is divided. `automatic_checkpoint_naming` finds the newest step and deletes old ones."
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
        "What `save_state` calls under FSDP2 on GPUs (`save_fsdp_model`, then `save_fsdp_optimizer`), called by the "
        "loop, as an Accelerator has no FSDP on CPUs. The newest step is the one with the highest number, as there."
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


# ---- transformers


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
        "The Trainer has a loop of its own, with the same model. On CPUs it runs DDP, whatever `fsdp=` says: rank 0 "
        "writes all. Seconds to restore are those from `train(resume_from_checkpoint=True)` to the first step, "
        "with all else that it prepares."
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
    note = "As above, with the model sharded by transformers itself (`DistributedConfig(fsdp_size=N)`, FSDP2)."

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


# ---- Meta's package


class TorchCheckpointing(LoopSide):
    name = "torch_checkpointing"
    package = "torch_checkpointing"
    in_background = True
    note = (
        "0.1.1, alpha. Pinned memory and direct writes are turned off, as its troubleshooting guide says for CPUs, and "
        "there is no resharder: with one, the first save of several ranks makes a tensor on CUDA. "
        "The newest step is found as in its tutorial; the loop deletes old ones."
    )

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        # Only where it is installed.
        from torch_checkpointing import CheckpointManager  # type: ignore[import-not-found]
        from torch_checkpointing.config import AsyncCheckpointSaverConfig  # type: ignore[import-not-found]
        from torch_checkpointing.staging import CheckpointStagerConfig  # type: ignore[import-not-found]
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # type: ignore[import-not-found]

        super().__init__(directory, model)
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
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


SIDES: dict[str, type[Side]] = {
    "ours": Ours,
    "ours-sync": OursSynchronous,
    "dcp": Dcp,
    "dcp-async": DcpAsync,
    "accelerate": Accelerate,
    "accelerate-fsdp2": AccelerateFsdp2,
    "trainer": TrainerSaves,
    "trainer-sharded": TrainerSharded,
    "torch-checkpointing": TorchCheckpointing,
}
