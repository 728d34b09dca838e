"""Counts the live bytes of fake tensors while operators run, and writes a recording of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import finalize

import torch
from torch import UntypedStorage

from fsdp_shard.planning.step.recording.events import POST_FORWARD, PRE_FORWARD, Event
from fsdp_shard.utils import TorchDispatchMode, storage_key, tensors_in

GROUPED_PRODUCT = "aten::_grouped_mm"  # of experts
_MAX_OPERATORS = 1_000_000  # a minute or two: models that compute token by token in Python exceed it


class Recorder(TorchDispatchMode):
    """Counts the live bytes that operators create, and writes the recording.

    Args:
        is_eager: Whether operators on the parts of a tensor subclass, such as torchao's quantized optimizer states, run
            one by one; compiled ones create no such tensors.

    Attributes:
        events: The recording.
        is_reference: Whether an objective's reference model is running.
        num_recorded_predictions: Maximum number of rows selected by value, because fake tensors have no values; None
            for all.
    """

    def __init__(self, *, is_eager: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._is_eager = is_eager
        self.events: list[Event] = []
        self.is_reference = False
        self.num_recorded_predictions: int | None = None
        self._num_operators = 0
        self._live: dict[int, int] = {}  # bytes by the address of the storage
        self._born: dict[int, int] = {}  # number of events before a storage was created
        self._entered = 0, 0  # number of events before each of the last two modules was entered
        self._kept: list[UntypedStorage] = []
        self._ignored: set[int] = set()
        self._accumulated: dict[int, int] = {}  # bytes by the id of the parameter
        self._saved: dict[int, int] = {}
        self._now = self._gradients = 0
        self._most = self._most_alone = 0  # since the last event
        self._then = self._gradients_then = 0  # at the last event

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_eager and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs operators on its parts, which then come here
        self._num_operators += 1
        if self._num_operators > _MAX_OPERATORS:
            raise RuntimeError(f"a micro-batch of this size is more than {_MAX_OPERATORS:,} operators on three blocks")
        if func is torch.ops.aten.nonzero.default:
            number = args[0].numel()
            number = number if self.num_recorded_predictions is None else min(number, self.num_recorded_predictions)
            result = torch.empty((number, args[0].ndim), dtype=torch.long)
        else:
            result = run_fake(func, args, kwargs or {})
        for storage in storages_of(result):
            self._count(storage)
        self._most = max(self._most, self._now)
        self._most_alone = max(self._most_alone, self._now - self._gradients)
        return result

    def ignore(self, value: Any) -> None:
        """Do not count the tensors in `value`."""
        self._kept += storages_of(value)  # otherwise others may reuse their addresses
        self._ignored = {storage_key(storage) for storage in self._kept}
        self._now -= sum(self._live.pop(key, 0) for key in self._ignored)

    def accumulated(self, param: torch.Tensor) -> None:
        """Count the just accumulated gradient of `param` as a gradient."""
        if param.grad is not None and id(param) not in self._accumulated:
            self._accumulated[id(param)] = size = param.grad.untyped_storage().nbytes()
            self._gradients += size

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register a tensor that autograd saves, if it was created in this block or the previous one."""
        storage = tensor.untyped_storage()
        if self._born.get(storage_key(storage), -1) > self._entered[0]:
            self._saved[storage_key(storage)] = storage.nbytes()
        return tensor.detach()  # with the tensor itself, autograd would keep the graphs of what it replaces

    def mark(self, kind: str, module: str) -> None:
        """Write an event."""
        alone, alone_then = self._now - self._gradients, self._then - self._gradients_then
        kept = [*self._saved.values()] if kind == POST_FORWARD else []
        saved = sum(kept), sum(map(pinned_bytes, kept))
        if kind in (PRE_FORWARD, POST_FORWARD):
            self._saved.clear()
        if kind == PRE_FORWARD:
            self._entered = self._entered[1], len(self.events)
        rises = max(self._most, self._now) - self._then, max(self._most_alone, alone) - alone_then
        gradients = self._gradients - self._gradients_then
        self.events.append(Event(kind, module, *rises, alone - alone_then, gradients, *saved, self.is_reference))
        self._most, self._then, self._gradients_then = self._now, self._now, self._gradients
        self._most_alone = alone

    def _count(self, storage: UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key in self._live or key in self._ignored or not size:
            return
        self._live[key], self._born[key] = size, len(self.events)
        self._now += size
        finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)
        self._born.pop(key, None)


def run_fake(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on fake tensors."""
    is_other = func.name() == GROUPED_PRODUCT and args[0].dtype != torch.bfloat16
    return grouped_product(args, kwargs) if is_other else func(*args, **kwargs)


def grouped_product(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> torch.Tensor:
    """What `GROUPED_PRODUCT` returns; the operator itself supports few dtypes and widths."""
    left, right = args[:2]
    ends = args[2] if len(args) > 2 else (kwargs or {})["offs"]
    shape = {
        (2, 2): (len(ends), left.shape[0], right.shape[1]),
        (2, 3): (left.shape[0], right.shape[-1]),
        (3, 2): (left.shape[1 % left.ndim], right.shape[1]),
    }
    return torch.empty(shape[left.ndim, right.ndim], dtype=left.dtype, device=left.device)


def pinned_bytes(num_bytes: int) -> int:
    """Bytes of pinned memory that torch allocates for a tensor (`CachingHostAllocatorImpl.h`)."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def storages_of(value: Any) -> Iterator[UntypedStorage]:
    """The storages of all tensors in nested tuples, lists and mappings."""
    return (tensor.untyped_storage() for tensor in tensors_in(value))
