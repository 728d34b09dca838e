"""Activation offload: the tensors that blocks save for the backward pass are in CPU memory in the meantime.

torch's own `save_on_cpu` also moves parameters, and waits for each copy. Here, parameters stay in place, gathered or
not. A block's tensors leave the GPU while the next block is computed, and return while the next block's backward pass
runs. Those of the last block are used before they would leave.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_shard.utils import version, view_base

_Forward = Callable[..., Any]


def offload_blocks(blocks: Iterable[nn.Module], device: torch.device, *, compiled: bool = False) -> None:
    """Replace the forward of `blocks`, in execution order, with one that keeps its saved tensors in CPU memory.

    Call it after compilation: graphs save their own tensors, and the copies are not part of the graphs.

    Args:
        blocks: The blocks, which run on `device`.
        device: The device whose memory the saved tensors leave.
        compiled: Whether the blocks are compiled, so that tensors must return with the strides that they had.
    """
    offload = _Offload(device, keeps_strides=compiled)
    for block in blocks:
        block.forward = offload.wrap(block.forward)


class _Offload:
    """Keeps the tensors that autograd saves in a model's blocks in CPU memory, except parameters and views of them.

    Some are in CPU memory already: the seed of an attention kernel, an empty tensor of `checkpoint`.
    """

    def __init__(self, device: torch.device, *, keeps_strides: bool) -> None:
        self.device, self.copies, self.keeps_strides = device, _Copies(device), keeps_strides
        # In the order of their forward passes. Only the autograd graph keeps them alive.
        self._blocks: list[weakref.ref[_SavedBlock]] = []

    def wrap(self, forward: _Forward) -> _Forward:
        """Return a block's `forward` that offloads its saved tensors."""

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            block = _SavedBlock(self)
            try:
                with torch.autograd.graph.saved_tensors_hooks(block.save, _load):
                    result = forward(*args, **kwargs)
            finally:  # its tensors refer to the block, and would outlive an error until Python collects cycles
                block.end_forward()
            if block.tensors:
                if (before := self.block_before(block)) is not None:
                    before.leave_device()
                self._blocks.append(weakref.ref(block))
            return result

        return run

    def block_before(self, block: "_SavedBlock") -> "_SavedBlock | None":
        """The block whose forward pass preceded that of `block`, if its backward pass has not begun."""
        while self._blocks:
            last = self._blocks[-1]()
            if last is not None and last is not block and not last.is_used:
                return last
            self._blocks.pop()
        return None


class _SavedBlock:
    """The tensors that one forward pass of a block saved.

    Attributes:
        tensors: The tensors, as long as autograd needs them.
        is_used: Whether the backward pass of the block has begun.
    """

    def __init__(self, offload: _Offload) -> None:
        self.tensors: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
        self.is_used = False
        self._offload = offload
        self._known: dict[Any, tuple[_SavedTensor, torch.Tensor]] = {}
        self._copied: torch.cuda.Event | None = None

    def save(self, tensor: torch.Tensor) -> "torch.Tensor | _SavedTensor":
        """Begin to copy a tensor to the CPU; the returned object replaces it in the graph.

        Several products of one input save views of the same memory, which is copied only once. Outputs are passed here
        without their version, so their memory may have changed since; they are recognized only as the same object.
        """
        part = _plain_part(tensor)
        device = self._offload.device.type
        if part is None or part.device.type != device or isinstance(view_base(tensor), nn.Parameter):
            return tensor
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        layout = part.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, placements
        values = version(tensor), part.is_conj(), part.is_neg()
        key = (layout if tensor.requires_grad else id(tensor), *values)
        if key not in self._known:
            saved = _SavedTensor(self, tensor, part, self._offload)
            # The object stays, too: another one, such as the next mask of dropout, could get its id otherwise.
            self._known[key] = saved, tensor
            self.tensors.add(saved)
        return self._known[key][0]

    def end_forward(self) -> None:
        """Record the end of the copies, and leave the tensors to autograd."""
        self._known.clear()
        self._copied = self._offload.copies.event() if self.tensors else None

    def leave_device(self) -> None:
        """Release the tensors for reuse by computations after their copies."""
        self._offload.copies.wait(self._copied)
        for saved in self.tensors:
            saved.leave_device()

    def use(self) -> None:
        """Wait for the tensors to return, and begin to fetch the previous block's; once per backward pass."""
        if not self.is_used:
            self.is_used = True
            self.fetch()
            self._offload.copies.wait(self._copied)
            self._offload.copies.limit_fetches()
            if (before := self._offload.block_before(self)) is not None:
                before.fetch()

    def fetch(self) -> None:
        """Begin to copy back the tensors that are not on the device."""
        gone = [saved for saved in self.tensors if saved.on_device is None]
        for saved in gone:
            saved.fetch()
        if gone:
            self._copied = self._offload.copies.event()


class _SavedTensor:
    """A tensor of a block, in CPU memory and temporarily on the device, until the autograd graph drops it.

    Args:
        block: Its block.
        tensor: What autograd saves.
        part: This rank's values of it.
        offload: That of the model.
    """

    def __init__(self, block: _SavedBlock, tensor: torch.Tensor, part: torch.Tensor, offload: _Offload) -> None:
        self.on_device: torch.Tensor | None = part.detach()
        self._copies = offload.copies
        self._block = block
        self._shape, self._version, self._is_changed = part.shape, version(part), False
        self._of_ranks = _in_ranks(tensor) if isinstance(tensor, DTensor) else None
        once = _without_repeats(part.detach())
        self._strides = once.stride()
        self._host = self._copies.to_host(once)
        # Slices of a fused query, key and value would each take as much memory again as all of them.
        if not offload.keeps_strides and _num_spanned(once) > 2 * once.numel():
            self._strides = self._host.stride()

    def leave_device(self) -> None:
        """Release the memory, which is copied."""
        self._note_changes()
        self.on_device = None

    def fetch(self) -> None:
        """Begin to copy it back."""
        self.on_device = self._copies.to_device(self._host, self._strides).expand(self._shape)
        self._version = version(self.on_device)

    def load(self) -> torch.Tensor:
        self._block.use()
        assert self.on_device is not None, "use() fetches all tensors of the block"
        self._note_changes()
        if self._is_changed:
            raise RuntimeError(
                "A tensor needed for the backward pass of a block was modified by an in-place operation after the "
                "block used it."
            )
        self._copies.keep_until_used(self.on_device)
        return self.on_device if self._of_ranks is None else self._of_ranks(self.on_device)

    def _note_changes(self) -> None:
        # torch does not check versions of what hooks replace. Outputs have none, and are not noticed.
        self._is_changed |= self.on_device is not None and version(self.on_device) != self._version


def _load(saved: torch.Tensor | _SavedTensor) -> torch.Tensor:
    return saved if isinstance(saved, torch.Tensor) else saved.load()


def _plain_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's values of `tensor` as a tensor with strides; None if there is none, as for sparse tensors."""
    part = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor
    is_plain = type(part) in (torch.Tensor, nn.Parameter) and part.layout is torch.strided and not part.is_nested
    return part if is_plain else None


def _in_ranks(tensor: DTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that returns the DTensor that is divided as `tensor` is, with this rank's part of the values."""
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return lambda part: DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with one element in each dimension that `expand` made, such as the heads of an attention mask."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if size > 1 and not stride else tensor
    return tensor


def _num_spanned(tensor: torch.Tensor) -> int:
    """The number of elements in memory from the first of `tensor` to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Copies:
    """Copies between CPU memory and a device: for a GPU in order, in a separate stream; otherwise at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._begun: torch.cuda.Event | None = None  # at the beginning of a block's backward pass

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin a copy to dense pinned memory after all computations so far; the caller keeps `tensor` alive."""
        # Between devices, torch copies strides that are not those of dense memory by way of memory that is not pinned.
        is_dense = _num_spanned(tensor) == tensor.numel()
        layout = torch.preserve_format if is_dense else torch.contiguous_format
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=layout)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._in_order():
            # torch resolves these bits on the CPU before the copy has ended (pytorch#146286); remove it once it waits.
            return host.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)

    def to_device(self, host: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """Begin a copy to the device, in memory that belongs to the copy stream.

        Compiled backward passes require the strides that a tensor had, and attention kernels those of a mask.
        """
        with self._in_order():
            if host.stride() == strides:
                return host.to(self._device, non_blocking=True)
            empty = torch.empty_strided(host.shape, strides, dtype=host.dtype, device=self._device)
            return empty.copy_(host, non_blocking=True)

    def limit_fetches(self) -> None:
        """Wait until the device has begun the block before the one that begins now.

        Python is ahead of a GPU, and would otherwise fetch all blocks at once. FSDP1 limits what it gathers likewise.
        """
        if self._stream is not None:
            begun, self._begun = self._begun, torch.cuda.current_stream(self._device).record_event()
            if begun is not None:
                begun.synchronize()

    def _in_order(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def event(self) -> torch.cuda.Event | None:
        """An event at the end of the copies begun so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make later computations wait for `event`."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def keep_until_used(self, tensor: torch.Tensor) -> None:
        """Keep copies from reusing the memory of `tensor` before later computations have read it."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._device))
