"""Runs the unsharded model on fake tensors and records the passes of one micro-batch.

The real forward pass, loss and backward pass run once without computing anything: operators create tensors that have a
shape but no memory. The tensors that autograd saves, that are recomputed and that operators need temporarily are thus
those of the real run. Of identical blocks, only some run (`repeated_blocks`).
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from fsdp_shard.errors import InputError, ModelError
from fsdp_shard.models import model_run_errors, no_split_blocks
from fsdp_shard.planning.step.recording.events import (
    DONE,
    END,
    LOSS,
    POST_BACKWARD,
    POST_FORWARD,
    PRE_BACKWARD,
    PRE_FORWARD,
    Event,
    Recordings,
)
from fsdp_shard.planning.step.recording.fake_attention import FULL, PACKED, attention_without_values
from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.planning.step.recording.repeated_blocks import (
    BlockRun,
    alike_blocks,
    attention_kinds,
    pass_over,
    with_repeats,
)
from fsdp_shard.sharding import ShardConfig, Unit, recompute_blocks, recomputed_fqns
from fsdp_shard.utils import (
    FakeTensorMode,
    first_line,
    only_errors_of,
    replace_tensors,
    tensors_in,
    tree_leaves,
    tree_map,
)

# Errors of models that cannot run without values: they take no text, or their control flow depends on values.
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, KeyError)
# The same in a micro-batch, where the model's forward and backward passes raise ModelErrors: an AttributeError is then
# a mistake in an objective.
CANNOT_TRAIN = (RuntimeError, InputError)


class ExtraPasses(Protocol):
    """Passes without gradients of a phase other than evaluation."""

    @property
    def rows(self) -> str:
        """Kind of the rows: FULL, PADDED or PACKED."""

    def setting(self, model: nn.Module) -> AbstractContextManager[None]:
        """Configure the model during the passes."""

    def run(self, model: PreTrainedModel, recorder: Recorder) -> None:
        """Run the model, in eval mode."""

    def parts(self, recording: Sequence[Event]) -> Sequence[Sequence[Event]]:
        """The parts of the recording, which all start from the same state."""


class MicroBatch(Protocol):
    """A micro-batch in a fake tensor mode."""

    def prepare(self) -> Any:
        """Compute, without gradients, what the losses of a step share."""

    def loss(self, shared: Any) -> torch.Tensor:
        """Run the forward pass and return the loss; `shared` is what `prepare` returned."""


@only_errors_of("torch", logging.CRITICAL)  # torch logs the traceback of a pass that cannot run on fake tensors
def record_passes(
    model: PreTrainedModel,
    settings: ShardConfig,
    units: Sequence[Unit],
    make_batch: Callable[[Recorder], MicroBatch],
    uncast: Collection[str] = (),
    *,
    rows: str = FULL,
    extra: Mapping[str, ExtraPasses] | None = None,
) -> Recordings:
    """Run one micro-batch of `model` on fake tensors, in an evaluation and in training.

    Args:
        model: The model on meta. It is modified: its parameters become fake ones, in their units' compute dtypes.
        settings: The blocks, and which of their activations are recomputed.
        units: The units that the model would be sharded in.
        make_batch: Makes the micro-batch; called in a fake tensor mode, with the recorder.
        uncast: FQNs of the units whose inputs keep their dtypes.
        rows: Kind of the rows: FULL, PADDED or PACKED; the last two have masks.
        extra: Passes of other phases, by phase.

    Returns:
        The recordings of one micro-batch.

    Raises:
        Any of CANNOT_TRAIN: It does not run on fake tensors.
    """
    blocks = [block.fqn for block in no_split_blocks(model, settings.blocks) if block.repeated]
    recomputed = recomputed_fqns(blocks, settings.activation_checkpointing)
    kinds = attention_kinds(model, blocks)
    runs = alike_blocks(model, blocks, {fqn: (kinds.get(fqn), fqn in recomputed) for fqn in blocks})
    recompute_blocks(model, settings)
    passed_over = {fqn for run in runs for fqn in run.passed_over}
    for fqn in passed_over:
        pass_over(model, fqn, next(run for run in runs if fqn in run.passed_over))
    dtypes = {name: getattr(torch, unit.dtype) for unit in units for name in unit.parameters}
    fake, recorder = FakeTensorMode(), Recorder()
    with attention_without_values(model, rows), fake:
        _make_fake(model, dtypes if settings.is_sharded else {})
        recorder.ignore([*model.parameters(), *model.buffers()])
        watched = dict.fromkeys([*blocks, *(unit.fqn for unit in units), ""])
        inside = tuple(f"{fqn}." for fqn in passed_over)
        by_fqn = {unit.fqn: unit for unit in units}
        for fqn in (fqn for fqn in watched if fqn not in passed_over and not fqn.startswith(inside)):
            unit = by_fqn.get(fqn)
            names = [] if unit is None else [name for name in unit.parameters if not name.startswith(inside)]
            params = [model.get_parameter(name) for name in names]
            _Watch(recorder, settings, fqn, unit, params, is_uncast=fqn in uncast).begin(model.get_submodule(fqn))
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(recorder.accumulated)
        with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor):
            recordings = _run(model, recorder, make_batch(recorder))
    for run in runs:
        preparation, training = with_repeats(recordings.preparation, run), with_repeats(recordings.training, run)
        recordings = Recordings(preparation, training, with_repeats(recordings.evaluation, run))
    return replace(recordings, **_run_extra(model, recorder, fake, extra or {}, runs))


def what_failed(error: Exception) -> str:
    """The error of a model that cannot run on fake tensors, without advice about its files, which may be correct."""
    return first_line(error.__cause__ if isinstance(error, ModelError) and error.__cause__ is not None else error)


def _run_extra(
    model: PreTrainedModel,
    recorder: Recorder,
    fake: FakeTensorMode,
    extra: Mapping[str, ExtraPasses],
    runs: Sequence[BlockRun],
) -> dict[str, Any]:
    """The parts of each of `extra`, and the reasons for those that could not run."""
    found: dict[str, Sequence[Sequence[Event]]] = {}
    uncounted: dict[str, str] = {}
    model.eval()
    for phase, passes in extra.items():
        begun = len(recorder.events)
        try:
            attending = attention_without_values(model, passes.rows)
            with passes.setting(model), attending, fake, recorder, torch.no_grad():
                passes.run(model, recorder)
        except CANNOT_RUN as error:
            uncounted[phase] = what_failed(error)
            continue
        recording: Sequence[Event] = recorder.events[begun:]
        for run in runs:
            recording = with_repeats(recording, run)
        found[phase] = passes.parts(recording)
    return {"extra": found, "uncounted": uncounted}


@only_errors_of("torch", logging.CRITICAL)
def record_forward(
    model: PreTrainedModel, run: Callable[[Recorder], None], *, has_mask: bool
) -> tuple[list[Event], Mapping[str, str]]:
    """Run forward passes of an unsharded model on fake tensors, without gradients.

    Args:
        model: The model on meta. It is modified: its parameters become fake ones.
        run: Runs the passes; called in a fake tensor mode.
        has_mask: Whether attention has a mask, as with rows of several lengths.

    Returns:
        The recording, and for each skipped block an identical one that ran.

    Raises:
        Any of CANNOT_RUN: It does not run on fake tensors.
    """
    model.eval()
    blocks = no_split_blocks(model)
    repeated = [block.fqn for block in blocks if block.repeated]
    runs = alike_blocks(model, repeated, attention_kinds(model, repeated))
    like = {fqn: run.like(fqn) for run in runs for fqn in run.passed_over}
    for each in runs:
        for fqn in each.passed_over:
            pass_over(model, fqn, each)
    with attention_without_values(model, PACKED if has_mask else FULL), FakeTensorMode():
        _make_fake(model, {})
        recorder = Recorder()
        recorder.ignore([*model.parameters(), *model.buffers()])
        for fqn in dict.fromkeys([*(block.fqn for block in blocks if not block.direct), ""]):
            if fqn not in like:
                module = model.get_submodule(fqn)
                module.register_forward_pre_hook(lambda *_, fqn=fqn: recorder.mark(PRE_FORWARD, fqn))
                module.register_forward_hook(lambda *_, fqn=fqn: recorder.mark(POST_FORWARD, fqn))
        with torch.no_grad(), recorder:
            run(recorder)
    recording = recorder.events
    for each in runs:
        recording = with_repeats(recording, each)
    return recording, like


def _run(model: PreTrainedModel, recorder: Recorder, batch: MicroBatch) -> Recordings:
    """Run a micro-batch through all kinds of passes; evaluation first, because nothing has gradients yet."""
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
    with model_run_errors(model):
        loss.backward()
    recorder.mark(END, "")  # the last gradients are reduced while the loss still holds its graph
    del loss
    recorder.mark(DONE, "")
    events = recorder.events
    preparation = events[evaluated:prepared] if prepared > evaluated + 1 else []
    return Recordings(preparation, events[prepared:], events[:evaluated])


def _make_fake(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> None:
    """Replace parameters and buffers with fake ones; floating-point parameters take the dtype in `dtypes`."""
    wanted = {id(param): dtypes.get(name, param.dtype) for name, param in model.named_parameters()}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        dtype = wanted.get(id(tensor), tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype)

    replace_tensors(model, fake)


class _Watch:
    """Makes the recorder mark when a module is entered and left in both passes, and casts as its wrapper does.

    Args:
        recorder: Receives the marks.
        settings: The sharding settings.
        fqn: The FQN of the module.
        unit: The unit that it is, if any.
        params: The unit's parameters outside of skipped blocks: only those get gradients.
        is_uncast: Whether the inputs of the unit keep their dtypes.
    """

    def __init__(
        self,
        recorder: Recorder,
        settings: ShardConfig,
        fqn: str,
        unit: Unit | None,
        params: Sequence[nn.Parameter],
        is_uncast: bool,
    ) -> None:
        self._recorder, self._fqn = recorder, fqn
        self._input_dtype: torch.dtype | None = None
        self._output_dtype: torch.dtype | None = None
        if settings.is_sharded and unit is not None and not unit.is_quantized and not is_uncast:
            self._input_dtype = getattr(torch, unit.dtype)
            self._output_dtype = getattr(torch, settings.param_dtype) if unit.dtype != settings.param_dtype else None
        trained = [param for param in params if param.requires_grad]
        # A flat unit's backward pass ends with the gradients of its parameters, that of others with those of inputs.
        self._with_gradient = trained if settings.flattens_units else []
        self._without_gradient = {id(param) for param in self._with_gradient}

    def begin(self, module: nn.Module) -> None:
        """Watch `module` from now on."""
        module.register_forward_pre_hook(self._pre_forward, with_kwargs=True)
        module.register_forward_hook(self._post_forward)
        for param in self._with_gradient:
            param.register_post_accumulate_grad_hook(self._recorder.accumulated)
            param.register_post_accumulate_grad_hook(self._post_backward)

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._recorder.mark(PRE_FORWARD, self._fqn)
        if self._input_dtype is not None:
            args, kwargs = _cast(args, self._input_dtype), _cast(kwargs, self._input_dtype)
        leaves = tree_leaves((args, kwargs))
        needing = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if self._with_gradient or not needing or not torch.is_grad_enabled():
            return args, kwargs
        finished = partial(self._recorder.mark, POST_BACKWARD, self._fqn)
        made = iter(_Finish.apply(finished, *needing))  # type: ignore[no-untyped-call]  # untyped in torch
        return tuple(_with_new(value, made) for value in args), {k: _with_new(v, made) for k, v in kwargs.items()}

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._output_dtype is not None:
            output = _cast(output, self._output_dtype)
        begun: list[bool] = []

        def pre_backward(gradient: torch.Tensor) -> None:
            if not begun:  # by another tensor of this output
                begun.append(True)
                self._recorder.mark(PRE_BACKWARD, self._fqn)

        for tensor in tensors_in(output):
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(pre_backward)
        self._recorder.mark(POST_FORWARD, self._fqn)
        return output

    def _post_backward(self, param: torch.Tensor) -> None:
        self._without_gradient.discard(id(param))
        if not self._without_gradient:
            self._recorder.mark(POST_BACKWARD, self._fqn)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested values to `dtype`."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, value
    )


def _with_new(value: Any, made: Iterator[torch.Tensor]) -> Any:
    """Replace the tensors of `value` that need gradients with the next ones of `made`."""
    return tree_map(lambda leaf: next(made) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf, value)


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
