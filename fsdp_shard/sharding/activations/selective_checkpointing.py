"""Selective checkpointing: matrix products and attention are kept for the backward pass, and the rest is recomputed.

They account for nearly all of the time. torch implements it; this adds a check that a block does not change in place
what is kept of it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import (
    TorchDispatchMode,
    changed_arguments,
    is_costly_operator,
    plain_parts,
    storage_key,
    tensors_in,
    without_dispatch_modes,
)

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of the forward pass and its recomputation
# Kept results that were changed in place, by storage, and the operator that did.
_Changed = dict[int, tuple[torch.Tensor, str]]


def selective_contexts(block: str, *, compiled: bool, has_units: bool = False) -> Callable[[], _Contexts]:
    """Return the `context_fn` of selective checkpointing for `torch.utils.checkpoint.checkpoint`.

    Args:
        block: The name of the block's class, for errors.
        compiled: Whether the block is compiled. torch.compile supports torch's own contexts only; its graphs change
            nothing in place.
        has_units: Whether units of FSDP2 are inside of the block, as experts are.
    """
    if compiled:
        return partial(create_selective_checkpoint_contexts, _policy)
    return partial(_watched_contexts, block, has_units)


def _watched_contexts(block: str, has_units: bool) -> _Contexts:
    """The contexts of a forward pass, and of a recomputation that raises ConfigError if it would compute wrong values.

    The recomputation gets kept results as they are then. If the block has changed one in place, all that is computed
    from it would be wrong. torch notices changes of a few operators only, as the view that a linear layer returns has a
    version of its own, and it does so even if nothing is computed from it any more.
    """
    kept, recomputed = create_selective_checkpoint_contexts(_policy, allow_cache_entry_mutation=True)
    changed: _Changed = {}
    inner: list[AbstractContextManager[Any]] = [_UnmatchedMarks()] if has_units else []
    return _forward(kept, changed), _Recomputation([recomputed, *inner], changed, block)


@contextmanager
def _forward(kept: AbstractContextManager[object], changed: _Changed) -> Iterator[None]:
    with _NotedChanges(changed), kept:
        yield


class _Mode(TorchDispatchMode):
    """What a mode needs so that functions compiled within a block, such as flex attention, run as without it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _NotedChanges(_Mode):
    """Notes in `changed` which of the kept results are changed in place."""

    def __init__(self, changed: _Changed) -> None:
        super().__init__()
        self._changed = changed
        self._kept: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if changed := changed_arguments(func, args, kwargs):
            self._note(func, changed)
        result = func(*args, **kwargs)
        if is_costly_operator(func):
            self._kept |= _storages(result)
        return result

    def _note(self, func: Any, changed: list[Any]) -> None:
        for key in _storages(changed):
            if key in self._kept:
                self._changed[key] = self._kept[key], func.name()


class _UnmatchedMarks(_Mode):
    """Keeps the profiler's marks from torch's context of a recomputation, which refuses more than the forward pass had.

    A unit of FSDP2 that is called in a backward pass takes itself for the root, and marks that, too. Needed until torch
    has the profiler's operators among its SAC_IGNORED_OPS, which 2.13 has not.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":
            return func(*args, **(kwargs or {}))
        with without_dispatch_modes():
            return func(*args, **(kwargs or {}))


class _Recomputation(AbstractContextManager[None]):
    """torch's context of a recomputation and others within it; nothing may be computed from changed results."""

    def __init__(self, contexts: list[AbstractContextManager[Any]], changed: _Changed, block: str) -> None:
        self._contexts, self._changed, self._block = contexts, changed, block
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._entered.enter_context(context)
        if self._changed:
            self._entered.enter_context(_RefusedReads(self._changed, self._block))

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class _RefusedReads(_Mode):
    """Raises ConfigError if an operator is given a changed result."""

    def __init__(self, changed: _Changed, block: str) -> None:
        super().__init__()
        self._changed, self._block = changed, block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_question = func.name().startswith("prim::")  # about a fake tensor's device; an error there ends the process
        for key in () if is_question else _storages((args, kwargs)):
            if key in self._changed:
                _, operator = self._changed[key]
                raise ConfigError(
                    f"shard.activation_checkpointing=selective does not work for {self._block}: {operator} "
                    f"changes a result in place that is kept for the backward pass, and computed with again there. Use "
                    f"shard.activation_checkpointing=true."
                )
        return func(*args, **(kwargs or {}))


def _storages(value: Any) -> dict[int, torch.Tensor]:
    """The tensors in a nested value by their storages."""
    return {storage_key(part.untyped_storage()): part for part in plain_parts(tensors_in(value))}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_costly_operator(operator) else CheckpointPolicy.PREFER_RECOMPUTE
