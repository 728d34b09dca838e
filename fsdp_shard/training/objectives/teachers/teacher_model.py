"""The teacher of `objective=distill`: dispatched alongside the model, or run once before training with cached results.

A dispatched model is placed on GPU, CPU and disk by budgets, so a teacher may be larger than the memory.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from fsdp_shard.checkpoint import describe_model, model_digests
from fsdp_shard.data import (
    IGNORE_INDEX,
    Ints,
    Samples,
    SourceDataset,
    cache_directory,
    used_samples,
    with_token_values,
)
from fsdp_shard.distributed import LONGEST_TIMEOUT_SECONDS, DistributedContext, run_on_all, run_on_main
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import load_config
from fsdp_shard.training.batch_loader import evaluation_batches, read_batch, to_device
from fsdp_shard.training.checkpoints import resume
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.loss.device_batch import DeviceBatch
from fsdp_shard.training.loss.distillation import Targets, TopTokens, split_targets
from fsdp_shard.training.model_origin import RunStart
from fsdp_shard.training.objectives.dispatched_model import dispatched_rows, open_dispatched
from fsdp_shard.training.objectives.distill import DistillConfig
from fsdp_shard.training.objectives.teachers.teacher_cache import LOG_PROBS, TOKENS, CacheWriter, TeacherCache
from fsdp_shard.training.stop_signal import any_stop_signal, stopped_before_training
from fsdp_shard.utils import format_count, json_digest, report_progress

_VERSION = "teacher-1"  # of the cached values
_BATCHES_KEPT = 64  # batches of a rank between records of what was computed


@dataclass(frozen=True)
class PrecomputedTeacher:
    """A teacher whose results come with the samples."""

    def targets(self, batch: DeviceBatch) -> Targets:
        if not batch.token_values:
            raise ConfigError(
                "The samples lack the teacher's tokens, which fs.add_reference(config, start, data) adds in the "
                "shipped recipe; add that line, or set objective.teacher_logits=computed."
            )
        return Targets(batch.token_values[LOG_PROBS], batch.token_values[TOKENS])


@dataclass(frozen=True)
class ModelTeacher:
    """A dispatched model.

    Attributes:
        model: The model, in eval mode.
        k: Tokens of each prediction.
    """

    model: PreTrainedModel
    k: int

    def targets(self, batch: DeviceBatch) -> Targets:
        label_positions, values = batch.label_positions, dispatched_rows(self.model, batch, TopTokens(self.k))
        return split_targets(values[label_positions.to(values.device)].to(label_positions.device))


def open_teacher(config: FinetuneSettings, distill: DistillConfig, context: DistributedContext) -> ModelTeacher:
    """Load the teacher, dispatched, on every rank; a collective.

    Args:
        config: The settings of `finetune`.
        distill: Its objective.
        context: The ranks.
    """
    model = open_dispatched(config, distill.source, distill.teacher_max_memory, context, "teacher")
    return ModelTeacher(model, distill.num_top_tokens(model.config))


def add_targets(config: FinetuneSettings, distill: DistillConfig, start: RunStart, data: Samples) -> Samples:
    """Add the teacher's tokens to the samples, if they are computed before training; a collective.

    The teacher computes the values that the run needs and the data cache lacks, and they are added to the cache.

    Args:
        config: The settings of `finetune`.
        distill: Its objective.
        start: The ranks, a signal that ends the pass, and the step to resume from.
        data: The samples.

    Raises:
        Interrupted: On all ranks: a signal came during the pass. Computed values are kept.
        DataError: On all ranks: the cache cannot be read or written, or the teacher's results are not finite.
    """
    if not distill.is_precomputed:
        return data
    context = start.context
    waiting = context.with_new_group(LONGEST_TIMEOUT_SECONDS)
    caches = run_on_main(waiting, lambda: _caches(config, distill, data.sources))
    used = run_on_all(waiting, lambda: _samples_in_use(config, start.resume_from, data))
    teacher = _TeacherPass(config, distill, start)
    extended, notes = [], []
    for source, cache, wanted in zip(data.sources, caches, used, strict=True):
        run_on_main(waiting, partial(cache.create, source))
        num_computed = teacher.fill(source, cache, wanted)
        extended.append(run_on_all(context, partial(_with_targets, source, cache)))
        done = f"{num_computed:,} computed, and kept in" if num_computed else "from"
        notes.append(f"teacher's tokens of {format_count(int(wanted.sum()), 'sample')}: {done} {cache.directory}")
    teacher.free()
    return data.with_sources(extended, notes)


def _with_targets(source: SourceDataset, cache: TeacherCache) -> SourceDataset:
    starts = cache.starts(len(source))
    return with_token_values(source, cache.values(int(starts[-1])), starts, cache.done(len(source)))


def _caches(config: FinetuneSettings, distill: DistillConfig, sources: Sequence[SourceDataset]) -> list[TeacherCache]:
    """Return the cache for each source and the teacher's weights, all of which are read."""
    teacher = distill.source
    k = distill.num_top_tokens(load_config(teacher.config_directory, config.model.trust_remote_code))
    model = model_digests(describe_model(teacher))
    names = [json_digest([_VERSION, model, k, source.identity]) for source in sources]
    return [TeacherCache(cache_directory(config.data) / f"teacher-{name}", k) for name in names]


def _samples_in_use(config: FinetuneSettings, step: Path | None, data: Samples) -> list[npt.NDArray[np.bool_]]:
    """Return which samples of each source are evaluated, or trained after the step to resume from."""
    train, state = resume.planned_training(data.train, config, step)
    num_left = max(0, train.num_steps - state.step) * train.global_batch_size
    positions = range(state.num_samples, state.num_samples + num_left)
    return used_samples(data.train, positions, data.held_out, train.eval_windows)


class _TeacherPass:
    """Computes values that caches lack; the teacher is loaded when the first must be computed."""

    def __init__(self, config: FinetuneSettings, distill: DistillConfig, start: RunStart) -> None:
        self._config, self._distill, self._context, self._stop = config, distill, start.context, start.stop
        self._teacher: ModelTeacher | None = None

    def fill(self, source: SourceDataset, cache: TeacherCache, wanted: npt.NDArray[np.bool_]) -> int:
        """Compute the values of wanted samples that the cache lacks, and return their number; a collective."""
        context = self._context
        done = run_on_main(context, lambda: cache.done(len(source)))
        missing = np.flatnonzero(wanted & ~done)
        if not len(missing):
            return 0
        if self._teacher is None:
            self._teacher = open_teacher(self._config, self._distill, context)
        starts = run_on_all(context, lambda: cache.starts(len(source)))
        progress = report_progress(
            len(missing), "most likely tokens of the teacher", "samples", enabled=context.is_main
        )
        size = self._config.train.micro_batch_size
        batches = evaluation_batches(len(missing), size, context.data_rank, context.num_data_ranks)
        own = np.zeros(len(source), bool)
        with progress as count, cache.writer(int(starts[-1])) as writer:
            for number, chosen in enumerate(batches, start=1):
                indices = missing[chosen[chosen >= 0]]
                run_on_all(context, partial(self._write, writer, source, indices, starts))
                own[indices] = True
                count(len(chosen) * context.num_data_ranks)
                signal = any_stop_signal(self._stop, context)
                if signal or number % _BATCHES_KEPT == 0:
                    done = self._keep(cache, writer, done, own)
                if signal:
                    advice = "What it has computed is kept; give the same command to continue."
                    raise stopped_before_training(signal, "the pass of the teacher", advice)
            self._keep(cache, writer, done, own)
        return len(missing)

    def _write(self, writer: CacheWriter, source: SourceDataset, indices: Ints, starts: Ints) -> None:
        """Compute and write the values of some samples, if there are any."""
        assert self._teacher is not None
        if not len(indices):
            return
        batch = read_batch(source, indices, self._teacher.model)
        targets = self._teacher.targets(to_device(batch, self._context.device))
        log_probs, tokens = targets.log_probs.cpu(), targets.tokens.cpu()
        if not bool(log_probs.isfinite().all()):
            raise DataError(
                f"The logits of objective.teacher={self._distill.teacher} for samples {indices[:5].tolist()} are not "
                f"finite: its weights are not usable."
            )
        ends = np.cumsum([0, *(batch.labels != IGNORE_INDEX).sum(-1)])
        for index, first, last in zip(indices, ends[:-1], ends[1:], strict=True):
            values = {LOG_PROBS: log_probs[first:last].numpy(), TOKENS: tokens[first:last].numpy()}
            writer.write(int(starts[index]), values)

    def _keep(
        self, cache: TeacherCache, writer: CacheWriter, done: npt.NDArray[np.bool_], own: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Record the samples that any rank has computed as done, and return all that are done; a collective."""
        run_on_all(self._context, writer.sync)
        all_own = torch.from_numpy(own.astype(np.int32))
        self._context.all_reduce_(all_own, "max")
        done = done | all_own.numpy().astype(bool)
        run_on_main(self._context, lambda: cache.mark(done))
        return done

    def free(self) -> None:
        """Free the memory of the teacher."""
        self._teacher = None
        gc.collect()  # modules and hooks refer to each other
