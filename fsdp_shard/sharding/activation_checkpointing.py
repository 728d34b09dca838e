"""Activation checkpointing and offload of blocks: their forward pass keeps less for the backward pass.

Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Selective checkpointing keeps the results of matrix
products and of attention, which take nearly all of the time, and recomputes the rest. Only the `forward` of a block is
replaced, so that no name of a parameter changes.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_shard.models import no_split_blocks
from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.utils import is_costly_operator, version, view_base

_Forward = Callable[..., Any]

# The levels that wrappers add to parameter names, which must not get into a checkpoint.
_WRAPPER_LEVELS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


def recompute_blocks(model: nn.Module, settings: ShardConfig) -> list[nn.Module]:
    """Replace the forward of the repeated blocks of `model` by one that keeps less.

    Returns:
        All repeated blocks, or none if no setting is about blocks: units by size (`min_params`) need none.
    """
    if settings.activation_checkpointing in (False, "none") and not (settings.compile or settings.activation_offload):
        return []
    blocks = {
        block.fqn: model.get_submodule(block.fqn) for block in no_split_blocks(model, settings.blocks) if block.repeated
    }
    is_selective = settings.activation_checkpointing == "selective"
    # torch.compile knows no `context_fn` that is torch's own default.
    options: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if is_selective else {}
    )
    for fqn in recomputed_fqns(list(blocks), settings.activation_checkpointing):
        forward = blocks[fqn].forward
        blocks[fqn].forward = wraps(forward)(partial(checkpoint, forward, use_reentrant=False, **options))
    return list(blocks.values())


def offload_blocks(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Replace the forward of `blocks`, in the order in which they run, by one that keeps in CPU memory what it saves.

    After they are compiled: graphs save their own tensors, and the copies are not part of them.

    Args:
        blocks: The blocks, which compute on `device`.
        device: The device whose memory they leave.
    """
    offload = _Offload(device)
    for block in blocks:
        block.forward = offload.wrap(block.forward)


def recomputed_fqns(blocks: Sequence[str], kind: bool | int | str) -> list[str]:
    """Those of `blocks` (FQNs) that `shard.activation_checkpointing=kind` recomputes in the backward pass."""
    if kind in ("none", "all", "selective") or isinstance(kind, bool):
        return list(blocks) if kind in (True, "all", "selective") else []
    assert isinstance(kind, int)
    return list(blocks[kind - 1 :: kind])


def clean_fqn(name: str) -> str:
    """The FQN in the unwrapped model of the parameter `name` of a wrapped one."""
    for level in _WRAPPER_LEVELS:
        name = name.replace(level, "")
    return name


class _Offload:
    """Keeps in CPU memory what autograd saves in the blocks of a model, except parameters and views of them.

    Some of it is in CPU memory anyway: the seed of an attention kernel, an empty tensor of `checkpoint`.

    torch's own `save_on_cpu` moves parameters too, which stay where they are, gathered or not, and waits for each copy.
    Here the tensors of a block leave a GPU while the block after it is computed, and come back while that one's
    backward pass runs. Those of the last block are used before they would leave.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.copies = device, _Copies(device)
        # In the order of their forward passes. Only the graph of autograd keeps them alive.
        self._blocks: list[weakref.ref[_SavedBlock]] = []

    def wrap(self, forward: _Forward) -> _Forward:
        """Return a `forward` of a block that offloads what it saves."""

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            block = _SavedBlock(self)
            with torch.autograd.graph.saved_tensors_hooks(block.save, _load):
                result = forward(*args, **kwargs)
            block.end_forward()
            if block.tensors:
                if (before := self.block_before(block)) is not None:
                    before.leave_device()
                self._blocks.append(weakref.ref(block))
            return result

        return run

    def block_before(self, block: "_SavedBlock") -> "_SavedBlock | None":
        """The block whose forward pass was before that of `block`, if its backward pass has not begun."""
        while self._blocks:
            last = self._blocks[-1]()
            if last is not None and last is not block and not last.is_used:
                return last
            self._blocks.pop()
        return None


class _SavedBlock:
    """What one forward pass of a block saved.

    Attributes:
        tensors: As long as autograd needs them.
        is_used: Whether the backward pass of the block has begun.
    """

    def __init__(self, offload: _Offload) -> None:
        self.tensors: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
        self.is_used = False
        self._offload = offload
        self._known: dict[Any, _SavedTensor] = {}
        self._copied: torch.cuda.Event | None = None

    def save(self, tensor: torch.Tensor) -> "torch.Tensor | _SavedTensor":
        """Begin to copy a tensor to the CPU; what is returned takes its place in the graph.

        Several products of one input save views of the same memory, of which one copy is made. An output is passed
        here without its version, so that the memory may have changed since, and is only known as the same object.
        """
        if tensor.device.type != self._offload.device.type or isinstance(view_base(tensor), nn.Parameter):
            return tensor
        layout = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, version(tensor)
        key = layout if tensor.requires_grad else id(tensor)
        if key not in self._known:  # the tensors in it are alive, so that neither memory nor objects are used again
            self._known[key] = saved = _SavedTensor(self, tensor, self._offload.copies)
            self.tensors.add(saved)
        return self._known[key]

    def end_forward(self) -> None:
        """Remember when the copies are made, and leave the tensors to autograd."""
        self._known.clear()
        self._copied = next((saved.copies.event() for saved in self.tensors), None)

    def leave_device(self) -> None:
        """Let the tensors go, for use by what is computed after their copies."""
        for saved in self.tensors:
            saved.copies.wait(self._copied)
            saved.on_device = None

    def use(self) -> None:
        """Wait for the tensors to be back, and begin to fetch those of the block before; once in a backward pass."""
        if not self.is_used:
            self.is_used = True
            self.fetch()
            for saved in self.tensors:
                saved.copies.wait(self._copied)
            if (before := self._offload.block_before(self)) is not None:
                before.fetch()

    def fetch(self) -> None:
        """Begin to copy back what is not on the device."""
        gone = [saved for saved in self.tensors if saved.on_device is None]
        for saved in gone:
            saved.on_device = saved.copies.to_device(saved.host)
        if gone:
            self._copied = gone[-1].copies.event()


class _SavedTensor:
    """A tensor of a block, in CPU memory and for a time on the device, until the graph of autograd drops it."""

    def __init__(self, block: _SavedBlock, tensor: torch.Tensor, copies: "_Copies") -> None:
        self.on_device: torch.Tensor | None = tensor.detach()
        self.host = copies.to_host(tensor)
        self.copies = copies
        self._block = block

    def load(self) -> torch.Tensor:
        self._block.use()
        assert self.on_device is not None, "use() fetches all"
        self.copies.keep_until_used(self.on_device)
        return self.on_device


def _load(saved: torch.Tensor | _SavedTensor) -> torch.Tensor:
    return saved if isinstance(saved, torch.Tensor) else saved.load()


class _Copies:
    """Copies between CPU memory and a device: to and from a GPU in a stream of their own, in order, else at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin a copy to page-locked memory after what is computed so far; the caller keeps `tensor` alive.

        It has the same strides: compiled backward passes were made for them.
        """
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.preserve_format)
        if self._stream is None:
            return host.copy_(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return host.copy_(tensor, non_blocking=True)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Begin a copy to the device, in memory that belongs to the stream of copies."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return host.to(self._device, non_blocking=True)

    def event(self) -> torch.cuda.Event | None:
        """The end of the copies that have begun."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Compute nothing more before `event`."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def keep_until_used(self, tensor: torch.Tensor) -> None:
        """Let no copy reuse the memory of `tensor` before what is computed from now on has read it."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._device))


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_costly_operator(operator) else CheckpointPolicy.PREFER_RECOMPUTE
