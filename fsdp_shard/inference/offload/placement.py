"""Carries out a device plan on a model on meta: fills what stays, streams the rest, moves inputs between devices.

Where the CPU computes, parameters are views of the checkpoint's own files as far as those allow, on the CPU and on disk
alike; what makes `disk` is that their pages are fetched shortly before they are used and let go where memory is short.
Knows blocks, a plan and names in a tensor index; how the plan came about is not its business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_shard.checkpoint import TensorIndex
from fsdp_shard.inference.config import Device
from fsdp_shard.inference.device_map.device_plan import DevicePlan, device_name
from fsdp_shard.inference.offload.block_hooks import BlockStream, Slot, StreamedBlock
from fsdp_shard.inference.offload.buffer_ring import Content, make_ring, page_lock
from fsdp_shard.inference.offload.mmap_tensors import MappedFiles
from fsdp_shard.inference.offload.model_device import set_device
from fsdp_shard.inference.offload.page_cache import FilePages, PageReader
from fsdp_shard.inference.offload.tensor_reader import TensorReader
from fsdp_shard.inference.quantization import Quantizer
from fsdp_shard.models import Block, rebuild_buffers
from fsdp_shard.utils import give_back_free_memory

# A page that is touched may bring a large one of 2 MB: a norm that lies among weights which are not kept would, too.
_SMALL_BYTES = 1 << 16


@dataclass(frozen=True)
class Spare:
    """What decides how long pages of streamed blocks stay in memory.

    `hold`: a budget was given, so this process lets go of them after each pass (the page cache may keep them).
    `cache_bytes`: memory that the page cache can have; blocks beyond it are dropped from it too, always the same ones,
    for a cache that drops what was used longest ago has nothing of what comes next in a cycle.
    """

    hold: bool
    cache_bytes: int


def place(
    model: nn.Module,
    blocks: Sequence[Block],
    plan: DevicePlan,
    index: TensorIndex,
    stored: Mapping[str, str],
    spare: Spare,
    quantizer: Quantizer | None = None,
) -> None:
    """Make `model` run as `plan` says; `stored` maps its parameters and persistent buffers to names in `index`.

    What `quantizer` names is quantized as soon as it is there.
    """
    main = torch.device(device_name(plan.main))
    reader = TensorReader(index)
    rebuild_buffers(model, main)
    _fill_buffers(model, main, reader, stored)
    _Placement(model, plan, reader, stored, spare).run(blocks, quantizer)
    reader.release()
    _move_inputs(model, blocks, plan)
    set_device(model, main)


def _fill_buffers(model: nn.Module, device: torch.device, reader: TensorReader, stored: Mapping[str, str]) -> None:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                filled = module._buffers[name] = torch.empty_like(buffer, device=device)
                reader.fill(stored[f"{prefix}.{name}" if prefix else name], filled)


class _Placement:
    """Gives each parameter of a model memory where its block lies, and streams the blocks that compute elsewhere."""

    def __init__(
        self, model: nn.Module, plan: DevicePlan, reader: TensorReader, stored: Mapping[str, str], spare: Spare
    ) -> None:
        self._model, self._plan, self._reader, self._spare = model, plan, reader, spare
        # A tied parameter's kept name comes first.
        self._names = {id(param): stored[name] for name, param in model.named_parameters()}
        self._kept: dict[int, nn.Parameter] = {}  # by id of the parameter on meta, which `_metas` keeps alive
        self._metas = list(model.parameters())
        self._mapped = MappedFiles(reader.index) if plan.main == "cpu" else None
        self._pages = PageReader()
        self._cache_left = spare.cache_bytes

    def run(self, blocks: Sequence[Block], quantizer: Quantizer | None) -> None:
        streamed = []
        # Of what is quantized the largest comes first: its weights as they were are there beside few others then.
        for block in sorted(blocks, key=lambda block: -block.num_bytes) if quantizer else blocks:
            module = self._model.get_submodule(block.fqn)
            slots = list(_slots(module, block.direct))
            if self._plan.is_streamed(block.fqn):
                streamed.append(self._streamed(module, slots, self._plan.devices[block.fqn]))
            else:
                smallest = 0 if quantizer is None else _SMALL_BYTES
                device = device_name(self._plan.devices[block.fqn])
                self._keep([meta for _, _, meta in slots], device, smallest)
            for owner, name, meta in slots:
                if id(meta) in self._kept:
                    owner._parameters[name] = self._kept[id(meta)]
            if quantizer is not None:
                weights = {id(owner): meta for owner, name, meta in slots if name == "weight"}
                for layer in quantizer.layers[block.fqn]:
                    self._quantize(layer, weights[id(layer)], quantizer)
        main = torch.device(device_name(self._plan.main))
        stream = BlockStream(make_ring(main, self._reader.fill_all), self._plan.prefetch)
        for block_of_it in streamed:
            stream.add(block_of_it)

    def _quantize(self, layer: nn.Linear, meta: nn.Parameter, quantizer: Quantizer) -> None:
        """Let go of a layer's weight once it is there in fewer bits."""
        quantizer.encode(layer)
        self._kept.pop(id(meta), None)
        give_back_free_memory()  # or the layers before they were quantized would add up to the whole model
        if self._mapped is not None:
            for pages in self._mapped.pages([self._names[id(meta)]]):
                pages.drop(from_cache=False)

    def _keep(self, metas: Sequence[nn.Parameter], device: str, smallest: int) -> None:
        """Give parameters memory on `device`; where the CPU computes, those of `smallest` bytes are views of files."""
        new = []
        for meta in {id(meta): meta for meta in metas if id(meta) not in self._kept}.values():
            view = self._view(meta) if meta.nbytes >= smallest else None
            if view is None:
                view = torch.empty_like(meta, device=device)
                new.append((self._names[id(meta)], view.data))
            self._kept[id(meta)] = nn.Parameter(view, requires_grad=False)
        self._reader.fill_all(new)

    def _view(self, meta: nn.Parameter) -> torch.Tensor | None:
        return None if self._mapped is None else self._mapped.view(self._names[id(meta)], meta.dtype)

    def _streamed(
        self, module: nn.Module, slots: Sequence[tuple[nn.Module, str, nn.Parameter]], device: Device
    ) -> StreamedBlock:
        in_place: list[str] = []
        contents: dict[int, int] = {}
        metas: list[nn.Parameter] = []
        for _, _, meta in slots:
            if (view := self._view(meta)) is not None:
                in_place.append(self._names[id(meta)])
                self._kept.setdefault(id(meta), nn.Parameter(view, requires_grad=False))
            elif id(meta) not in contents:
                contents[id(meta)] = len(metas)
                metas.append(meta)
        content = Content(tuple((self._names[id(meta)], meta.dtype, tuple(meta.shape)) for meta in metas))
        if device == "cpu":  # and a GPU computes
            content = Content(content.tensors, self._locked(content))
        shown = [Slot(*slot, contents[id(slot[2])]) for slot in slots if id(slot[2]) in contents]
        pages = [] if self._mapped is None else self._mapped.pages(in_place)
        # Of an embedding only the rows that are looked up are needed, and those come when they are touched.
        ahead = [] if isinstance(module, nn.Embedding) else pages
        for these in ahead:
            these.in_large_pages()
        parts = [part for these in ahead for part in these.parts()]
        bring_in = partial(self._pages.bring_in, parts, dropped=self._spare.hold)
        return StreamedBlock(module, shown, content, bring_in, self._drop(pages))

    def _locked(self, content: Content) -> torch.Tensor:
        """CPU memory that holds `content`, and that the GPU copies from by itself."""
        memory = torch.empty(content.num_bytes, dtype=torch.uint8)
        self._reader.fill_all(
            [(spec[0], out) for spec, out in zip(content.tensors, content.views(memory), strict=True)]
        )
        page_lock(memory)
        return memory

    def _drop(self, pages: Sequence[FilePages]) -> Any:
        """What is to be done with the pages of a block after its pass."""
        num_bytes = sum(these.num_bytes for these in pages)
        from_cache = num_bytes > self._cache_left
        self._cache_left -= 0 if from_cache else num_bytes
        if not from_cache and not self._spare.hold:
            return _nothing

        def drop() -> None:
            for these in pages:
                these.drop(from_cache=from_cache)

        return drop


def _nothing() -> None:
    """Memory is not short."""


def _slots(module: nn.Module, direct: bool) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every (module, parameter name, parameter) in a block."""
    for owner in [module] if direct else module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                yield owner, name, param


def _move_inputs(model: nn.Module, blocks: Sequence[Block], plan: DevicePlan) -> None:
    """Let each block find its inputs and buffers on the device where it computes."""
    computes: dict[str, Device] = {
        block.fqn: plan.main if plan.is_streamed(block.fqn) else plan.devices[block.fqn] for block in blocks
    }
    if plan.main != "cpu":
        _move_inputs_of(model, torch.device(device_name(plan.main)))
    if set(computes.values()) == {plan.main}:
        return
    for block in blocks:
        if not block.direct:
            module, device = model.get_submodule(block.fqn), torch.device(device_name(computes[block.fqn]))
            _move_inputs_of(module, device)
            for inner in module.modules():
                inner._buffers.update(_to(inner._buffers, device))


def _move_inputs_of(module: nn.Module, device: torch.device) -> None:
    def move(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _to(args, device), _to(kwargs, device)

    module.register_forward_pre_hook(move, with_kwargs=True)


def _to(value: Any, device: torch.device) -> Any:
    """`value` with the tensors in it on `device`; caches and other objects see to themselves."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_to(item, device) for item in value)
    if type(value) is dict:
        return {key: _to(item, device) for key, item in value.items()}
    return value
