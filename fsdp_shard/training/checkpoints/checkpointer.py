"""Checkpoints for your own training loop, with the guarantees of `finetune`: a step is complete or absent, has digests,
and resumes on any number of ranks under any wrapper.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex, TypedDict, TypeVar, Unpack, cast

import torch

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import CHECKPOINTS, RUN_CONFIG, CheckpointConfig, StepStore
from fsdp_shard.distributed import Communicator, current_ranks, run_on_all, run_on_main
from fsdp_shard.errors import CheckpointError, ConfigError, SaveError
from fsdp_shard.sharding import fill_copied_buffers
from fsdp_shard.training.checkpoints.background_saver import BackgroundSaver
from fsdp_shard.training.checkpoints.checkpointer_document import (
    DOCUMENT,
    first_difference,
    has_document,
    read_document,
    restore_random_state,
)
from fsdp_shard.training.checkpoints.optimizer_groups import (
    Optimizers,
    bare_optimizers,
    cleared_states,
    create_states,
    format_names,
    load_slots,
    optimizer_parts,
    set_options,
    set_values,
    slot_prefix,
    state_digests,
)
from fsdp_shard.training.checkpoints.run_lock import run_lock
from fsdp_shard.training.checkpoints.side_files import check_processor
from fsdp_shard.training.checkpoints.step_parts import (
    Models,
    SaveArguments,
    StepParts,
    check_extra_states,
    collect,
    given_figures,
    given_states,
    shards_of_all,
)
from fsdp_shard.training.checkpoints.step_publisher import StepPublisher
from fsdp_shard.training.checkpoints.step_reader import Stateful, StepReader
from fsdp_shard.training.optim.build import runs_step_hooks
from fsdp_shard.training.stop_signal import StopSignal, any_stop_signal
from fsdp_shard.utils import check, nearest, path_text, whole_number

_logger = logging.getLogger("fsdp_shard")
F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of `Checkpointer.restore`.

    Attributes:
        step: The step that was restored.
        directory: Its directory.
        extra: What was given as `extra`, on every rank.
        extra_per_rank: What this rank gave; None if another number of ranks saved the step.
        metrics: The metrics of the step.
        has_random_state: Whether the random state of this rank was restored; not on another number of ranks.

    Example:
        >>> restored = checkpointer.restore(model, optimizer)  # doctest: +SKIP
        >>> first_step = restored.step + 1 if restored else 1  # doctest: +SKIP
    """

    step: int
    directory: Path
    extra: Any
    extra_per_rank: Any
    metrics: dict[str, float]
    has_random_state: bool


class CheckpointerSettings(TypedDict, total=False):
    """The settings of a `Checkpointer`: those of `CheckpointConfig`, except when and what to save."""

    layout: str
    asynchronous: bool
    timeout_seconds: float
    max_failures: int
    keep_last: int | None
    keep_every: int | None
    keep_optimizer_last: int | None
    verify: bool
    verify_on_resume: bool
    remote: str | None
    max_shard_size: str


def _one_at_a_time(method: F) -> F:
    """Make a call of a method wait for those of other threads, which would end the same save, or begin another."""

    @functools.wraps(method)
    def call(self: Checkpointer, /, *args: Any, **kwargs: Any) -> Any:
        with self._calls:
            return method(self, *args, **kwargs)

    return cast(F, call)


class Checkpointer:
    """Saves and restores models and optimizers, whoever wrapped them; every method is a collective of all ranks.

    Parameters may be plain, under DistributedDataParallel, FullyShardedDataParallel (with `use_orig_params=True`) or
    `fully_shard`, or tensor-parallel DTensors on any mesh. Steps are written to PATH/checkpoints/step-N, and `inspect`,
    `verify`, `convert` and, of models of transformers, `generate` read them. No file is a pickle. Calls from several
    threads wait for each other; with several ranks, the threads must call in the same order on all of them.

    Args:
        path: The run directory. Another run cannot use it at the same time.
        monitor: The metric by which a step is the best, which is always kept. A value that is not finite never is.
        mode: `min` or `max`: whether the lowest or highest is the best.
        processor: A tokenizer or processor of transformers, saved with each step so that text can be generated from it.
        settings: Those of `CheckpointerSettings`, such as `keep_last=3`, `asynchronous=False`, `layout="gathered"`,
            `remote="s3://bucket/run"`; docs/config.md describes them under `checkpoint.*`. A first failed save ends
            the run (`max_failures=1`) unless it is set otherwise.

    Raises:
        ConfigError: An argument is wrong, another run uses the directory, or this process is one of several ranks and
            has no process group.
        StorageError: The directory cannot be created or written.
        RemoteError: The remote store cannot be reached.

    Example:
        >>> import torch, fsdp_shard as fs
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with fs.Checkpointer(run_dir, keep_last=2) as checkpointer:
        ...     restored = checkpointer.restore(model, optimizer)
        ...     first = restored.step + 1 if restored else 1
        ...     for step in range(first, 4):
        ...         model(torch.ones(2)).sum().backward()
        ...         optimizer.step()
        ...         checkpointer.save(step, model, optimizer, extra={"next_sample": step})
        ...     checkpointer.wait()
        ...     checkpointer.steps
        [2, 3]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: str = "min",
        processor: Any = None,
        **settings: Unpack[CheckpointerSettings],
    ) -> None:
        if "://" in path_text(path):
            raise ConfigError(
                f"path={path} is not a local directory; give one, and remote={path} to have its steps uploaded."
            )
        check_processor(processor)
        self._calls = threading.RLock()
        # Absolute, so that a loop may change its working directory.
        self.path, self._config = Path(path).expanduser().absolute(), check_settings(settings, mode)
        self._monitor, self._sign, self._processor = monitor, 1 if mode == "min" else -1, processor
        self._ranks = current_ranks(self._config.timeout_seconds)
        self._store = StepStore(self.path / CHECKPOINTS)
        with ExitStack() as opening:
            lock = opening.enter_context(run_lock(os.fspath(self.path), self._ranks))
            run_on_main(self._ranks, self._store.recover)
            self._publisher = StepPublisher(self._ranks, self._store, self._config, is_adapter=False)
            self._publisher.upload_missing()
            self._log = _Log(self._ranks)
            self._saver = BackgroundSaver(self._ranks, self._config, self._publisher, self._log, lock, prefix="")
            opening.callback(_destroy_groups, self._saver, self._publisher, self._ranks)
            self._exit_stack = opening.pop_all()
        self._finalizer = weakref.finalize(self, _finalize, self._saver, self._exit_stack, os.getpid())
        self._signal: StopSignal | None = None
        self._is_closed = self._has_warned = self._has_compared = False

    # ---- saved steps

    @property
    def steps(self) -> list[int]:
        """The saved steps, ascending."""
        return self._store.steps()

    @property
    def latest(self) -> int | None:
        """The highest saved step."""
        return self._store.latest()

    @property
    def best(self) -> int | None:
        """The step with the best `monitor` so far."""
        return self._store.best()

    # ---- saving

    @_one_at_a_time
    def save(
        self,
        step: SupportsIndex,
        model: Models,
        optimizer: Optimizers = None,
        *,
        extra: Any = None,
        extra_per_rank: Any = None,
        metrics: Mapping[str, float | torch.Tensor] | None = None,
        **states: Stateful | None,
    ) -> None:
        """Save a step.

        With an optimizer, and unless `asynchronous=False`, it is written in the background, and the next call raises
        what went wrong; otherwise this call does. Tensors that an optimizer of this save updates, at most this rank's
        shards, are copied before the next `optimizer.step()`; all others are copied at once. Call `wait()` before other
        changes of weights, as by `load_weights` or by swapping in an average: in CPU memory, an in-place change that
        torch counts (not through `.data`) fails the save; on a GPU it goes unnoticed.

        Args:
            step: The number of the step, an integer of any library, which must not be saved yet.
            model: The model as it is trained, or several by name.
            optimizer: Its optimizer, or several by name.
            extra: Data of rank 0, such as the position in a data set: tensors, None, bool, numbers, strings, bytes, and
                lists, tuples and dicts of them.
            extra_per_rank: The same kinds of data, separate for each rank.
            metrics: Figures of the step, as numbers or tensors with one element; those of rank 0 count.
            states: Objects with `state_dict()` and `load_state_dict()`, by any name, such as `scheduler=scheduler`.
                Their states must be the same on all ranks, except for DTensors; None is left out.

        Raises:
            SaveError: The step exists, the directory belongs to a run of `finetune`, the ranks disagree about the step,
                a state is not plain data, or this or the previous save failed. Earlier steps are kept.
            ModelError: A parameter has no values, or it is unknown which part of it this rank holds.
            ConfigError: The Checkpointer is closed, `metrics` lacks `monitor`, an optimizer is none or is of other
                parameters, or a state has no `state_dict()` or `load_state_dict()`.
        """
        self._require_open()
        self._saver.wait()
        if (number := whole_number(step)) is None or number < 0:
            raise SaveError(f"step must be an integer of at least 0, not {step!r}.")
        step, ranks = number, self._ranks
        figures = run_on_main(ranks, lambda: given_figures(metrics or {}))  # each rank may have measured other figures
        value = self._monitored_metric(figures)
        given = SaveArguments(step, model, bare_optimizers(optimizer), states, extra, extra_per_rank, figures)
        run_on_main(ranks, lambda: self._check_new(step))
        parts = run_on_all(ranks, lambda: collect(given, self._processor, ranks))
        self._check_same(given, parts)
        of_ranks = ranks.gather_object(parts.rank_document)
        has_slots = ranks.all_reduce([float(bool(parts.slots))], "max")[0] > 0  # a rank may hold none
        content = parts.to_content(of_ranks, has_slots=has_slots, is_main=ranks.is_main)
        is_best = value is not None and run_on_main(ranks, lambda: self._is_best(value))
        hooked = [one for one in given.optimizers.values() if runs_step_hooks(one)]
        self._saver.copy_before_steps_of(hooked)
        in_background = self._config.asynchronous and 0 < len(hooked) == len(given.optimizers)
        self._saver.save_content(step, content, is_best=is_best, in_background=in_background)

    def _check_same(self, given: SaveArguments, parts: StepParts) -> None:
        """Raise SaveError if the ranks differ in what only one of them saves; a collective."""
        if self._ranks.world_size == 1:
            return
        digests: dict[str, int | None] = {**parts.tensors.digests}
        digests |= state_digests(given.optimizers, parts.weights, of_any_size=not self._has_compared)
        self._has_compared = True
        if (name := first_difference(self._ranks, digests)) is not None:
            raise SaveError(
                f"Step {given.step} was not saved: the ranks differ in {name}, and only the value of one rank could be "
                f"restored. Sharded tensors must be DTensors; pass other data that differs by rank as extra_per_rank."
            )

    @_one_at_a_time
    def save_on_signal(
        self, step: SupportsIndex, model: Models, optimizer: Optimizers = None, **arguments: Any
    ) -> bool:
        """Save a step if a rank was asked to stop (SIGTERM, SIGINT, SIGUSR1 or SIGHUP); call it after each step.

        From the first call on, these signals no longer end the process: end the loop when this returns True.

        Args:
            step: The number of the step. If it is already saved, nothing more happens.
            model: As in `save`.
            optimizer: As in `save`.
            arguments: As in `save`.

        Returns:
            Whether to end the loop. If so, the step is on the disk.
        """
        self._require_open()
        if self._signal is None:
            self._signal = self._exit_stack.enter_context(StopSignal())
        if not any_stop_signal(self._signal, self._ranks):
            return False
        self._saver.wait()  # self.wait() would also raise the error of an earlier save that was tolerated
        if step not in run_on_main(self._ranks, self._store.steps):
            self.save(step, model, optimizer, **arguments)
            self.wait()
        return True

    @_one_at_a_time
    def poll(self) -> None:
        """Report a finished background save, which otherwise the next `save` or `wait` does."""
        self._require_open()
        self._saver.poll()

    @_one_at_a_time
    def wait(self) -> None:
        """Wait until the last step is on the disk; raises SaveError if it could not be saved."""
        self._require_open()
        self._saver.finish()

    def close(self) -> None:
        """Wait for the last step and release the directory; as leaving the `with` block does."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, such as Ctrl-C, nothing may wait for a thread that waits for a save.
        is_alone = self._calls.acquire(blocking=error is None)
        try:
            self._close(kind, error, trace)
        finally:
            if is_alone:
                self._calls.release()

    def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_closed:
            return
        self._finalizer.detach()
        try:
            if error is None:
                self._saver.finish()
        except BaseException as raised:
            error = raised  # such as Ctrl-C, after which the saver waits for a short time only
            raise
        finally:
            self._is_closed = True
            self._saver.__exit__(kind, error, trace)
            self._exit_stack.close()
            # The threads of its groups end with the last reference. One that frees the tensors of the last collectives
            # while Python exits would abort the process (torch 2.13).
            del self._saver, self._publisher, self._ranks, self._log

    # ---- restoring

    @_one_at_a_time
    def restore(
        self,
        model: Models,
        optimizer: Optimizers = None,
        *,
        step: SupportsIndex | str = "latest",
        **states: Stateful | None,
    ) -> Restored | None:
        """Fill models, optimizers and states from a step, which may come from other wrappers or another world size.

        A model must have exactly the saved weights, and an optimizer the saved options and states. The optimizer
        creates its states by a step that changes nothing, which runs its step hooks.

        Args:
            model: The model, whose values are replaced, or several by name.
            optimizer: Its optimizer, or several by name.
            step: The step, `latest` or `best`.
            states: The objects that were saved, by their names.

        Returns:
            What was restored, or None if no step is saved.

        Raises:
            CheckpointError: The step is damaged, does not exist, or belongs to another model, optimizer or objects.
            ConfigError: The Checkpointer is closed, or an argument is wrong, such as `step`.
        """
        self._require_open()
        wanted = step if isinstance(step, str) else whole_number(step)
        if wanted is None or (isinstance(wanted, str) and wanted not in ("latest", "best")):
            raise ConfigError(f"step={step!r} is neither the number of a step nor 'latest' or 'best'.")
        self._saver.wait()
        found = run_on_main(self._ranks, lambda: self._find(wanted))
        if found is None:
            return None
        directory = self._store.path(found)
        if self._config.verify_on_resume:
            ranks = self._ranks
            run_on_all(ranks, lambda: checkpoint.check_content(directory, ranks.rank, ranks.world_size))
        with ExitStack() as opened:
            stored = run_on_all(self._ranks, lambda: StepReader.open(directory, opened))
            return self._fill(stored, model, optimizer, states)

    def _find(self, step: int | str) -> int | None:
        if (remote := self._publisher.remote) is not None:
            checkpoint.fetch_latest(remote, self._store)
            if isinstance(step, int) and step not in self._store.steps() and remote.has(step):
                checkpoint.fetch_step(remote, step, self._store.path(step), replace=False)
        steps = self._store.steps()
        if step == "latest" or (step == "best" and not steps):
            return max(steps, default=None)
        wanted = self._store.best() if step == "best" else step
        if wanted not in steps:
            raise CheckpointError(
                f"{self._store.root} has no step {step}; it has {', '.join(map(str, steps)) or 'none'}."
            )
        return int(wanted)

    def _fill(
        self, stored: StepReader, model: Models, optimizer: Optimizers, states: Mapping[str, Stateful | None]
    ) -> Restored:
        """Fill everything from a step, after comparing everything with it."""
        ranks, optimizers = self._ranks, bare_optimizers(optimizer)
        shards = run_on_all(ranks, lambda: shards_of_all(model, ranks))
        stateful_objects = run_on_all(ranks, lambda: given_states(states, model))
        values = run_on_all(ranks, lambda: stored.read(shards, optimizers, stateful_objects, ranks))
        run_on_all(ranks, lambda: check_extra_states(stateful_objects, values.object_states))

        def create(attempt: int) -> None:
            for name, one in optimizers.items() if attempt else ():
                set_options(one, values.options[name])  # some decide which states there are
            create_states(optimizers, shards.shards, stored.slots)

        with cleared_states(optimizers):
            if (index := stored.optimizer_index) is not None:
                load_slots(index, stored.slots, create, lambda: optimizer_parts(optimizers, shards.shards)[0], ranks)
            else:
                run_on_all(ranks, lambda: create(0))
            run_on_all(ranks, lambda: checkpoint.load_shards(stored.weights, shards.shards))
            fill_copied_buffers(shards)
        for name, bare_optimizer in optimizers.items():
            set_options(bare_optimizer, values.options[name])
            set_values(bare_optimizer, slot_prefix(name), shards.shards, values.scalar_state)
        for name, stateful in stateful_objects.items():
            stateful.load_state_dict(values.object_states[name])
        if (rank_state := values.rank_state) is not None:
            run_on_all(ranks, lambda: restore_random_state(rank_state["random"], str(stored.directory / DOCUMENT)))
        return Restored(
            step=stored.document.step,
            directory=stored.directory,
            extra=values.extra,
            extra_per_rank=None if rank_state is None else rank_state["extra"],
            metrics=stored.document.metrics,
            has_random_state=rank_state is not None,
        )

    def _monitored_metric(self, figures: Mapping[str, float]) -> float | None:
        """Return the metric that makes a step the best, None if it is not finite: nothing would be better than NaN."""
        if self._monitor is None or not figures:
            return None
        if self._monitor not in figures:
            raise ConfigError(
                f"monitor={self._monitor!r}{nearest(self._monitor, [*figures])} is not one of the metrics that save() "
                f"was given: {format_names(figures)}."
            )
        value = figures[self._monitor]
        if math.isfinite(value):
            return value
        if not self._has_warned:
            self._has_warned = True
            self._log.warn(f"{self._monitor} is {value}, which is not finite: such a step is not the best.")
        return None

    def _is_best(self, value: float) -> bool:
        """Return whether a metric is better than that of the saved step marked as the best; on rank 0."""
        assert self._monitor is not None
        if (best := self._store.best()) is None:
            return True
        before = read_document(self._store.path(best)).metrics.get(self._monitor, math.nan)
        return not math.isfinite(before) or self._sign * value < self._sign * before

    def _check_new(self, step: int) -> None:
        """Reject a step that exists, and steps of another run."""
        self._store.require_new(step)
        self._refuse_foreign_directory(step)

    def _refuse_foreign_directory(self, step: int) -> None:
        """Reject the directory or remote of another run, whose steps retention would delete."""
        latest = self._store.latest()
        if latest is None and (uploaded := self._publisher.not_fetched) is not None:
            raise SaveError(
                f"Step {step} was not saved: remote={self._config.remote} has steps up to {uploaded} and "
                f"{self._store.root} has none, so keep_last would delete the steps of another run. Call restore() "
                f"before the first save to continue from them, or give another remote."
            )
        if latest is None or has_document(directory := self._store.path(latest)):
            return
        whose = "`fsdp-shard finetune`" if (directory / RUN_CONFIG).is_file() else "something else"
        raise SaveError(
            f"{directory} has no {DOCUMENT}: {whose} saved it, not a Checkpointer, which would delete the steps of "
            f"that run (keep_last). Give the Checkpointer another directory than {self.path}."
        )

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"The Checkpointer of {self.path} is closed; make a new one.")


def check_settings(
    settings: Mapping[str, Any], mode: str = "min", *, kind: str = "Checkpointer", other_names: Sequence[str] = ()
) -> CheckpointConfig:
    """Check the settings of a Checkpointer, which saves only when the loop calls it.

    Args:
        settings: The settings that are fields of `CheckpointConfig`.
        mode: Whether the lowest or the highest metric is the best.
        kind: The class that received the settings, for errors.
        other_names: The names of the other settings of that class.

    Raises:
        ConfigError: A setting is wrong or unknown.
    """
    if mode not in ("min", "max"):
        raise ConfigError(f"mode={mode!r} is neither 'min' nor 'max'.")
    known = list(CheckpointerSettings.__annotations__)
    for name in settings:
        if name not in known:
            names = [*other_names, *known]
            raise ConfigError(f"{name} is not a setting of {kind}{nearest(name, names)}; it has {', '.join(names)}.")
    config = CheckpointConfig(**{"max_failures": 1, **settings, "every": 1})
    check(config)
    return config


def _destroy_groups(saver: BackgroundSaver, publisher: StepPublisher, ranks: Communicator) -> None:
    """Destroy the groups of a Checkpointer, unless a save still uses them."""
    if not saver.is_saving:
        publisher.close()
        ranks.destroy_group()


def _finalize(saver: BackgroundSaver, opened: ExitStack, process: int) -> None:
    """End the save of a Checkpointer that nobody has closed, when it is collected or the process exits."""
    if os.getpid() != process:  # a fork has neither the save nor the lock
        return
    if saver.is_saving_here:  # the garbage collector runs in any thread
        threading.Thread(target=_finalize, args=(saver, opened, process), name="end-checkpointer").start()
        return
    # At a prompt, which has `ps1`, the last error ended a command, not the process.
    saver.abandon(is_failing=getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"))
    opened.close()


class _Log:
    """Reports saves through the logger `fsdp_shard`, on rank 0."""

    def __init__(self, ranks: Communicator) -> None:
        self._log = _logger.log if ranks.is_main else lambda *_: None

    def note(self, lines: str) -> None:
        self._log(logging.INFO, lines)

    def warn(self, lines: str) -> None:
        self._log(logging.WARNING, lines)

    def saved(self, directory: Path) -> None:
        self._log(logging.INFO, f"saved {directory}")
