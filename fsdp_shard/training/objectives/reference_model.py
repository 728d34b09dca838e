"""The reference of preference objectives: the model that training began from, and its log-probabilities.

The reference is the model itself without its adapter, a frozen copy that is sharded alongside it, or one pass of a
sharded or dispatched model over the data before training. The results of such a pass are cached by the digests of
weights and data and never computed again.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from fsdp_shard.checkpoint import Location, describe_model, model_digests
from fsdp_shard.data import NO_WINDOW, ComparedRows, Samples, SourceDataset, cache_directory, cache_errors, with_extras
from fsdp_shard.distributed import LONGEST_TIMEOUT_SECONDS, DistributedContext, run_on_all, run_on_main
from fsdp_shard.errors import ConfigError, DataError, InputError
from fsdp_shard.sharding import ShardedModel, free_gathered
from fsdp_shard.training.batch_loader import context_ranks, evaluation_batches, own_part, read_batch, to_device
from fsdp_shard.training.checkpoints import resume
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.load_model import LoadedModel, unfilled_model
from fsdp_shard.training.loss.device_batch import DeviceBatch
from fsdp_shard.training.loss.forward_loss import forward_answers
from fsdp_shard.training.loss.log_probs import LabelLogProbs
from fsdp_shard.training.model_identity import model_name
from fsdp_shard.training.model_origin import RunStart
from fsdp_shard.training.objectives.dispatched_model import dispatched_rows, open_dispatched
from fsdp_shard.training.objectives.distill import DistillConfig
from fsdp_shard.training.objectives.objective import DISPATCHED, PRECOMPUTED, Reference, ReferenceConfig, Teacher
from fsdp_shard.training.objectives.teachers.teacher_model import PrecomputedTeacher, add_targets, open_teacher
from fsdp_shard.training.peft.disable_adapters import adapters_disabled
from fsdp_shard.training.peft.earlier_adapter import locate_earlier
from fsdp_shard.training.stop_signal import raise_if_stopped
from fsdp_shard.utils import format_count, json_digest, report_progress, write_atomically

EXTRA = "reference_log_probs"
_VERSION = "reference-1"  # of the cached values


@dataclass(frozen=True)
class PrecomputedReference:
    """A reference whose log-probabilities come with the samples."""

    def log_probs(self, batch: DeviceBatch) -> torch.Tensor:
        if EXTRA not in batch.extras:
            raise ConfigError(
                "The samples lack the reference's log-probabilities, which fs.add_reference(config, start, data) adds "
                "in the shipped recipe; add that line, or set objective.reference=sharded."
            )
        return batch.extras[EXTRA].flatten()


@dataclass(frozen=True)
class ModelReference:
    """A frozen model, or the trained model without its adapter; it runs in eval mode.

    Attributes:
        model: The model.
        leaves_adapter_out: Whether it has an adapter, which is then disabled.
    """

    model: ShardedModel
    leaves_adapter_out: bool

    def log_probs(self, batch: DeviceBatch) -> torch.Tensor:
        module = self.model.module
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad(), adapters_disabled(module) if self.leaves_adapter_out else nullcontext():
                return forward_answers(self.model, batch)
        finally:
            module.train(was_training)


@dataclass(frozen=True)
class DispatchedReference:
    """A dispatched model, for the pass before training; its log-probabilities are collectives.

    Attributes:
        model: The model.
        context: The ranks. All of them raise the error of any one, such as an unreadable disk.
    """

    model: PreTrainedModel
    context: DistributedContext

    def log_probs(self, batch: DeviceBatch) -> torch.Tensor:
        function = LabelLogProbs(batch.labels.flatten()[batch.label_positions])
        values = run_on_all(self.context, lambda: dispatched_rows(self.model, batch, function))
        return batch.answer_sums(values.to(batch.labels.device).view(batch.labels.shape))


_PassReference: TypeAlias = ModelReference | DispatchedReference  # for the pass before training


def reference_kind(config: FinetuneSettings) -> str | None:
    """Return the kind of a run's reference, as `ObjectiveConfig.reference_kind` does."""
    begins_at_base, is_streamed = config.adapter.begins_at_base, config.data.streaming
    return config.objective.reference_kind(begins_at_base=begins_at_base, is_streamed=is_streamed)


def open_reference(config: FinetuneSettings, start: RunStart, loaded: LoadedModel) -> Reference | Teacher | None:
    """Return the reference or the teacher of a run, None for objectives without one; a collective.

    Args:
        config: The settings of `finetune`.
        start: The ranks.
        loaded: The model that is trained.
    """
    if isinstance(config.objective, DistillConfig):
        if config.objective.is_precomputed:
            return PrecomputedTeacher()
        return open_teacher(config, config.objective, start.context)
    match reference_kind(config):
        case "adapter":
            return ModelReference(loaded.model, leaves_adapter_out=True)
        case "sharded":
            return _load_reference(config, start.context)
        case "precomputed":
            return PrecomputedReference()
    return None


def _load_reference(config: FinetuneSettings, context: DistributedContext) -> ModelReference:
    """Load the model that training began from, sharded like the trained one; a collective.

    It is quantized like the trained one, so it also receives a new adapter. The adapter is disabled when the reference
    runs, unless it begins with the values of an earlier one.
    """
    where = (config.model, config.source, config.shard, config.adapter, None, context)
    with unfilled_model(*where, chunks_any_vocabulary=True) as unfilled:
        unfilled.module.requires_grad_(False)
        loaded = unfilled.load(config.shard.shard(unfilled.module, context), config.seed)
        return ModelReference(loaded.model, leaves_adapter_out=config.adapter.begins_at_base)


def _load_for_pass(config: FinetuneSettings, context: DistributedContext) -> _PassReference:
    """Load the model that training began from for the pass before training; a collective."""
    objective = config.objective
    if not isinstance(objective, ReferenceConfig) or objective.reference != DISPATCHED:
        return _load_reference(config, context)
    budgets, dtype = objective.reference_max_memory, config.shard.param_dtype
    model = open_dispatched(config, _began_from(config), budgets, context, "reference", dtype)
    if config.model.attention != "auto":
        model.set_attn_implementation(config.model.attention)
    return DispatchedReference(model, context)


def _began_from(config: FinetuneSettings) -> Location:
    """Return the model that training began from: with `adapter.path`, an adapter on its base."""
    return locate_earlier(config.adapter, model_name(config.model)) or config.source


def add_reference(config: FinetuneSettings, start: RunStart, data: Samples) -> Samples:
    """Add a reference's log-probabilities or a teacher's tokens to samples, if computed before training; a collective.

    Values that the data cache lacks are computed, by the model that training began from or by the teacher, and added to
    the cache.

    Args:
        config: The settings of `finetune`.
        start: The ranks, and a signal that ends the pass.
        data: The samples.

    Raises:
        ConfigError: On all ranks: settings contradict the number of steps, which may depend on the data.
        Interrupted: On all ranks: a signal came during the pass.
        DataError: On all ranks: the cache cannot be read or written.

    Example:
        >>> data = fs.add_reference(config, start, fs.open_data(config, start))  # doctest: +SKIP
    """
    if isinstance(config.objective, DistillConfig):
        return add_targets(config, config.objective, start, data)
    if reference_kind(config) != PRECOMPUTED:
        return data
    run_on_main(start.context, lambda: resume.planned_training(data.train, config, start.resume_from))
    if data.held_out is not None:
        data = replace(data, held_out=data.held_out.head(config.train.eval_windows))
    extended, notes = [], []
    for source, (values, note) in zip(data.sources, _values(config, start, data.sources), strict=True):
        extended.append(with_extras(source, EXTRA, values.numpy()))
        notes.append(note)
    return data.with_sources(extended, notes)


def _values(
    config: FinetuneSettings, start: RunStart, sources: Sequence[SourceDataset]
) -> list[tuple[torch.Tensor, str]]:
    """Return the values of each source, float32 [num_pairs, 2], cached or computed, and a line to print; a collective.

    The reference is loaded when the first must be computed.
    """
    waiting = start.context.with_new_group(LONGEST_TIMEOUT_SECONDS)  # for the one that reads all weights
    files = run_on_main(waiting, lambda: _cache_files(config, sources))
    reference: _PassReference | None = None
    found = []
    for source, file in zip(sources, files, strict=True):
        what = f"reference log-probabilities of {format_count(len(source), 'sample')}"
        assert isinstance(source, ComparedRows), "objectives with a reference have such samples"
        values, origin = run_on_main(waiting, partial(_read, file, source.num_pairs)), f"from {file}"
        if values is None:
            reference = _load_for_pass(config, start.context) if reference is None else reference
            values, origin = _compute(reference, source, config, start), f"computed, and kept in {file}"
            run_on_main(waiting, partial(_write, file, values))
        found.append((values, f"{what}: {origin}"))
    if isinstance(reference, ModelReference):
        free_gathered(reference.model.module)
    del reference
    gc.collect()  # modules and hooks refer to each other
    return found


def _cache_files(config: FinetuneSettings, sources: Sequence[SourceDataset]) -> list[Path]:
    """Return the cache file for each source and the reference's weights, all of which are read."""
    model, shard, source = config.model, config.shard, _began_from(config)
    try:
        digests = model_digests(describe_model(source))
    except InputError as error:
        raise ConfigError(
            f"The reference needs the model that training began from, also in a run that is resumed: "
            f"model.path={model.path} cannot be read. {error}"
        ) from error
    kernels, norms_in_float32 = model.kernels, shard.norms_in_float32
    if isinstance(config.objective, ReferenceConfig) and config.objective.reference == DISPATCHED:  # which uses neither
        kernels, norms_in_float32 = "none", False
    numbers = [model.dtype, model.attention, kernels, shard.param_dtype, norms_in_float32]
    numbers += [config.adapter.quantize, model.trust_remote_code]
    names = [json_digest([_VERSION, digests, numbers, source.identity]) for source in sources]
    return [cache_directory(config.data) / f"reference-{name}.safetensors" for name in names]


def _read(file: Path, num_pairs: int) -> torch.Tensor | None:
    """Read the values of a source, float32 [num_pairs, 2]; None if the file does not exist."""
    if not file.exists():
        return None
    try:
        values = load_file(file)[EXTRA]
    except Exception as error:  # safetensors has errors of its own
        raise DataError(f"{file} is damaged ({error}). Delete it, so that it is computed again.") from error
    if values.shape != (num_pairs, 2) or values.dtype != torch.float32 or not bool(values.isfinite().all()):
        raise DataError(f"{file} is damaged: it has {values.dtype} {list(values.shape)}. Delete it.")
    return values


def _write(file: Path, values: torch.Tensor) -> None:
    with cache_errors(file.parent):
        write_atomically(file, save({EXTRA: values}), sync=True)


def _log_probs(reference: Reference, batch: DeviceBatch) -> torch.Tensor:
    """Return the log-probabilities of both answers of each pair, float32 [num_pairs, 2]."""
    if batch.packed is None or not batch.packed.has_two_rows:
        return reference.log_probs(batch).view(-1, 2)
    return torch.stack([reference.log_probs(batch.of_row(row)) for row in (0, 1)], dim=1)


def _compute(
    reference: _PassReference, source: ComparedRows, config: FinetuneSettings, start: RunStart
) -> torch.Tensor:
    """Compute the log-probabilities of both answers of each pair, or rows of each sample, float32 [num_pairs, 2].

    A collective.
    """
    context, size = start.context, config.train.micro_batch_size
    module = reference.model.module if isinstance(reference, ModelReference) else reference.model
    divided = context_ranks(module, context)
    values = torch.zeros(source.num_pairs, 2, dtype=torch.float32)
    title = "log-probabilities of the reference"
    with report_progress(len(source), title, "samples", enabled=context.is_main) as count:
        for indices in evaluation_batches(len(source), size, context.data_rank, context.num_data_ranks):
            batch = own_part(read_batch(source, indices, module), divided, keeps_whole=True)
            found = _log_probs(reference, to_device(batch, context.device)).cpu()
            # Samples that only fill up a batch come last.
            pairs = [pair for index in indices.tolist() if index != NO_WINDOW for pair in source.pairs_of(index)]
            values[pairs] = found[: len(pairs)]
            count(len(indices) * context.num_data_ranks)
            raise_if_stopped(start.stop, context, f"the {title}")
    if context.rank % (context.num_tensor_ranks * context.num_context_ranks):  # its neighbors have the same values
        values.zero_()
    context.all_reduce_(values)
    if not bool(values.isfinite().all()):
        bad = torch.nonzero(~values.isfinite().all(1)).flatten()[:5].tolist()
        raise DataError(
            f"The reference's log-probabilities of samples {bad} of {config.data.section}.path are not finite: its "
            f"weights are not usable in shard.param_dtype={config.shard.param_dtype}."
        )
    return values
