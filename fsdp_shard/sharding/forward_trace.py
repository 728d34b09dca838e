"""Finds where a model's parameters are used: in the forward pass of their own module, or elsewhere.

The parameters of a unit are gathered when its module is called. Some models call a module's `forward` directly, read
its weights in another module's forward pass, or recompute in a custom backward pass, and would find parameters that are
not gathered. A run of a copy of the model on the meta device detects this.
"""

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import UntypedStorage, nn
from transformers import PreTrainedModel

from fsdp_shard.utils import TorchDispatchMode, tensors_in

_NUM_TOKENS = 16
_DTYPE = torch.bfloat16  # the only one that grouped matrix products of experts support
_TEXT, _IMAGES = "input_ids", "pixel_values"


@dataclass
class ForwardTrace:
    """The findings of a run of the model.

    Attributes:
        called: FQNs of the modules that were called.
        outside: FQNs of the modules with a parameter that was used while it would not be gathered.
        with_grad: FQNs of the modules that ran with gradients. A layer that was called without gradients has a custom
            backward pass that recomputes it.
        converted: Names of the parameters that the forward pass itself converts, with the target dtype.
        entered: Inputs of a run -> FQNs of the modules whose forward pass began.
        read: Inputs of a run -> names of the parameters that an operator took, under all of their names.
        completed: The inputs of the runs that completed.
    """

    called: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    with_grad: set[str] = field(default_factory=set)
    converted: dict[str, str] = field(default_factory=dict)
    entered: dict[tuple[str, ...], set[str]] = field(default_factory=dict)
    read: dict[tuple[str, ...], set[str]] = field(default_factory=dict)
    completed: set[tuple[str, ...]] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether a run completed; otherwise, nothing is known about modules that were not called."""
        return bool(self.completed)


_KNOWN: WeakKeyDictionary[nn.Module, tuple[object, ForwardTrace]] = WeakKeyDictionary()


def trace_forward(model: nn.Module) -> ForwardTrace:
    """Run a copy of `model` on text, images, or both, as it supports, without computing any values.

    Args:
        model: The model, on any device; it is not changed.

    Returns:
        The findings of the runs, as far as they went: shapes that depend on values end a run.
    """
    names = tuple((name, id(param)) for name, param in model.named_parameters())
    if model not in _KNOWN or _KNOWN[model][0] != names:
        trace = ForwardTrace()
        for kinds in ((_TEXT,), (_IMAGES,), (_TEXT, _IMAGES)):
            trace.entered[kinds], trace.read[kinds] = set(), set()
            # In eval mode, RWKV changes weights; when training, Reformer takes only one length.
            if not _runs(model, kinds, trace, is_training=True):
                _runs(model, kinds, trace, is_training=False)
        _KNOWN[model] = names, trace
    return _KNOWN[model][1]


def unused_by_text(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that only images or sound use: a run on text gives them no gradient.

    They are those of the modules that run on images and not on text, such as a projector, and of nested models that do
    not run on text, such as a vision tower; further those that no operator takes, such as in layers for cross-attention
    to images. Experts that no token chose are not among them, nor layers of a kind of which others ran: they may have
    been dropped at random (LayerDrop).

    Args:
        model: The model, on any device; it is not changed.

    Returns:
        The names; none if the model could not be traced on text.
    """
    nested = {fqn for fqn, module in model.named_modules() if fqn and isinstance(module, PreTrainedModel)}
    if not nested and _IMAGES not in inspect.signature(model.forward).parameters:
        return frozenset()
    trace = trace_forward(model)
    if (_TEXT,) not in trace.completed:
        return frozenset()
    on_text = trace.entered[(_TEXT,)]
    around_text = {fqn[:end] for fqn in on_text for end, character in enumerate(fqn) if character == "."}
    others = (nested | set().union(*trace.entered.values())) - on_text - around_text
    inside = {module for fqn in others for module in model.get_submodule(fqn).modules()}
    tied = {
        id(param)
        for fqn, module in model.named_modules(remove_duplicate=False)
        if fqn in on_text
        for param in module.parameters(recurse=False)
    }
    not_run = {
        f"{fqn}.{name}"
        for fqn, module in model.named_modules()
        if module in inside and fqn not in on_text
        for name, param in module.named_parameters(recurse=False)
        if id(param) not in tied
    }
    read = trace.read[(_TEXT,)]
    return frozenset(not_run | {name for name, _ in model.named_parameters() if _is_passed_by(model, name, read)})


def _is_passed_by(model: nn.Module, name: str, read: Collection[str]) -> bool:
    """Whether no operator took a parameter, and not by chance: of the layers of its kind in each list, none ran."""
    if name in read:
        return False
    owner, path = model, ""
    for part in name.split(".")[:-1]:
        inside, path = owner.get_submodule(part), f"{path}{part}."
        if isinstance(owner, (nn.ModuleList, nn.ModuleDict)):
            before = path[: -len(part) - 1]
            ran = {type(child) for key, child in owner.named_children() if _any_under(read, f"{before}{key}.")}
            if ran:
                return type(inside) not in ran
            if isinstance(owner, nn.ModuleList):  # a ModuleDict of peft has the matrices of each adapter
                return False
        owner = inside
    return True


def _any_under(names: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _runs(model: nn.Module, kinds: tuple[str, ...], trace: ForwardTrace, *, is_training: bool) -> bool:
    """Run a copy of `model` on meta; return whether it completed."""
    # Any error: models were not written for this, and anything that an incomplete run did not reach stays unknown.
    with suppress(Exception), torch.device("meta"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        inputs = dict(_inputs(model, kinds))
        replaced = {id(tensor): _without_values(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        copied = copy.deepcopy(model, replaced).train(is_training)
        uses = _Uses(copied, trace, kinds)
        for module in copied.modules():
            module.register_forward_pre_hook(uses.enter)
            module.register_forward_hook(uses.leave)
        try:
            with uses:
                copied(**inputs)
        finally:
            trace.converted.update(_converted_names(copied))
        trace.completed.add(kinds)
        return True
    return False


def _converted_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.dtype != _DTYPE:
            yield name, str(param.dtype).removeprefix("torch.")


class _Uses(TorchDispatchMode):
    """Watches the arguments of operators, and records the modules of parameters that would not be gathered."""

    def __init__(self, model: nn.Module, trace: ForwardTrace, kinds: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.trace, self.entered, self.read = trace, trace.entered[kinds], trace.read[kinds]
        self.running: list[nn.Module] = []
        self.fqns = {module: fqn for fqn, module in model.named_modules()}
        self.holders: dict[UntypedStorage, list[nn.Module]] = {}
        for module in self.fqns:
            for param in module.parameters():
                self.holders.setdefault(param.untyped_storage(), []).append(module)
        self.names: dict[UntypedStorage, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(param.untyped_storage(), []).append(name)

    def enter(self, module: nn.Module, args: Any) -> None:
        self.running.append(module)
        self.entered.add(self.fqns[module])
        if not torch.is_grad_enabled():  # its gradients come from a backward pass that recomputes it (Reformer)
            self.trace.outside.add(self.fqns[module])
        else:
            self.trace.with_grad.add(self.fqns[module])

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.remove(module)
        self.trace.called.add(self.fqns[module])

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            held = self.holders.get(tensor.untyped_storage(), ())
            self.read.update(self.names.get(tensor.untyped_storage(), ()))
            self.trace.outside.update(self.fqns[module] for module in held if module not in self.running)
        if function.name() == "aten::_local_scalar_dense":  # a value that control flow depends on
            return 1.0 if args[0].is_floating_point() else 1
        return function(*args, **(kwargs or {}))


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.empty(tensor.shape, dtype=_DTYPE if tensor.is_floating_point() else tensor.dtype)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(values, requires_grad=tensor.is_floating_point()) if is_parameter else values


def _inputs(model: nn.Module, kinds: Iterable[str]) -> Iterator[tuple[str, Any]]:
    config: Any = model.config
    accepted: Mapping[str, Any] = inspect.signature(model.forward).parameters
    for kind in kinds:
        if kind not in accepted:
            raise ValueError(f"{type(model).__name__} takes no {kind}")
    if _TEXT in kinds:
        yield _TEXT, torch.ones((1, _NUM_TOKENS), dtype=torch.long)
    if _IMAGES in kinds:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        yield _IMAGES, torch.ones((1, getattr(vision, "num_channels", 3), height, width), dtype=_DTYPE)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        yield "decoder_input_ids", torch.ones((1, _NUM_TOKENS), dtype=torch.long)
    if "use_cache" in accepted:
        yield "use_cache", False
