"""Reads a step that a `Checkpointer` saved, after comparing it with the objects to restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch.optim import Optimizer

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import OPTIMIZER, TensorIndex, to_torch
from fsdp_shard.distributed import Communicator
from fsdp_shard.errors import CheckpointError, FsdpShardError
from fsdp_shard.sharding import ModuleShards
from fsdp_shard.training.checkpoints.check_tensors import check_tensors
from fsdp_shard.training.checkpoints.checkpointer_document import (
    DOCUMENT,
    CheckpointerDocument,
    read_document,
    read_state,
)
from fsdp_shard.training.checkpoints.optimizer_groups import check_groups, format_names


class Stateful(Protocol):
    """An object whose state is data: a scheduler, a GradScaler, a sampler, a copy of the weights."""

    def state_dict(self) -> Any:
        """The state: tensors, None, bool, numbers, strings, bytes, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: Any) -> Any:
        """Load such a state."""


class StoredValues(NamedTuple):
    """The content of a step apart from the tensors of models and optimizers.

    Attributes:
        options: The options of each optimizer's parameter groups.
        scalar_state: The entries of the optimizer states that are not tensors, by `PARAMETER.SLOT`.
        object_states: The states of the objects, by name.
        extra: The `extra` of the save.
        rank_state: This rank's random state and `extra_per_rank`; None with another number of ranks than at the save.
    """

    options: dict[str, Any]
    scalar_state: dict[str, Any]
    object_states: dict[str, Any]
    extra: Any
    rank_state: dict[str, Any] | None


class StepReader(NamedTuple):
    """An open step; `optimizer_index` is None if it has neither optimizer nor other tensors."""

    directory: Path
    document: CheckpointerDocument
    weights: TensorIndex
    optimizer_index: TensorIndex | None

    @classmethod
    def open(cls, directory: Path, opened: ExitStack) -> StepReader:
        """Open a step and read its headers; `opened` closes its files."""
        document = read_document(directory)
        weights = opened.enter_context(checkpoint.open_checkpoint(directory))
        optimizer_index = None
        if (directory / OPTIMIZER).is_dir():
            optimizer_index = opened.enter_context(checkpoint.open_checkpoint(directory / OPTIMIZER))
        return cls(directory, document, weights, optimizer_index)

    @property
    def slots(self) -> list[str]:
        """The names of the optimizer tensors."""
        index = self.optimizer_index
        return [] if index is None else [name for name in index.names if not name.startswith("$")]

    def read(
        self,
        shards: ModuleShards,
        optimizers: Mapping[str, Optimizer],
        states: Mapping[str, Stateful],
        ranks: Communicator,
    ) -> StoredValues:
        """Compare the step with the objects to restore, and read everything that is not loaded in place."""
        if states.keys() != self.document.states.keys():
            raise CheckpointError(
                f"{self.directory} was saved with the states {format_names(self.document.states)}, and restore() was "
                f"given {format_names(states)}; give the same."
            )
        check_tensors(self.weights, shards)
        _check_dtypes(self.weights, shards)
        if self.document.has_slots and not self.slots:
            raise CheckpointError(f"{self.directory} was saved with optimizer state, which is missing now.")
        where, document, index = str(self.directory / DOCUMENT), self.document, self.optimizer_index
        with _document_errors(where):
            options = read_state(document.groups, index, where)
            check_groups(options, optimizers, shards.shards, self.directory)
            scalars = [read_state(one.scalars, index, where) for one in document.ranks]
            rank_state = None
            if len(document.ranks) == ranks.world_size:
                found = read_state(document.ranks[ranks.rank].state, index, where)
                rank_state = {"random": dict(found["random"]), "extra": found["extra"]}
            return StoredValues(
                options=options,
                scalar_state={name: value for one in reversed(scalars) for name, value in one.items()},
                object_states={
                    name: read_state(document.states[name], index, where, name, one.state_dict())
                    for name, one in states.items()
                },
                extra=read_state(document.extra, index, where),
                rank_state=rank_state,
            )


@contextmanager
def _document_errors(where: str) -> Iterator[None]:
    """Turn any failure to interpret a document into one error that names the document."""
    try:
        yield
    except FsdpShardError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is damaged: it is not what a Checkpointer writes ({error!r}).") from error


def _check_dtypes(index: TensorIndex, shards: ModuleShards) -> None:
    """Reject other dtypes: a step is restored without casts."""
    for name, shard in shards.shards.items():
        entry = index.entry(name)
        if to_torch(entry.dtype) != shard.data.dtype:
            raise CheckpointError(
                f"{index.root} has {name} as {entry.dtype}, where the model has {shard.data.dtype}. A step is restored "
                f"into the same model; load_weights casts."
            )
