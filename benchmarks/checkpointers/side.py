"""The protocol that `checkpointer.py` compares by: a side, the loop that it is used in, and what rank 0 reports."""

from __future__ import annotations

import json
import os
import re
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

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
