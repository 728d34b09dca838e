"""The order in which many batches go through a model with streamed blocks.

`batch_major`: one batch after the other, each through all blocks. `layer_major`: all batches of a wave through one
block after the other, so that weights are read once per wave. The hidden states of waiting batches stay in memory, or
in a file.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from fsdp_shard.errors import PlanError
from fsdp_shard.inference import available_memory
from fsdp_shard.inference.config import BATCH_MAJOR, LAYER_MAJOR, Device, DispatchConfig
from fsdp_shard.inference.offload.block_hooks import BlockStream
from fsdp_shard.inference.offload.hidden_state_file import HiddenStateFile
from fsdp_shard.inference.offload.layer_major import run_wave
from fsdp_shard.models import origin
from fsdp_shard.utils import format_count, format_size

T = TypeVar("T")

_STREAM = "block_stream"  # an attribute of the model
_MAX_PASSES, _MAX_COMPUTE_THREADS = 512, 4096
# Each thread that computes on a GPU has its own workspace (c10/cuda/CUDABlas.cpp, the default on Hopper).
_CUBLAS_WORKSPACE_BYTES = 32 << 20
_MEMORY_PART = 4  # hidden states may use 1 / this of the CPU budget or free memory


@dataclass(frozen=True)
class Schedule:
    """How the batches of an evaluation go through a model.

    Attributes:
        name: `batch_major` or `layer_major`.
        num_batches: Number of batches.
        num_blocks: Number of streamed blocks.
        num_bytes: Bytes of their weights.
        waves: The number of batches in each wave; empty for `batch_major`.
        to_file: Whether the hidden states of waiting batches go to a file.
    """

    name: str
    num_batches: int
    num_blocks: int
    num_bytes: int
    waves: tuple[int, ...] = ()
    to_file: bool = False

    def describe(self) -> str:
        """Describe how often weights are read, and where hidden states are; empty if no block is streamed."""
        if not self.num_blocks:
            return ""
        weights = f"{format_count(self.num_blocks, 'streamed block')} ({format_size(self.num_bytes)})"
        batches = "1 batch" if self.num_batches == 1 else f"{self.num_batches:,} batches"
        if not self.waves:
            return f"schedule {self.name}: {weights} read for each of {batches}"
        often = "once" if len(self.waves) == 1 else f"in each of {len(self.waves)} waves"
        where = "in a temporary file of run_dir" if self.to_file else "in memory"
        return f"schedule {self.name}: {weights} read {often} for {batches}, whose hidden states are {where}"

    def run(self, model: PreTrainedModel, passes: Sequence[Callable[[], T]], directory: Path) -> Generator[T]:
        """Run a pass for each batch.

        Args:
            model: The model that the schedule was made for.
            passes: Each runs the model once and returns a result; with `layer_major`, in another thread.
            directory: Directory for the file of hidden states.

        Yields:
            The results in the order of `passes`, as soon as they are complete.

        Raises:
            OSError: The disk is full.
        """
        if not self.waves:
            yield from (one() for one in passes)
            return
        stream = stream_of(model)
        assert stream is not None
        first = 0
        with HiddenStateFile(directory) if self.to_file else nullcontext() as file:
            for number, count in enumerate(self.waves, 1):
                these = passes[first : first + count]
                first += count
                is_last = number == len(self.waves)
                wave = run_wave(stream, these, embeddings=model.get_input_embeddings(), file=file, is_last=is_last)
                with closing(wave):
                    yield from wave


def keep_stream(model: PreTrainedModel, stream: BlockStream) -> None:
    """Store a model's streamed blocks, for `stream_of`."""
    model.__dict__[_STREAM] = stream


def stream_of(model: PreTrainedModel) -> BlockStream | None:
    """Return the streamed blocks of a model; None if it has none."""
    stream: BlockStream | None = vars(model).get(_STREAM)
    return stream if stream is not None and stream.num_blocks else None


def plan_schedule(
    model: PreTrainedModel,
    settings: DispatchConfig,
    shapes: Sequence[tuple[int, int]],
    memory: int | None = None,
    *,
    directory: Path | None = None,
    num_ranks: int = 1,
) -> Schedule:
    """Choose how batches go through a model: `settings.schedule`, or with `auto` the one that moves the fewest bytes.

    Args:
        model: A dispatched model.
        settings: The settings it was dispatched with.
        shapes: Rows and tokens of each batch.
        memory: Bytes for hidden states; by default a quarter of the device's budget or, without one, of free memory.
        directory: The directory for a file of hidden states, which is not used if it has too little free space.
        num_ranks: Number of ranks on this machine, which share its memory and threads.

    Raises:
        PlanError: `layer_major` is requested, but no block is streamed.
    """
    stream = stream_of(model)
    if stream is None:
        if settings.schedule == LAYER_MAJOR:
            name = origin(model.config.name_or_path or "") or "this one"
            raise PlanError(
                f"dispatch.schedule=layer_major is for models with streamed blocks, and all blocks of {name} stay in "
                f"memory; remove it, or give less memory by dispatch.max_memory."
            )
        return Schedule(BATCH_MAJOR, len(shapes), 0, 0)
    batch_major = Schedule(BATCH_MAJOR, len(shapes), stream.num_blocks, stream.num_bytes)
    if settings.schedule == BATCH_MAJOR or not shapes:
        return batch_major
    of_thread = _CUBLAS_WORKSPACE_BYTES if stream.device.type == "cuda" else 0
    hidden = [of_thread + _hidden_bytes(model, *shape) for shape in shapes]
    memory = _free_bytes(stream, settings, num_ranks) // _MEMORY_PART if memory is None else memory
    threads = min(_MAX_COMPUTE_THREADS, available_memory.free_threads() // 2) // num_ranks
    most = max(min(_MAX_PASSES, threads // torch.get_num_threads()), 1)
    in_memory = _waves(hidden, memory, most)
    layer_major = replace(batch_major, name=LAYER_MAJOR, waves=in_memory)
    choices = {layer_major: len(in_memory) * stream.num_bytes}
    has_disk = directory is None or available_memory.free_disk_bytes(directory) > num_ranks * sum(hidden)
    if len(in_memory) > 1 and stream.device.type == "cpu" and has_disk:
        waves = _waves(hidden, sum(hidden), most)
        moved = 2 * stream.num_blocks * sum(hidden)  # written before each block, and read inside
        choices[replace(layer_major, waves=waves, to_file=True)] = len(waves) * stream.num_bytes + moved
    if settings.schedule != LAYER_MAJOR:
        choices = {batch_major: len(shapes) * stream.num_bytes} | choices
    return min(choices, key=lambda schedule: choices[schedule])  # the first of equal ones


def _waves(hidden: Sequence[int], memory: int, most: int) -> tuple[int, ...]:
    """Divide batches into waves of at most `most`, with at most `memory` bytes of hidden states, or of one batch."""
    counts: list[int] = []
    free = 0
    for num_bytes in hidden:
        if not counts or num_bytes > free or counts[-1] == most:
            counts.append(0)
            free = memory
        counts[-1] += 1
        free -= num_bytes
    return tuple(counts)


def _hidden_bytes(model: PreTrainedModel, rows: int, tokens: int) -> int:
    """Estimate the bytes of a waiting batch: embeddings, hidden state, and a mask."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return rows * tokens * model.dtype.itemsize * (2 * weight.shape[-1] + tokens)


def _free_bytes(stream: BlockStream, settings: DispatchConfig, num_ranks: int) -> int:
    """Bytes available on the device of streamed blocks: its budget, if set, or this rank's share of free memory.

    Each rank has its own budget.
    """
    if stream.device.type == "cuda":
        free = int(torch.cuda.mem_get_info(stream.device)[0])
    else:
        free = available_memory.free_cpu_bytes() // num_ranks
    device: Device = stream.device.index if stream.device.type == "cuda" else "cpu"
    return min(free, (settings.budgets or {}).get(device, free))
