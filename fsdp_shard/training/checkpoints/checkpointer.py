"""Checkpoints in a loop of one's own, with the promises of `finetune`: a step is complete or absent, has digests, and
resumes on any number of ranks under any wrapper.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import (
    CHECKPOINTS,
    CheckpointConfig,
    RemoteStore,
    RunState,
    Store,
)
from fsdp_shard.distributed import Communicator, LocalShard, current_ranks, run_on_all, run_on_main
from fsdp_shard.errors import CheckpointError, ConfigError, SaveError
from fsdp_shard.sharding import ModuleShards, shards_of, transformers_model
from fsdp_shard.training.checkpoints.loop_state import (
    DOCUMENT,
    LoopState,
    StateTensors,
    first_difference,
    random_state,
    read_loop_state,
    restore_random_state,
    text_digest,
)
from fsdp_shard.training.checkpoints.optimizer_groups import (
    Optimizers,
    bare_optimizers,
    by_name,
    create_states,
    listed,
    optimizer_parts,
    set_options,
    set_values,
    slot_prefix,
)
from fsdp_shard.training.checkpoints.run_lock import run_lock
from fsdp_shard.training.checkpoints.side_files import config_files, processor_files
from fsdp_shard.training.checkpoints.step_committer import StepCommitter
from fsdp_shard.training.checkpoints.step_saver import StepSaver
from fsdp_shard.training.checkpoints.stored_step import Stateful, StoredStep
from fsdp_shard.training.stop_signal import StopSignal
from fsdp_shard.utils import check

_logger = logging.getLogger("fsdp_shard")


Models = nn.Module | Mapping[str, nn.Module]


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` found.

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


class Checkpointer:
    """Saves and restores models and optimizers, whoever wrapped them; every method is a collective of all ranks.

    Parameters may be plain, under DistributedDataParallel, FullyShardedDataParallel (with `use_orig_params=True`) or
    `fully_shard`, or tensor-parallel DTensors on any mesh. Steps are written to PATH/checkpoints/step-N, and `inspect`,
    `verify`, `convert` and, of models of transformers, `generate` read them. No file is a pickle.

    Args:
        path: The run directory. Another run cannot use it at the same time.
        keep_last: Number of latest steps to keep; None keeps all. The best one is always kept.
        keep_every: With `keep_last`, also keep steps that this number divides.
        asynchronous: Return from `save` before the step is written. What the next `optimizer.step()` changes is copied
            before, at most this rank's shards; what no optimizer of the save changes is copied at once.
        remote: A directory of a remote store that each step is uploaded to, such as s3://bucket/run.
        layout: `sharded` (a file per rank) or `gathered` (a Hugging Face directory); the optimizer is always sharded.
        monitor: The metric by which a step is the best.
        mode: `min` or `max`: whether the lowest or highest is the best.
        processor: A tokenizer or processor of transformers, saved with each step so that text can be generated from it.
        verify: Read each step back after it is saved.
        verify_on_restore: Compare a step with its digests before it is restored.
        timeout_seconds: How long ranks wait for each other.

    Raises:
        ConfigError: An argument is wrong, another run uses the directory, or this process is one of several ranks and
            has no process group.

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
        keep_last: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = True,
        remote: str | None = None,
        layout: str = "sharded",
        monitor: str | None = None,
        mode: str = "min",
        processor: Any = None,
        verify: bool = False,
        verify_on_restore: bool = True,
        timeout_seconds: float = 1800.0,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"mode={mode!r} is neither 'min' nor 'max'.")
        self.path = Path(path)
        self._config = CheckpointConfig(
            layout=layout,
            every=1,  # each step is saved on purpose: none is deleted because a better one comes
            asynchronous=asynchronous,
            timeout_seconds=timeout_seconds,
            max_failures=1,
            keep_last=keep_last,
            keep_every=keep_every,
            verify=verify,
            remote=remote,
        )
        check(self._config)
        self._verifies, self._monitor, self._sign = verify_on_restore, monitor, 1 if mode == "min" else -1
        self._ranks = current_ranks(timeout_seconds)
        self._store = Store(self.path / CHECKPOINTS)
        self._opened = ExitStack()
        with ExitStack() as opening:
            opening.enter_context(run_lock(os.fspath(self.path), self._ranks))
            run_on_main(self._ranks, self._clean)
            committer = StepCommitter(self._ranks, self._store, self._config, is_adapter=False)
            committer.upload_missing()
            self._saver = StepSaver(self._ranks, self._config, committer, _Log(self._ranks), prefix="")
            self._files = run_on_main(self._ranks, partial(processor_files, processor))
            self._best = run_on_main(self._ranks, self._best_value)
            self._opened = opening.pop_all()
        self._signal: StopSignal | None = None
        self._is_closed = False

    # ---- what there is

    @property
    def steps(self) -> list[int]:
        """The steps that are saved, ascending."""
        return self._store.steps()

    @property
    def latest(self) -> int | None:
        """The highest step that is saved."""
        return self._store.latest()

    @property
    def best(self) -> int | None:
        """The step with the best `monitor` so far."""
        return self._store.best()

    # ---- saving

    def save(
        self,
        step: int,
        model: Models,
        optimizer: Optimizers = None,
        *,
        extra: Any = None,
        extra_per_rank: Any = None,
        metrics: Mapping[str, float] | None = None,
        **states: Stateful | None,
    ) -> None:
        """Save a step. In the background unless `asynchronous=False`: an error of it is raised by the next call.

        Args:
            step: The number of the step, which must not be saved yet.
            model: The model as it is trained, or several by name.
            optimizer: Its optimizer, or several by name.
            extra: Data of rank 0, such as the position in a data set: tensors, None, bool, numbers, strings, bytes, and
                lists, tuples and dicts of them.
            extra_per_rank: The same, of each rank its own.
            metrics: Figures of the step.
            states: Objects with `state_dict()`, by any name, such as `scheduler=scheduler`. Their states must be the
                same on all ranks, but for DTensors; None is left out.

        Raises:
            SaveError: The step exists, the ranks disagree about it, a state is no data, or this or the previous save
                failed. Earlier steps are kept.
            ModelError: What this rank holds of a parameter is not known.
        """
        self._require_open()
        self._saver.wait()
        value, ranks, optimizers = self._monitored(metrics), self._ranks, bare_optimizers(optimizer)
        run_on_main(ranks, lambda: self._store.require_new(step))
        parts = run_on_all(
            ranks, lambda: self._collect(step, model, optimizers, extra, extra_per_rank, metrics or {}, states)
        )
        if (name := first_difference(ranks, parts.tensors.digests)) is not None:
            raise SaveError(
                f"Step {step} was not saved: the ranks differ in {name}, and only what one of them has could be "
                f"restored. What each rank has of its own is for extra_per_rank; what is divided must be DTensors."
            )
        of_ranks = ranks.gather_object((parts.own, parts.values))
        files = {**parts.files, DOCUMENT: parts.document.to_json(of_ranks)} if ranks.is_main else {}
        trained = {id(param) for one in optimizers.values() for group in one.param_groups for param in group["params"]}
        weights = {name: _changed_by_step(shard, trained) for name, shard in parts.shards.shards.items()}
        state = RunState(weights, parts.shards.aliases, {**parts.slots, **parts.tensors.shards}, {}, files)
        is_best = value is not None and (self._best is None or self._sign * value < self._sign * self._best)
        if is_best:
            self._best = value
        self._saver.settle_before(optimizers.values())
        in_background = self._config.asynchronous and bool(optimizers)
        self._saver.save_step(step, state, is_best=is_best, in_background=in_background)

    def save_on_signal(self, step: int, model: Models, optimizer: Optimizers = None, **arguments: Any) -> bool:
        """Save a step if a rank was asked to stop (SIGTERM, SIGINT, SIGUSR1 or SIGHUP); call it after each step.

        From the first call on, these signals no longer end the process: the loop is to end when this returns True.

        Args:
            step: The number of the step. If it is saved already, that is enough.
            model: As in `save`.
            optimizer: As in `save`.
            arguments: As in `save`.

        Returns:
            Whether the loop is to end. The step is on the disk.
        """
        self._require_open()
        if self._signal is None:
            self._signal = self._opened.enter_context(StopSignal())
        if not self._ranks.all_reduce([float(self._signal.number)], "max")[0]:
            return False
        self.wait()
        if step not in run_on_main(self._ranks, self._store.steps):
            self.save(step, model, optimizer, **arguments)
            self.wait()
        return True

    def poll(self) -> None:
        """Report a save in the background that has ended; without it, that is done by the next `save` or `wait`."""
        self._require_open()
        self._saver.poll()

    def wait(self) -> None:
        """Wait until the last step is on the disk; raises SaveError if it could not be saved."""
        self._require_open()
        self._saver.finish()

    def close(self) -> None:
        """Wait for the last step and release the directory; as leaving the `with` block does."""
        if not self._is_closed:
            try:
                self.wait()
            finally:
                self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_closed:
            return
        try:
            if error is None:
                self._saver.finish()
        finally:
            self._is_closed = True
            self._saver.__exit__(kind, error, trace)
            self._opened.close()

    # ---- restoring

    def restore(
        self, model: Models, optimizer: Optimizers = None, *, step: int | str = "latest", **states: Stateful | None
    ) -> Restored | None:
        """Fill models, optimizers and states from a step, which may be of another number of ranks or other wrappers.

        The weights of a model and the options and states of an optimizer must be exactly those that were saved.

        Args:
            model: The model, whose values are replaced, or several by name.
            optimizer: Its optimizer, or several by name.
            step: The step, `latest` or `best`.
            states: The objects that were saved, by their names.

        Returns:
            What was restored, or None if no step is saved.

        Raises:
            CheckpointError: The step is damaged, does not exist, or is of another model, optimizer or objects.
        """
        self._require_open()
        self._saver.wait()
        found = run_on_main(self._ranks, lambda: self._find(step))
        if found is None:
            return None
        directory = self._store.path(found)
        if self._verifies:
            context = self._ranks
            run_on_all(context, lambda: checkpoint.check_content(directory, context.rank, context.world_size))
        with ExitStack() as opened:
            stored = run_on_all(self._ranks, lambda: StoredStep.open(directory, opened))
            return self._fill(stored, model, optimizer, states)

    def _find(self, step: int | str) -> int | None:
        if (remote := self._config.remote) is not None:
            checkpoint.fetch_latest(RemoteStore(remote), self._store)
        steps = self._store.steps()
        if step == "latest":
            return max(steps, default=None)
        wanted = self._store.best() if step == "best" else step
        if wanted not in steps:
            raise CheckpointError(
                f"{self._store.root} has no step {step}; it has {', '.join(map(str, steps)) or 'none'}."
            )
        return int(wanted)

    def _fill(
        self, stored: StoredStep, model: Models, optimizer: Optimizers, states: Mapping[str, Stateful | None]
    ) -> Restored:
        """Fill everything from a step, after everything has been compared with it."""
        ranks, optimizers = self._ranks, bare_optimizers(optimizer)
        given = {name: one for name, one in states.items() if one is not None}
        shards = run_on_all(ranks, lambda: self._shards_of(model))
        found = run_on_all(ranks, lambda: stored.read(shards, optimizers, given, ranks))
        run_on_all(ranks, lambda: create_states(optimizers, shards.shards, stored.slots))
        slots = run_on_all(ranks, lambda: optimizer_parts(optimizers, shards.shards)[0])
        # A rank may hold nothing of a parameter, and then has no state of it: together they have all.
        is_expected = ranks.all_reduce([float(name in slots) for name in stored.slots], "max")
        extra = [name for name, expected in zip(stored.slots, is_expected, strict=True) if not expected]
        run_on_all(ranks, lambda: stored.load(shards.shards, slots, extra))
        for name, one in optimizers.items():
            set_options(one, found.options[name])
            set_values(one, slot_prefix(name), shards.shards, found.values)
        for name, stateful in given.items():
            stateful.load_state_dict(found.states[name])
        if found.own is not None:
            restore_random_state(found.own["random"], str(stored.directory / DOCUMENT))
        return Restored(
            step=stored.document.step,
            directory=stored.directory,
            extra=found.extra,
            extra_per_rank=None if found.own is None else found.own["extra"],
            metrics=stored.document.metrics,
            has_random_state=found.own is not None,
        )

    # ---- the state of a step

    def _collect(
        self,
        step: int,
        model: Models,
        optimizers: Mapping[str, Optimizer],
        extra: Any,
        extra_per_rank: Any,
        metrics: Mapping[str, float],
        states: Mapping[str, Stateful | None],
    ) -> _StepParts:
        """What this rank has of a step."""
        tensors, shards = StateTensors(self._ranks), self._shards_of(model)
        tensors.digests["the number of the step"] = step
        tensors.add_shared([list(shards.shards), shards.aliases], "the names of the parameters")
        slots, options, values = optimizer_parts(optimizers, shards.shards)
        document = LoopState(step, {name: float(value) for name, value in metrics.items()})
        is_flat = any(
            _is_part(shard) for shard in shards.shards.values()
        )  # then a rank may lack states of what it lacks
        tensors.digests["what states the optimizer has"] = 0 if is_flat else text_digest(sorted(slots))
        document.groups = tensors.add_shared(options, "the options of the optimizer")
        document.states = {
            name: tensors.add_shared(one.state_dict(), name) for name, one in sorted(states.items()) if one is not None
        }
        document.extra = tensors.add_own(extra, "extra") if self._ranks.is_main else None
        own = {"random": random_state(), "extra": extra_per_rank}
        return _StepParts(
            document=document,
            own=tensors.add_own(own, f"rank-{self._ranks.rank}"),
            values=tensors.add_own(values, f"rank-{self._ranks.rank}.values"),
            shards=shards,
            slots=slots,
            tensors=tensors,
            files=self._model_files(model) if self._ranks.is_main else {},
        )

    def _shards_of(self, model: Models) -> ModuleShards:
        shards: dict[str, LocalShard] = {}
        aliases: dict[str, str] = {}
        for name, module in by_name(model).items():
            found, prefix = shards_of(module, self._ranks), f"{name}." if name else ""
            shards |= {prefix + key: shard for key, shard in found.shards.items()}
            aliases |= {prefix + key: prefix + kept for key, kept in found.aliases.items()}
        return ModuleShards(shards, aliases)

    def _model_files(self, model: Models) -> dict[str, bytes]:
        """Config and tokenizer, if it is one model of transformers."""
        found = None if isinstance(model, Mapping) else transformers_model(model)
        return {**self._files, **({} if found is None else config_files(found))}

    def _monitored(self, metrics: Mapping[str, float] | None) -> float | None:
        if self._monitor is None or not metrics:
            return None
        if self._monitor not in metrics:
            raise ConfigError(
                f"monitor={self._monitor!r} is not one of the metrics that save() was given: {listed(metrics)}."
            )
        return float(metrics[self._monitor])

    def _best_value(self) -> float | None:
        if self._monitor is None or (best := self._store.best()) is None:
            return None
        return read_loop_state(self._store.path(best)).metrics.get(self._monitor)

    def _clean(self) -> None:
        self._store.clean_leftovers()
        if (latest := self._store.latest()) is not None:
            self._store.set_latest(latest)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"The Checkpointer of {self.path} is closed; make a new one.")


class _StepParts(NamedTuple):
    """What one rank has of a step; `document` without what other ranks have."""

    document: LoopState
    own: Any
    values: Any
    shards: ModuleShards
    slots: dict[str, LocalShard]
    tensors: StateTensors
    files: dict[str, bytes]


class _Log:
    """Reports saves by the logger `fsdp_shard`, on rank 0."""

    def __init__(self, ranks: Communicator) -> None:
        self._log = _logger.log if ranks.is_main else lambda *_: None

    def note(self, lines: str) -> None:
        self._log(logging.INFO, lines)

    def warn(self, lines: str) -> None:
        self._log(logging.WARNING, lines)

    def saved(self, checkpoint: Path) -> None:
        self._log(logging.INFO, f"saved {checkpoint}")


def _is_part(shard: LocalShard) -> bool:
    """Whether a tensor that is no DTensor is a part of a parameter, as under FSDP1."""
    return not isinstance(shard.tensor, DTensor) and shard.data.numel() != math.prod(shard.shape)


def _changed_by_step(shard: LocalShard, trained: Collection[int]) -> LocalShard:
    """Mark what no optimizer changes as a buffer, which a save in the background copies at once."""
    if id(shard.tensor) in trained or not isinstance(shard.tensor, nn.Parameter):
        return shard
    return dataclasses.replace(shard, tensor=shard.tensor.detach())
