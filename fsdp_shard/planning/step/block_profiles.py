"""What one micro-batch keeps in memory between entering one module and leaving the next: a tape of fake tensors.

The real forward pass, loss and backward pass of the unsharded model run once, without computing anything: operators
make tensors that have a shape and no memory. So what autograd saves, what recomputation makes again and what results
of operators take for a moment is what the real run has. Of blocks that are alike three are run and the others are
passed over; the tape repeats the one in the middle. A model of 126 layers costs what one of 3 does.

Attention keeps different tensors in different implementations; it runs as on a CPU, whose fused kernel keeps the same
as a GPU's flash attention.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from typing import Any, Protocol
from weakref import finalize

import torch
from torch import UntypedStorage, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fsdp_shard.models import attention_implementations, no_split_blocks
from fsdp_shard.sharding import ShardConfig, Unit, recompute_blocks, recomputed_fqns
from fsdp_shard.utils import FakeTensorMode, TorchDispatchMode, replace_tensors, storage_key

# transformers builds a causal mask whenever it meets fake tensors; real training without padding has none, so that
# kernels with a causal flag are used. This attention is sdpa without a mask.
_ATTENTION = "fsdp_shard_plan"

ENTER, LEAVE, LOSS, BEGIN, FINISH, END = "enter", "leave", "loss", "begin backward", "finish backward", "end"
DONE = "done"  # with a pass without gradients

_LONGEST_PERIOD = 8
_PERIODS_RUN = 3
_MAX_OPERATORS = 1_000_000  # a minute or two: models that compute token by token in Python


@dataclass(frozen=True, slots=True)
class Event:
    """A module is entered or left, and what happened to the live bytes since the event before.

    Attributes:
        kind: One of the constants above.
        module: FQN of the module; "" is the root.
        rise: The most bytes that were live since, above those that were live then.
        rise_alone: The same, if each gradient were gone as soon as it is accumulated.
        change: Bytes of activations that are live now, minus those then.
        gradients: Bytes of gradients that were accumulated since.
        saved: When a block is left: bytes that it saved for its backward pass.
        pinned: The same in page-locked memory, of which torch allocates powers of two.
        is_reference: Whether the reference of an objective runs, without gradients.
    """

    kind: str
    module: str
    rise: int
    rise_alone: int
    change: int
    gradients: int
    saved: int = 0
    pinned: int = 0
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Tapes:
    """What one micro-batch keeps in memory in each kind of pass.

    Attributes:
        preparation: What the losses of a step have in common, computed without gradients; empty if they have nothing.
        training: From the first forward pass to the end of the backward pass.
        evaluation: The loss of held-out samples, without gradients.
    """

    preparation: Sequence[Event]
    training: Sequence[Event]
    evaluation: Sequence[Event]


class MicroBatch(Protocol):
    """A micro-batch in a fake tensor mode."""

    def prepare(self) -> Any:
        """Compute, without gradients, what the losses of a step have in common."""

    def loss(self, shared: Any) -> torch.Tensor:
        """Run the forward pass and return the loss; `shared` is what `prepare` returned."""


class Recorder(TorchDispatchMode):
    """Counts the live bytes that operators make, and writes the tape.

    Attributes:
        events: The tape.
        is_reference: Whether what runs is the reference of an objective.
        most_chosen: The most rows that are chosen by their values, which fake tensors do not have; None for all.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.events: list[Event] = []
        self.is_reference = False
        self.most_chosen: int | None = None
        self._num_operators = 0
        self._live: dict[int, int] = {}  # bytes by the address of the storage
        self._born: dict[int, int] = {}  # number of events before a storage was made
        self._entered = 0, 0  # numbers of events before the last two modules were entered
        self._kept: list[UntypedStorage] = []
        self._ignored: set[int] = set()
        self._accumulated: dict[int, int] = {}  # bytes by the id of the parameter
        self._saved: dict[int, int] = {}
        self._now = self._gradients = 0
        self._most = self._most_alone = 0  # since the last event
        self._then = self._gradients_then = 0  # at the last event

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._num_operators += 1
        if self._num_operators > _MAX_OPERATORS:
            raise RuntimeError(f"a micro-batch of this size is more than {_MAX_OPERATORS:,} operators on three blocks")
        if func is torch.ops.aten.nonzero.default:
            number = args[0].numel()
            number = number if self.most_chosen is None else min(number, self.most_chosen)
            result = torch.empty((number, args[0].ndim), dtype=torch.long)
        else:
            result = func(*args, **(kwargs or {}))
        for storage in storages_of(result):
            self._count(storage)
        self._most = max(self._most, self._now)
        self._most_alone = max(self._most_alone, self._now - self._gradients)
        return result

    def ignore(self, value: Any) -> None:
        """Do not count the tensors in `value`."""
        self._kept += storages_of(value)  # or others get their addresses
        self._ignored = {storage_key(storage) for storage in self._kept}
        self._now -= sum(self._live.pop(key, 0) for key in self._ignored)

    def accumulated(self, param: torch.Tensor) -> None:
        """Take the gradient of `param`, which was just accumulated, for one."""
        if param.grad is not None and id(param) not in self._accumulated:
            self._accumulated[id(param)] = size = param.grad.untyped_storage().nbytes()
            self._gradients += size

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Know a tensor that autograd saves, if it was made in this block or in the one before."""
        storage = tensor.untyped_storage()
        if self._born.get(storage_key(storage), -1) > self._entered[0]:
            self._saved[storage_key(storage)] = storage.nbytes()
        return tensor

    def mark(self, kind: str, module: str) -> None:
        """Write an event."""
        alone, alone_then = self._now - self._gradients, self._then - self._gradients_then
        kept = [*self._saved.values()] if kind == LEAVE else []
        saved = sum(kept), sum(map(pinned_bytes, kept))
        if kind in (ENTER, LEAVE):
            self._saved.clear()
        if kind == ENTER:
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


def pinned_bytes(num_bytes: int) -> int:
    """Bytes of the page-locked memory that torch allocates for a tensor (`CachingHostAllocatorImpl.h`)."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def storages_of(value: Any) -> Iterator[UntypedStorage]:
    """The storages of all tensors in nested tuples, lists and mappings."""
    return (tensor.untyped_storage() for tensor in tensors_in(value))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def record_tape(
    model: PreTrainedModel,
    settings: ShardConfig,
    units: Sequence[Unit],
    make_batch: Callable[[Recorder], MicroBatch],
    uncast: Collection[str] = (),
    *,
    is_packed: bool = False,
) -> Tapes:
    """Run one micro-batch of `model` on fake tensors, in an evaluation and in training.

    Args:
        model: The model on meta. It is changed: its parameters become fake ones, in the dtypes that units compute in.
        settings: The blocks, and what of their activations is recomputed.
        units: The units that it would be sharded in.
        make_batch: Makes the micro-batch; called in a fake tensor mode, with the recorder.
        uncast: FQNs of the units whose inputs keep the dtypes that they have.
        is_packed: Whether rows hold several documents, which attention is kept apart by a mask.

    Returns:
        The tapes of one micro-batch.

    Raises:
        RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError: It does not run on fake tensors.
    """
    blocks = [block.fqn for block in no_split_blocks(model, settings.blocks) if block.repeated]
    recomputed = recomputed_fqns(blocks, settings.activation_checkpointing)
    runs = _alike(model, blocks, dict.fromkeys(recomputed, True))
    recompute_blocks(model, settings)
    passed_over = {fqn for run in runs for fqn in run.passed_over}
    for fqn in passed_over:
        _pass_over(model, fqn, next(run for run in runs if fqn in run.passed_over))
    dtypes = {name: getattr(torch, unit.dtype) for unit in units for name in unit.parameters}
    with attending_without_values(model, is_packed=is_packed), FakeTensorMode():
        _make_fake(model, dtypes if settings.is_sharded else {})
        recorder = Recorder()
        recorder.ignore([*model.parameters(), *model.buffers()])
        watched = dict.fromkeys([*blocks, *(unit.fqn for unit in units), ""])
        inside = tuple(f"{fqn}." for fqn in passed_over)
        by_fqn = {unit.fqn: unit for unit in units}
        for fqn in (fqn for fqn in watched if fqn not in passed_over and not fqn.startswith(inside or ("\0",))):
            _watch(model, recorder, settings, fqn, by_fqn.get(fqn), is_uncast=fqn in uncast)
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(recorder.accumulated)
        with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor):
            tapes = _run(model, recorder, make_batch(recorder))
    for run in runs:
        tapes = Tapes(*(_repeated(tape, run) for tape in (tapes.preparation, tapes.training, tapes.evaluation)))
    return tapes


def record_forward(
    model: PreTrainedModel, run: Callable[[Recorder], None], *, has_mask: bool
) -> tuple[list[Event], Mapping[str, str]]:
    """Run forward passes of a model that is not sharded, without gradients, on fake tensors.

    Args:
        model: The model on meta. It is changed: its parameters become fake ones.
        run: Makes the passes; called in a fake tensor mode.
        has_mask: Whether attention gets a mask, as where rows have several lengths.

    Returns:
        The tape, and for each block that was passed over one like it that was not.

    Raises:
        RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError: It does not run on fake tensors.
    """
    model.eval()
    blocks = no_split_blocks(model)
    repeated = [block.fqn for block in blocks if block.repeated]
    config: Any = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()  # such as full and sliding attention, whose caches differ
    runs = _alike(model, repeated, dict(zip(repeated, kinds, strict=False)))
    like = {fqn: run.like(fqn) for run in runs for fqn in run.passed_over}
    for each in runs:
        for fqn in each.passed_over:
            _pass_over(model, fqn, each)
    with attending_without_values(model, is_packed=has_mask), FakeTensorMode():
        _make_fake(model, {})
        recorder = Recorder()
        recorder.ignore([*model.parameters(), *model.buffers()])
        for fqn in dict.fromkeys([*(block.fqn for block in blocks if not block.direct), ""]):
            if fqn not in like:
                module = model.get_submodule(fqn)
                module.register_forward_pre_hook(lambda *_, fqn=fqn: recorder.mark(ENTER, fqn))
                module.register_forward_hook(lambda *_, fqn=fqn: recorder.mark(LEAVE, fqn))
        with torch.no_grad(), recorder:
            run(recorder)
    tape = recorder.events
    for each in runs:
        tape = _repeated(tape, each)
    return tape, like


def _run(model: PreTrainedModel, recorder: Recorder, batch: MicroBatch) -> Tapes:
    """Run a micro-batch in all ways; the evaluation comes first, as nothing has gradients then."""
    model.eval()
    with torch.no_grad():
        loss = batch.loss(batch.prepare())
        del loss
    recorder.mark(DONE, "")
    evaluated = len(recorder.events)
    model.train()
    shared = batch.prepare()
    recorder.mark(DONE, "")
    prepared = len(recorder.events)
    loss = batch.loss(shared)
    recorder.mark(LOSS, "")
    loss.backward()
    del loss
    recorder.mark(END, "")
    events = recorder.events
    preparation = events[evaluated:prepared] if prepared > evaluated + 1 else []
    return Tapes(preparation, events[prepared:], events[:evaluated])


def _make_fake(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> None:
    """Replace parameters and buffers by fake ones; floating-point parameters get the dtype in `dtypes`."""
    wanted = {id(param): dtypes.get(name, param.dtype) for name, param in model.named_parameters()}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        dtype = wanted.get(id(tensor), tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype)

    replace_tensors(model, fake)


def _watch(
    model: nn.Module, recorder: Recorder, settings: ShardConfig, fqn: str, unit: Unit | None, *, is_uncast: bool
) -> None:
    """Have the recorder mark when a module is entered and left, in both directions, and cast as its wrapper does."""
    module = model.get_submodule(fqn)
    params = [model.get_parameter(name) for name in unit.parameters] if unit is not None else []
    trained = {id(param) for param in params if param.requires_grad}
    casts = settings.is_sharded and unit is not None and not unit.is_bytes and not is_uncast
    by_gradients = settings.flattens_units and bool(trained)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder.mark(ENTER, fqn)
        if casts and unit is not None:
            args, kwargs = (_cast(value, getattr(torch, unit.dtype)) for value in (args, kwargs))
        needing = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if by_gradients or not needing or not torch.is_grad_enabled():
            return args, kwargs
        made = iter(_Finish.apply(partial(recorder.mark, FINISH, fqn), *needing))  # type: ignore[no-untyped-call]  # untyped in torch
        return tuple(_with_new(value, made) for value in args), {k: _with_new(v, made) for k, v in kwargs.items()}

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if casts and unit is not None and unit.dtype != settings.param_dtype:
            output = _cast(output, getattr(torch, settings.param_dtype))
        begun: list[bool] = []

        def begin(gradient: torch.Tensor) -> None:
            if not begun:
                begun.append(True)
                recorder.mark(BEGIN, fqn)

        for tensor in tensors_in(output):
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(begin)
        recorder.mark(LEAVE, fqn)
        return output

    left = set(trained)

    def finish(param: torch.Tensor) -> None:
        left.discard(id(param))
        if not left:
            recorder.mark(FINISH, fqn)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
    for param in params if by_gradients else ():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(recorder.accumulated)
            param.register_post_accumulate_grad_hook(finish)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The tensors of floating point in nested values, in `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _cast(value[key], dtype)
    return value


def _with_new(value: Any, made: Iterator[torch.Tensor]) -> Any:
    """`value` with its tensors that need gradients replaced by the next ones of `made`."""
    if isinstance(value, torch.Tensor):
        return next(made) if value.requires_grad else value
    if type(value) in (tuple, list):
        return type(value)(_with_new(item, made) for item in value)
    return {key: _with_new(item, made) for key, item in value.items()} if type(value) is dict else value


class _Finish(torch.autograd.Function):
    """Returns its inputs, and calls a function once the gradients of all of them are computed."""

    @staticmethod
    def forward(ctx: Any, finished: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.finished = finished
        return inputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.finished()
        return None, *gradients


@dataclass(frozen=True)
class _Run:
    """Blocks whose kinds repeat: `periods` are their FQNs, of which the first three are run."""

    periods: tuple[tuple[str, ...], ...]

    def like(self, fqn: str) -> str:
        """The last block that was run in the place of `fqn` in its period."""
        position = next(period.index(fqn) for period in self.periods if fqn in period)
        return self.periods[_PERIODS_RUN - 1][position]

    @property
    def passed_over(self) -> frozenset[str]:
        return frozenset(fqn for period in self.periods[_PERIODS_RUN:] for fqn in period)


def _alike(model: nn.Module, blocks: Sequence[str], marks: Mapping[str, object]) -> list[_Run]:
    """The runs of `blocks` that repeat more than three times with some period; different `marks` are not alike."""

    def kind(fqn: str) -> object:
        module = model.get_submodule(fqn)
        params = [(name, tuple(param.shape), param.requires_grad) for name, param in module.named_parameters()]
        return type(module), params, marks.get(fqn), fqn.rpartition(".")[0]

    kinds, runs, first = [kind(fqn) for fqn in blocks], list[_Run](), 0
    while first < len(kinds):
        best = max(
            ((period, _repeats(kinds, first, period)) for period in range(1, _LONGEST_PERIOD + 1)),
            key=lambda found: (found[0] * (found[1] - _PERIODS_RUN), -found[0]),
        )
        period, number = best
        if number <= _PERIODS_RUN:
            first += 1
            continue
        names = [tuple(blocks[first + i * period : first + (i + 1) * period]) for i in range(number)]
        runs.append(_Run(tuple(names)))
        first += period * number
    return runs


def _repeats(kinds: Sequence[object], first: int, period: int) -> int:
    pattern = kinds[first : first + period]
    starts = count(first, period)
    same = takewhile(lambda start: len(pattern) == period and kinds[start : start + period] == pattern, starts)
    return sum(1 for start in same if start < len(kinds))


def _pass_over(model: nn.Module, fqn: str, run: _Run) -> None:
    """Have a block return what it is given, in the form in which the block like it in the run returns it."""
    like, outputs = model.get_submodule(run.like(fqn)), list[Any]()
    like.register_forward_hook(lambda module, args, output: outputs.append(_without_first(output)))

    def passing(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        form = outputs.pop()
        return hidden if form is None else type(form)((hidden, *form))

    model.get_submodule(fqn).forward = passing


def _without_first(output: Any) -> Any:
    return output[1:] if isinstance(output, (tuple, list)) else None


def _repeated(tape: Sequence[Event], run: _Run) -> list[Event]:
    """The tape with the periods of `run` that were passed over, each as the second one is.

    A period of the forward pass lasts from entering its first block to entering that of the next; one of the backward
    pass from beginning its last block to beginning that of the one before.
    """
    first, last = [period[0] for period in run.periods], [period[-1] for period in run.periods]
    extra, end = len(run.periods) - _PERIODS_RUN, _PERIODS_RUN - 1
    found: list[Event] = []
    for part in _passes(tape):
        enters = [_index(part, ENTER, first[number]) for number in range(_PERIODS_RUN)]
        begins = [_index(part, BEGIN, last[number]) for number in range(_PERIODS_RUN)]
        if None not in enters:
            one, two = (position or 0 for position in enters[1:])
            middle = part[one + 1 : two + 1]
            found += part[: two + 1]
            for number in range(1, extra + 1):
                found += _renamed(middle, run, {1: 1 + number, end: end + number})
            found += _renamed(part[two + 1 :], run, {end: end + extra})
        elif None not in begins:
            one, two = (position or 0 for position in begins[:2])
            middle = part[two + 1 : one + 1]
            found += _renamed(part[: two + 1], run, {end: end + extra, 1: 1 + extra})
            for number in range(extra, 0, -1):
                found += _renamed(middle, run, {1: 1 + number, 0: number})
            found += part[two + 1 :]
        else:
            found += part
    return found


def _passes(tape: Sequence[Event]) -> list[list[Event]]:
    """The passes through the model: each forward pass up to leaving the root, and the backward pass."""
    parts: list[list[Event]] = [[]]
    for event in tape:
        parts[-1].append(event)
        if (event.kind == LEAVE and not event.module) or event.kind == LOSS:
            parts.append([])
    return parts


def _index(part: Sequence[Event], kind: str, module: str) -> int | None:
    return next((i for i, event in enumerate(part) if event.kind == kind and event.module == module), None)


def _renamed(events: Sequence[Event], run: _Run, numbers: Mapping[int, int]) -> list[Event]:
    """`events` of the blocks of one period as those of another; `numbers` maps periods."""
    names = {
        one: two
        for number, other in numbers.items()
        for one, two in zip(run.periods[number], run.periods[other], strict=True)
    }

    def name(module: str) -> str:
        for one, two in names.items():
            if module == one or module.startswith(f"{one}."):
                return two + module[len(one) :]
        return module

    return [replace(event, module=name(event.module)) for event in events]


def _document_mask(*, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> torch.Tensor:
    """A mask of the size of that of packed documents, bool [batch_size, 1, q_length, kv_length]."""
    return torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)


@contextmanager
def attending_without_values(model: PreTrainedModel, *, is_packed: bool) -> Iterator[None]:
    """Have a model with sdpa attention use its causal flag instead of a mask, or a mask if documents are packed."""
    if attention_implementations(model) != ["sdpa"]:
        yield
        return
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, _document_mask if is_packed else lambda *args, **kwargs: None)
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
