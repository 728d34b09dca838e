"""Loads the samples of the next step into device memory, in a thread while this step runs."""

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fsdp_shard.data import IGNORE_INDEX, NO_WINDOW, Batch, Dataset, Ints, MapDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import check_vocabulary
from fsdp_shard.sharding import ContextRanks, SequencePart, WholeSequence, context_method_of, transformers_model
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.loss.device_batch import DeviceBatch, OwnPart, PackedAnswers, own_label_positions
from fsdp_shard.training.objectives.objective import ObjectiveConfig
from fsdp_shard.utils import copy_to


@dataclass(frozen=True, kw_only=True)
class PartBatch(Batch):
    """A batch of parts of sequences; `sequence` describes the whole ones."""

    sequence: WholeSequence


@dataclass(frozen=True, kw_only=True)
class WholeAndPartBatch(Batch):
    """A batch of whole sequences, with this rank's part of them.

    Attributes:
        own: The inputs of the part, and a description of the whole sequences.
        token_positions: The positions of its tokens in the sequences, int64 [part].
    """

    own: SequencePart
    token_positions: Ints


@dataclass(frozen=True)
class StepBatches:
    """The samples of one step.

    Attributes:
        samples: Positions of the samples of all ranks, int64 [global_batch_size].
        own_samples: Those of each micro-batch of this rank, int64 [num_micro_batches, micro_batch_size].
        micro_batches: The micro-batches.
        counts: The divisor of each term of the loss, the trained tokens, and those of each source of a mixture, float64
            on the device: those of this rank, or its share of them if several ranks count the same sequences.
    """

    samples: Ints
    own_samples: Ints
    micro_batches: list[DeviceBatch]
    counts: torch.Tensor


class BatchLoader:
    """Loads one step ahead; a context manager that ends its thread.

    Args:
        dataset: The samples.
        config: Sizes of the batches.
        context: The ranks that train.
        model: The model, whose vocabulary must have all tokens.
        objective: Counts the divisor of each term of the loss in a batch, and its tokens. If it compares whole
            sequences, batches of divided sequences contain the whole ones, too.

    Attributes:
        seconds_waited: How long the last step waited for its samples, on this rank.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: TrainConfig,
        context: DistributedContext,
        model: nn.Module,
        objective: ObjectiveConfig,
    ) -> None:
        self._dataset, self._config, self._context = dataset, config, context
        self._objective, self._model = objective, model
        self._context_ranks, self._keeps_whole = context_ranks(model, context), objective.compares_whole_sequences
        self._copy_stream = torch.cuda.Stream(context.device) if context.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "batch-loader")
        # Also at exit: a generator of `train` that still exists is closed only after modules are gone.
        self._end_thread = weakref.finalize(self, self._thread.shutdown, cancel_futures=True)
        self._loading: Future[StepBatches] | None = None
        self.seconds_waited = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_thread()

    def next(self, first: int, is_last: bool) -> StepBatches:
        """Return the samples of a step, and begin to load those of the next one; a collective.

        Args:
            first: Number of samples before the step.
            is_last: Whether no step follows, so that none is loaded.
        """
        began = time.perf_counter()
        step_batches = (self._loading or self._begin(first)).result()
        if self._copy_stream is not None:
            _hand_over(step_batches, self._copy_stream)
        self._loading = None if is_last else self._begin(first + self._config.global_batch_size)
        self.seconds_waited = time.perf_counter() - began
        return step_batches

    def _begin(self, first: int) -> Future[StepBatches]:
        # Here, not in the thread: the ranks exchange the rows of streamed data that they tokenized.
        self._dataset.prepare(first, self._config.global_batch_size)
        return self._thread.submit(self._load, np.arange(first, first + self._config.global_batch_size))

    def _load(self, samples: Ints) -> StepBatches:
        context = self._context
        own_samples = micro_batches(samples, self._config.micro_batch_size, context.data_rank, context.num_data_ranks)
        whole = (read_batch(self._dataset, positions, self._model) for positions in own_samples)
        batches = [own_part(batch, self._context_ranks, keeps_whole=self._keeps_whole) for batch in whole]
        counts = [sum(of_batches) for of_batches in zip(*map(self._objective.all_counts, batches), strict=True)]
        counts += source_tokens(self._dataset, own_samples, map(self._objective.trained_tokens, batches))
        if self._keeps_whole:  # each rank that divides the sequences has counted all of them
            counts = [count / context.num_context_ranks for count in counts]
        with self._on_copy_stream():
            on_device = [to_device(batch, context.device) for batch in batches]
            return StepBatches(samples, own_samples, on_device, copy_to(context.device, torch.tensor(counts).double()))

    @contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        """Copy on a separate stream of this rank's GPU; otherwise the thread would create a context on GPU 0."""
        if self._copy_stream is None:
            yield
            return
        with torch.cuda.device(self._context.device), torch.cuda.stream(self._copy_stream):
            yield


def context_ranks(model: nn.Module, context: DistributedContext) -> ContextRanks | None:
    """Return the ranks that divide the sequences of `model` with this one; None if it processes whole sequences."""
    method = context_method_of(model)
    return None if method is None else ContextRanks.of(context, method)


def read_batch(dataset: Dataset | MapDataset, samples: Sequence[int] | Ints, model: nn.Module) -> Batch:
    """Read samples, by position or index; raise ModelError if `model` lacks one of their tokens."""
    batch = dataset.batch(samples)
    if (inside := transformers_model(model)) is not None:
        check_vocabulary(batch.inputs["input_ids"], inside.config)
    return batch


def own_part(batch: Batch, ranks: ContextRanks | None, *, keeps_whole: bool = False) -> Batch:
    """Return this rank's part of each sequence of a batch, or the batch if `ranks` is None.

    With `keeps_whole`, the batch contains both the part and the whole sequences, for objectives that compare these.
    """
    if ranks is None:
        return batch
    part = ranks.own_part(batch.inputs, batch.labels, IGNORE_INDEX)
    if not keeps_whole:
        return PartBatch(part.inputs, part.labels, sequence=part.sequence)
    token_positions = ranks.own_tokens(part.sequence.length)
    whole = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return WholeAndPartBatch(**whole, own=part, token_positions=token_positions)


def micro_batches(samples: Ints, micro_batch_size: int, rank: int, num_ranks: int) -> Ints:
    """Split a global batch into micro-batches: the same global batch on any number of ranks.

    Micro-batch m of rank r contains micro_batch_size samples from (m * num_ranks + r) * micro_batch_size on.

    Args:
        samples: The samples [global_batch_size] of the global batch, by position or index.
        micro_batch_size: Samples per micro-batch.
        rank: The rank, among the ranks with different data.
        num_ranks: The number of such ranks.

    Returns:
        The samples [num_micro_batches, micro_batch_size] of this rank.

    Raises:
        ValueError: The samples cannot be divided evenly.
    """
    if len(samples) % (micro_batch_size * num_ranks):
        raise ValueError(f"{len(samples)} samples in micro-batches of {micro_batch_size} on {num_ranks} ranks")
    return samples.reshape(-1, num_ranks, micro_batch_size)[:, rank]


def evaluation_batches(num_samples: int, micro_batch_size: int, rank: int, num_ranks: int) -> Iterator[Ints]:
    """Yield the indices [micro_batch_size] of each batch of this rank, for one pass over all samples in order.

    Every rank receives the same number of batches, because each forward pass is a collective; `NO_WINDOW` fills up the
    last ones. The arguments are those of `micro_batches`.
    """
    unit = micro_batch_size * num_ranks
    padded = np.full(-(-num_samples // unit) * unit, NO_WINDOW, np.int64)
    padded[:num_samples] = np.arange(num_samples)
    yield from micro_batches(padded, micro_batch_size, rank, num_ranks)


def source_tokens(dataset: Dataset, samples: Iterable[Ints], trained: Iterable[npt.NDArray[np.bool_]]) -> list[int]:
    """Count the tokens of each source of a mixture.

    Args:
        dataset: The dataset of the samples.
        samples: Positions of the samples of each batch.
        trained: Which tokens of each batch are trained, as returned by `ObjectiveConfig.trained_tokens`.

    Returns:
        The number of trained tokens of each of `dataset.source_names`.
    """
    if not dataset.source_names:
        return []
    counts = np.zeros(len(dataset.source_names), np.int64)
    for positions, tokens in zip(samples, trained, strict=True):
        np.add.at(counts, dataset.sources_of(positions), tokens.reshape(len(positions), -1).sum(axis=1))
    return [int(count) for count in counts]


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    """Copy a batch to `device`, in its current stream."""

    def to_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        return {name: copy_to(device, torch.from_numpy(array)) for name, array in arrays.items()}

    labels = torch.from_numpy(batch.labels)
    label_positions = torch.from_numpy(np.flatnonzero(batch.labels != IGNORE_INDEX))
    inputs = to_tensors(batch.inputs)
    extras = to_tensors(batch.extras)
    values = to_tensors(batch.token_values)
    sequence = batch.sequence.map(partial(copy_to, device)) if isinstance(batch, PartBatch) else None
    own, packed = None, None
    if isinstance(batch, WholeAndPartBatch):
        token_positions = torch.from_numpy(batch.token_positions)
        own_positions, label_indices = own_label_positions(labels, token_positions)
        own = OwnPart(
            inputs=to_tensors(batch.own.inputs),
            sequence=batch.own.sequence.map(partial(copy_to, device)),
            token_positions=copy_to(device, token_positions),
            label_positions=copy_to(device, own_positions),
            label_indices=copy_to(device, label_indices),
        )
    if batch.segments is not None:
        sizes = batch.answer_sizes.flatten().tolist()
        lengths, segments = torch.tensor(sizes, dtype=torch.float32), torch.from_numpy(batch.segments)
        apart = batch.rows_per_sample > 1
        shared = None if apart else copy_to(device, segments)
        packed = PackedAnswers(shared, tuple(sizes), copy_to(device, lengths), apart)
    return DeviceBatch(
        inputs=inputs,
        labels=copy_to(device, labels),
        label_positions=copy_to(device, label_positions),
        extras=extras,
        token_values=values,
        sequence=sequence,
        packed=packed,
        own=own,
    )


def _hand_over(batches: StepBatches, copies: torch.cuda.Stream) -> None:
    """Make the current stream wait for the copies, and keep their memory until it has used them."""
    current = torch.cuda.current_stream(copies.device)
    current.wait_stream(copies)
    for tensor in (
        batches.counts,
        *(tensor for batch in batches.micro_batches for tensor in batch.tensors()),
    ):
        tensor.record_stream(current)
