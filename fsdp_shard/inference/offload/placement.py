"""Applies a device plan to a model on meta: fills resident blocks, streams the rest, and moves inputs between devices.

If the CPU computes, parameters are views of the checkpoint's own files where possible, on the CPU and on disk alike;
for blocks on disk, pages are fetched shortly before use, and dropped if memory is short. Files with CRCs are read
instead, and so verified, unless the block is on disk.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device

from fsdp_shard.checkpoint import TensorIndex
from fsdp_shard.inference.config import Device
from fsdp_shard.inference.device_map.device_plan import DevicePlan, device_name
from fsdp_shard.inference.offload import block_hooks, buffer_ring, mmap_tensors, offloaded_model, page_cache
from fsdp_shard.inference.offload.tensor_reader import TensorReader
from fsdp_shard.inference.quantization import Quantizer
from fsdp_shard.models import Block, rebuild_buffers
from fsdp_shard.utils import empty_pages, give_back_free_memory, lock_pages, persistent_buffers

# Touching a page may load a huge page of 2 MB, also for a norm among weights that are not kept.
_SMALL_BYTES = 1 << 16

_Slots = Sequence[tuple[torch.nn.Module, str, torch.nn.Parameter]]


@dataclass(frozen=True)
class PageBudget:
    """How long pages of streamed blocks stay in memory.

    Attributes:
        is_strict: A budget is set, so this process unmaps them after each pass (the page cache may keep them).
        cache_bytes: Memory available to the page cache. Blocks beyond it are dropped from the cache too, always the
            same ones: a cache that drops the least recently used data holds nothing that comes next in a cycle.
    """

    is_strict: bool
    cache_bytes: int


def dispatch_blocks(
    model: torch.nn.Module,
    blocks: Sequence[Block],
    plan: DevicePlan,
    index: TensorIndex,
    stored: Mapping[str, str],
    page_budget: PageBudget,
    quantizer: Quantizer | None = None,
) -> block_hooks.BlockStream:
    """Make `model` run according to `plan`.

    Args:
        model: The model, on meta.
        blocks: Its blocks.
        plan: The device of each block.
        index: The checkpoint.
        stored: Parameters and persistent buffers -> names in `index`.
        page_budget: How long pages of streamed blocks stay in memory.
        quantizer: Quantizes its layers as soon as they are loaded.

    Returns:
        The streamed blocks.
    """
    execution_device = torch.device(device_name(plan.execution_device))
    reader = TensorReader(index)
    rebuild_buffers(model, execution_device)
    for owner, name, fqn, buffer in list(persistent_buffers(model)):
        if buffer.is_meta:
            filled = torch.empty_like(buffer, device=execution_device)
            setattr(owner, name, filled)
            reader.fill(stored[fqn], filled)
    stream = _BlockLoader(model, plan, reader, stored, page_budget).load(blocks, quantizer)
    if stream.reads_files:
        index.remember_files()
    index.close()  # a later read opens its files again
    _move_inputs(model, blocks, plan)
    offloaded_model.make_offloaded(model, execution_device)
    return stream


@dataclass
class _BlockLoader:
    """Gives each parameter memory on its block's device, and streams blocks that compute elsewhere."""

    _model: torch.nn.Module
    _plan: DevicePlan
    _reader: TensorReader
    _stored: Mapping[str, str]
    _budget: PageBudget

    def __post_init__(self) -> None:
        # The stored name of a tied parameter comes first.
        self._names = {id(param): self._stored[name] for name, param in self._model.named_parameters()}
        self._loaded: dict[int, torch.nn.Parameter] = {}  # by id of the parameter on meta, which `_metas` keeps alive
        self._metas = list(self._model.parameters())
        self._mapped = mmap_tensors.MappedFiles(self._reader.index) if self._plan.execution_device == "cpu" else None
        self._pages = page_cache.PageReader()
        self._cache_left = self._budget.cache_bytes

    def load(self, blocks: Sequence[Block], quantizer: Quantizer | None) -> block_hooks.BlockStream:
        """Load, stream or quantize each block; return the streamed ones."""
        ring = buffer_ring.Ring if self._plan.execution_device == "cpu" else buffer_ring.GpuRing
        execution_device = torch.device(device_name(self._plan.execution_device))
        stream = block_hooks.BlockStream(ring(execution_device, self._reader.fill_all), self._plan.prefetch)
        # The largest block is quantized first, when few others are in memory along with its original weights.
        for block in sorted(blocks, key=lambda block: -block.num_bytes) if quantizer else blocks:
            module, device = self._model.get_submodule(block.fqn), self._plan.devices[block.fqn]
            slots = list(_slots(module, block.direct))
            if self._plan.is_streamed(block.fqn):
                stream.add(self._streamed(block, slots, device))
            else:
                self._keep(
                    [meta for _, _, meta in slots], device_name(device), 0 if quantizer is None else _SMALL_BYTES
                )
            for owner, name, meta in slots:
                if id(meta) in self._loaded:
                    setattr(owner, name, self._loaded[id(meta)])
            if quantizer is not None:
                weights = {id(owner): meta for owner, name, meta in slots if name == "weight"}
                for layer in quantizer.layers[block.fqn]:
                    self._quantize(layer, weights[id(layer)], quantizer)
        return stream

    def _quantize(self, layer: torch.nn.Linear, meta: torch.nn.Parameter, quantizer: Quantizer) -> None:
        """Quantize a layer and free its original weight."""
        quantizer.encode(layer)
        self._loaded.pop(id(meta), None)
        give_back_free_memory()  # otherwise the original weights of all layers would add up to the whole model
        if self._mapped is not None:
            for pages in self._mapped.pages([self._names[id(meta)]]):
                pages.drop(from_cache=False)

    def _keep(self, metas: Sequence[torch.nn.Parameter], device: str, smallest: int) -> None:
        """Give parameters memory on `device`; if the CPU computes, views of files for at least `smallest` bytes."""
        new = []
        for meta in {id(meta): meta for meta in metas if id(meta) not in self._loaded}.values():
            is_mapped = meta.nbytes >= smallest and not self._reader.index.entry(self._names[id(meta)]).has_checksum
            view = self._view(meta) if is_mapped else None
            if view is None:
                view = torch.empty_like(meta, device=device)
                new.append((self._names[id(meta)], view.data))
            self._loaded[id(meta)] = torch.nn.Parameter(view, requires_grad=False)
        self._reader.fill_all(new)

    def _view(self, meta: torch.nn.Parameter) -> torch.Tensor | None:
        return None if self._mapped is None else self._mapped.view(self._names[id(meta)], meta.dtype)

    def _streamed(self, block: Block, slots: _Slots, device: Device) -> block_hooks.StreamedBlock:
        module = self._model.get_submodule(block.fqn)
        in_place: list[str] = []
        buffered: dict[int, torch.nn.Parameter] = {}
        for _, _, meta in slots:
            if (view := self._view(meta)) is None:
                buffered[id(meta)] = meta
            else:
                in_place.append(self._names[id(meta)])
                self._loaded.setdefault(id(meta), torch.nn.Parameter(view, requires_grad=False))
        content = buffer_ring.Content(
            tuple((self._names[key], meta.dtype, tuple(meta.shape)) for key, meta in buffered.items())
        )
        if device == "cpu":  # and a GPU computes
            content = buffer_ring.Content(content.tensors, self._page_locked(content))
        numbers = {key: number for number, key in enumerate(buffered)}
        shown = [block_hooks.Slot(*slot, numbers[id(slot[2])]) for slot in slots if id(slot[2]) in numbers]
        pages = [] if self._mapped is None else self._mapped.pages(in_place)
        # Only an embedding's looked-up rows are needed, and touching them reads them.
        ahead = [] if isinstance(module, torch.nn.Embedding) else pages
        for file_pages in ahead:
            file_pages.advise_huge()
        parts = [part for file_pages in ahead for part in file_pages.parts()]
        populate = partial(self._pages.populate, parts, is_unmapped=self._budget.is_strict)
        num_bytes = content.num_bytes + sum(file_pages.num_bytes for file_pages in ahead)
        params = partial(_params, self._model, block) if shown else tuple
        return block_hooks.StreamedBlock(module, shown, content, populate, self._drop(pages), num_bytes, params)

    def _page_locked(self, content: buffer_ring.Content) -> torch.Tensor:
        """Return pinned CPU memory with `content`, from which a GPU copies by itself."""
        memory = empty_pages(content.num_bytes)
        self._reader.fill_all(content.views(memory))
        lock_pages(memory, torch.device(device_name(self._plan.execution_device)))
        return memory

    def _drop(self, pages: Sequence[page_cache.FilePages]) -> Callable[[], None]:
        """Return the action for a block's pages after its pass."""
        num_bytes = sum(file_pages.num_bytes for file_pages in pages)
        from_cache = num_bytes > self._cache_left
        self._cache_left -= 0 if from_cache else num_bytes
        dropped = pages if from_cache or self._budget.is_strict else ()

        def drop() -> None:
            for file_pages in dropped:
                file_pages.drop(from_cache=from_cache)

        return drop


def _slots(module: torch.nn.Module, direct: bool) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Every (module, parameter name, parameter) in a block."""
    for owner in [module] if direct else module.modules():
        for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, name, param


def _params(model: torch.nn.Module, block: Block) -> Iterator[torch.nn.Parameter]:
    """The parameters of the module now at `block`, such as a peft layer that wraps the original one."""
    return model.get_submodule(block.fqn).parameters(recurse=not block.direct)


def _move_inputs(model: torch.nn.Module, blocks: Sequence[Block], plan: DevicePlan) -> None:
    """Move the inputs and buffers of each block to the device where it computes."""
    computes = {
        block.fqn: plan.execution_device if plan.is_streamed(block.fqn) else plan.devices[block.fqn] for block in blocks
    }
    if plan.execution_device != "cpu":
        _move_inputs_of(model, torch.device(device_name(plan.execution_device)))
    if set(computes.values()) == {plan.execution_device}:
        return
    for block in blocks:
        if not block.direct:
            module, device = model.get_submodule(block.fqn), torch.device(device_name(computes[block.fqn]))
            _move_inputs_of(module, device)
            for inner in module.modules():
                for name, buffer in list(inner.named_buffers(recurse=False, remove_duplicate=False)):
                    setattr(inner, name, buffer.to(device))


def _move_inputs_of(module: torch.nn.Module, device: torch.device) -> None:
    def move(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return send_to_device((args, kwargs), device, non_blocking=True)

    module.register_forward_pre_hook(move, with_kwargs=True)
