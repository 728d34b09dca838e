"""Counts the bytes of live storages over time while code runs on fake tensors, by contents and phase.

torch has trackers for this (`torch.distributed._tools`: MemTracker, and FSDPMemTracker for `fully_shard`), but they do
not suit: they support neither FSDP1 nor DDP nor optimizers that gather whole parameters, replace methods of torch's
classes while they track, and count DTensor's shape computations if tensors are already fake. This mode sees each
operator instead. It records every storage that an operator creates or receives, once, with its size; a weak reference
reports its end. FSDP frees and allocates gathered parameters by resizing a storage, which no operator shows. The sizes
of buffers (created by `torch.empty`, used by collectives, or resized before) are therefore read again before each
operator. A kernel's internal allocations are not seen.

The contents of a storage may become known later: a buffer becomes a gradient when it is reduced. So a log records
storages as they come and go, and bytes by kind are summed from it at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from fsdp_shard.planning.step.recording.recorder import run_fake
from fsdp_shard.planning.trace import known_values
from fsdp_shard.utils import (
    FakeTensorMode,
    TorchDispatchMode,
    changed_arguments,
    in_backward,
    is_faking,
    plain_parts,
    storage_key,
    tensors_in,
    without_fakes,
)

# Gloo's copies in reductions and scatters; copies of `shard.cpu_offload` between a device and the CPU.
GLOO, OFFLOADED = "copies of gloo", "copies of what is offloaded"
# Kinds that storages have from creation on, whatever reads or writes them.
KEPT = ("parameters", "buffers", "reference", "optimizer", "average", "gradients")
_GATHERING = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "c10d::_allgather_base_", "c10d::allgather_")
_REDUCING = ("fsdp::chunk_cat", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_", "c10d::allreduce_")
_META = torch.device("meta")
_EMPTY = ("aten::empty", "aten::new_empty")
_SILENT = ("prim::device", "profiler::")  # operators without tensors, the majority of all
_MADE_IN = {
    "load": "buffers",
    "forward": "activations",
    "loss": "loss",
    "backward": "backward temporaries",
    "reduce": "unreduced gradients",
    "optimizer": "optimizer temporaries",
}


class LiveStorage:
    """A storage that was seen: its contents, its current bytes, and the weak reference that reports its end."""

    __slots__ = ("kind", "reference", "size", "values")

    def __init__(self, kind: str) -> None:
        self.kind, self.size = kind, 0
        self.values: torch.Tensor | None = None  # flat, if they are followed and known
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class GrowthEvent(NamedTuple):
    """Bytes that a storage grew by in a phase; without a storage, only the phase has changed."""

    phase: str
    where: str
    storage: LiveStorage | None
    grown_bytes: int


@dataclass
class LiveSnapshot:
    """Live bytes at one time: `num_bytes` in total, and by kind."""

    phase: str
    where: str
    num_bytes: int
    by_kind: dict[str, int] = field(default_factory=dict)


class LiveStorages(TorchDispatchMode):
    """Runs operators inside on fake tensors, and logs the storages that come and go.

    Values do not exist: reading a tensor gives 1, and every element counts as nonzero; with `follows_values` some are
    known (`known_values.py`). While the model is built (`phase` is "load"), the mode `fake` must be active too; it may
    be left temporarily, as device meshes do. Afterwards it must not be active: DTensor would use it to compute shapes
    of whole tensors, whereas now DTensor has its own mode, whose tensors do not count.


    Attributes:
        fake: The mode that makes tensors fake.
        phase: The running phase, as in `Snapshot`, unless a backward pass runs.
        in_backward_pass: Whether the model's backward pass has begun; losses have small ones of their own before.
        where: FQN of the running block.
        events: The log.
    """

    def __init__(self, *, follows_values: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._follows_values = follows_values
        self.phase, self.where, self.in_backward_pass = "load", "", False
        self.events: list[GrowthEvent] = []
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._live: dict[int, LiveStorage] = {}
        self._resized: dict[int, LiveStorage] = {}  # those with memory whose size may change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name(), kwargs or {}
        if name.startswith(_SILENT):
            return func(*args, **kwargs)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it runs operators on its parts, which come here
        if name == "aten::_local_scalar_dense" and type(args[0]) not in _REAL:
            return self._read(args[0])
        if self.phase == "load":
            return self._load(func, args, kwargs)
        if is_faking() or name == "aten::_local_scalar_dense":
            return func(*args, **kwargs)
        phase = self._phase_of(name)
        self._log(phase, None, 0)
        self._poll(phase)
        with self.fake:
            args, kwargs = self._faked(args), self._faked(kwargs)
            given = list(tensors_in((args, kwargs)))
            for tensor in given:
                self._count(tensor, phase, "inputs", is_buffer=False)
            result = _all_of(args[0]) if name == "aten::nonzero" else run_fake(func, args, kwargs)
        kind = _MADE_IN[phase]
        if phase == "backward" and torch.is_grad_enabled():  # a checkpointed block is recomputed
            kind = "activations"
        made = list(tensors_in(result))
        for tensor in made:
            self._count(tensor, phase, kind, is_buffer=name.startswith(_EMPTY))
        if self._follows_values:
            self._follow(func, args, kwargs, made)
        if name in _GATHERING or name in _REDUCING:
            self._exchanged(name, [*given, *made])
            self._copy(name, args, phase)
        return result

    def mark(self, tensors: Iterable[Any], kind: str) -> None:
        """Set what the storages of `tensors` hold, from their creation on."""
        for tensor in plain_parts(tensors):
            key = storage_key(tensor.untyped_storage())
            if key not in self._live:
                self._count(tensor, self.phase, kind, is_buffer=False)
            if key in self._live:
                self._live[key].kind = kind

    def _read(self, tensor: torch.Tensor) -> bool | float | int:
        if (value := self._value_of(tensor)) is not None:
            known: bool | float | int = value.item()
            return known
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        storage = self._live.get(storage_key(tensor.untyped_storage()))
        if storage is None or storage.values is None or storage.values.dtype != tensor.dtype:
            return None
        return storage.values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _follow(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        """Follow the values that an operator creates or changes; views share those of their storage."""
        # Collectives do not declare what they change.
        if changed_arguments(func, args, kwargs) or func.name().startswith("c10d::"):
            if not known_values.change(func, args, kwargs, self._value_of):
                for tensor in tensors_in((made, args[:1], kwargs.get("out"))):
                    self._set_values(tensor, None)
        elif len(made) == 1 and storage_key(made[0].untyped_storage()) not in {
            storage_key(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))
        }:
            self._set_values(made[0], known_values.follow(func, args, kwargs, made[0], self._value_of))

    def _set_values(self, tensor: torch.Tensor, values: torch.Tensor | None) -> None:
        if (storage := self._live.get(storage_key(tensor.untyped_storage()))) is not None:
            storage.values = values

    def _load(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = list(tensors_in((args, kwargs)))
        if given and all(type(tensor) in _REAL for tensor in given) and kwargs.get("device") in (None, _META):
            # The positions of ranks in a mesh, and parameters on meta, which are cut for all ranks.
            with without_fakes():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._count(tensor, "load", "buffers", is_buffer=func.name().startswith(_EMPTY))
        return result

    def _phase_of(self, name: str) -> str:
        if not (in_backward() and self.in_backward_pass):
            self.where = "" if self.phase == "optimizer" else self.where
            return self.phase
        self.phase = "optimizer"  # follows the backward pass, unless a forward pass does
        return "reduce" if name in _REDUCING else "backward"

    def _faked(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.fake.from_tensor(value) if type(value) in _REAL and not value.is_meta else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._faked(item) for item in value)
        return {key: self._faked(item) for key, item in value.items()} if isinstance(value, dict) else value

    def _count(self, tensor: torch.Tensor, phase: str, kind: str, *, is_buffer: bool) -> None:
        if tensor.device.type != "cpu" or type(tensor) in _REAL:
            return
        inner = tensor.untyped_storage()
        key = storage_key(inner)
        if (storage := self._live.get(key)) is None:
            storage = self._live[key] = LiveStorage(kind)
            storage.reference = weakref.ref(inner, partial(self._gone, key))
        elif storage.size != inner.nbytes():
            is_buffer = True
        self._measure(storage, inner.nbytes(), phase)
        if is_buffer:
            self._resized[key] = storage

    def _measure(self, storage: LiveStorage, size: int, phase: str) -> None:
        if size != storage.size:
            self._log(phase, storage, size - storage.size)
            storage.size = size

    def _exchanged(self, name: str, touched: Iterable[torch.Tensor]) -> None:
        """Record what gathers and reductions read and wrote."""
        for tensor in touched:
            key = storage_key(tensor.untyped_storage())
            if (storage := self._live.get(key)) is None or storage.kind in KEPT:
                continue
            if name in _GATHERING:
                storage.kind = "gathered"
            elif in_backward() and storage.kind != "gathered":
                storage.kind = "unreduced gradients"
            self._resized[key] = storage

    def _copy(self, name: str, args: Any, phase: str) -> None:
        """Log the copy that exists during an operator, although no fake tensor stands for it."""
        if name == "c10d::_reduce_scatter_base_":
            output, whole, *_ = args
            self._borrow(GLOO, whole.nbytes, phase)
            self._borrow(OFFLOADED, output.nbytes, phase)
        elif name == "fsdp::all_gather_copy_in":
            self._borrow(OFFLOADED, sum(shard.nbytes for shard in args[0]), phase)

    def _borrow(self, kind: str, num_bytes: int, phase: str) -> None:
        copy = LiveStorage(kind)
        self._log(phase, copy, num_bytes)
        self._log(phase, copy, -num_bytes)

    def _poll(self, phase: str) -> None:
        """Read the sizes of resizable storages again. Those without memory receive some only for an operator's use."""
        for key, storage in list(self._resized.items()):
            inner = storage.reference() if storage.reference is not None else None
            if inner is not None:
                self._measure(storage, inner.nbytes(), phase)
            if not storage.size:
                del self._resized[key]

    def _gone(self, key: int, reference: Any) -> None:
        if (storage := self._live.get(key)) is not None and storage.reference is reference:
            del self._live[key]
            self._resized.pop(key, None)
            self._log(self.events[-1].phase if self.events else self.phase, storage, -storage.size)

    def _log(self, phase: str, storage: LiveStorage | None, grown_bytes: int) -> None:
        if storage is None and self.events and self.events[-1][:2] == (phase, self.where):
            return
        self.events.append(GrowthEvent(phase, self.where, storage, grown_bytes))


_REAL = (torch.Tensor, torch.nn.Parameter)


def snapshots(events: Iterable[GrowthEvent], uncounted: Collection[str] = ()) -> Iterator[LiveSnapshot]:
    """The highest snapshot of each stretch of `events` with one phase and place, ignoring storages of some kinds."""
    now: dict[str, int] = {}
    total, highest = 0, LiveSnapshot("", "", -1)
    for phase, where, storage, grown in events:
        if (phase, where) != (highest.phase, highest.where):
            if highest.num_bytes >= 0:
                yield highest
            highest = LiveSnapshot(phase, where, total, dict(now))
        if storage is None or storage.kind in uncounted:
            continue
        now[storage.kind] = now.get(storage.kind, 0) + grown
        total += grown
        if total > highest.num_bytes:
            highest.num_bytes, highest.by_kind = total, dict(now)
    if highest.num_bytes >= 0:
        yield highest


def _all_of(tensor: torch.Tensor) -> torch.Tensor:
    """The result of `nonzero` if no element is zero, int64 [num_elements, num_dimensions]."""
    return torch.empty((tensor.numel(), tensor.ndim), dtype=torch.int64)
