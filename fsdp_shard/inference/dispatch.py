"""A model on the devices there are, its weights read straight from a checkpoint of any format.

The model is built on the meta device; blocks that stay somewhere get memory there, filled one tensor at a time; the
others are read again each time they run (see `placement.py`). Nothing is written, so no copy can go stale.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint import has_file, locate
from fsdp_shard.errors import CheckpointError, ModelError, PlanError
from fsdp_shard.inference.config import DispatchConfig, parse_budgets, parse_device_map
from fsdp_shard.inference.device_map.device_plan import DevicePlan
from fsdp_shard.inference.device_map.strategies import plan_device_map
from fsdp_shard.inference.generation.data_parallel import Share
from fsdp_shard.inference.generation.kv_cache_size import Room, cache_bytes
from fsdp_shard.inference.quantization import make_quantizer, quantized_blocks
from fsdp_shard.models import build_on_meta, load_config
from fsdp_shard.utils import check

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from fsdp_shard.checkpoint import TensorIndex
    from fsdp_shard.models import Block, ModelSource


def check_checkpoint(path: str | os.PathLike[str]) -> None:
    """Raise CheckpointError or ModelError unless `path` holds weights that can be read; looks at headers only."""
    from fsdp_shard.checkpoint import open_weights

    open_weights(locate(path).weights).close()


def load_dispatched(
    path: str | os.PathLike[str],
    device_map: str | Mapping[str, Any] = "auto",
    max_memory: Mapping[Any, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    prefetch_blocks: int = 2,
    *,
    quantize: str = "none",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The transformers model at `path` (anything `locate` takes), in eval mode, ready for `generate()`.

    `device_map`: auto, balanced, balanced_low_0, sequential, cpu, disk, or {module: GPU number, cpu or disk}.
    `max_memory`: sizes such as {0: "20GB", "cpu": "64GB"}; without it, what the machine has free. `dtype`: None or
    "keep" for that of the stored weights. `prefetch_blocks` on disk are read while one computes. `quantize`: none,
    int8 or int4, of the linear layers' weights. Parameters take no gradients; what is written to those of a block on
    disk is lost after its next pass. `hf_device_map` says where each block lies; inputs may be on the CPU or on the
    first device. Raises CheckpointError, ModelError, PlanError or ConfigError.
    """
    settings = DispatchConfig(
        dict(device_map) if isinstance(device_map, Mapping) else device_map,
        None if max_memory is None else dict(max_memory),
        str(dtype or "keep").removeprefix("torch."),
        prefetch_blocks,
        quantize,
        trust_remote_code,
    )
    check(settings)
    # Blocks on disk are read as long as the model lives, whatever the working directory is then.
    source = locate(Path(path).expanduser().absolute() if Path(path).expanduser().exists() else path)
    return dispatch_model(source, load_config(source, trust_remote_code), settings)


def dispatch_model(
    source: ModelSource,
    config: PretrainedConfig,
    settings: DispatchConfig,
    room: Room | None = None,
    *,
    tell: Callable[[str], object] = lambda text: None,
    share: Share | None = None,
) -> PreTrainedModel:
    """`load_dispatched` for a model that has been located, with its config read, as the settings of a command say.

    `room` is what to keep free for keys and values. `tell` is handed the plan in words before any weight is read. With
    a `share`, this is one of several ranks that each hold the model, or divide its layers.
    """
    from fsdp_shard.checkpoint import match_names, open_weights, refuse_adapter_beside, untie

    index = open_weights(source.weights)
    refuse_adapter_beside(index)
    model = _build(config, _dtype(settings.dtype, index), settings.trust_remote_code)
    untie(model, index)
    stored = match_names(model, index)
    if share is not None and share.layers is not None:
        _divide(model, index, stored, share, tell)
    else:
        _place(model, index, stored, settings, room, share, tell)
    _load_generation_config(model, source)
    return model


def _divide(
    model: PreTrainedModel,
    index: TensorIndex,
    stored: Mapping[str, str],
    share: Share,
    tell: Callable[[str], object],
) -> None:
    from fsdp_shard.inference import tensor_parallel_dispatch

    assert share.layers is not None
    assert share.device is not None
    tell(f"{index.place}: {tensor_parallel_dispatch.divide(model, share.layers, share.device)}")
    tensor_parallel_dispatch.fill(model, index, stored)
    model.__dict__["hf_device_map"] = {"": str(share.device)}


def _place(
    model: PreTrainedModel,
    index: TensorIndex,
    stored: Mapping[str, str],
    settings: DispatchConfig,
    room: Room | None,
    share: Share | None,
    tell: Callable[[str], object],
) -> None:
    from fsdp_shard.inference.available_memory import check_devices, free_cpu_bytes
    from fsdp_shard.inference.offload.placement import Spare, place

    blocks, plan = plan_dispatch(model, settings, room, share)
    check_devices([*plan.devices.values(), plan.main])
    tell(f"{index.place}: {plan.describe()}")
    hold = "cpu" in (parse_budgets(settings.max_memory) or {})
    spare = Spare(hold, max(free_cpu_bytes() - plan.resident_bytes.get("cpu", 0), 0))
    quantizer = make_quantizer(model, blocks, settings.quantize, "cpu" if plan.main == "cpu" else "cuda")
    place(model, blocks, plan, index, stored, spare, quantizer)
    model.__dict__["hf_device_map"] = dict(plan.devices)  # as transformers and accelerate call it


def plan_dispatch(
    model: PreTrainedModel, settings: DispatchConfig, room: Room | None = None, share: Share | None = None
) -> tuple[list[Block], DevicePlan]:
    """The blocks of `model` (which may be on meta) and where they would lie; budgets that are given ask no machine."""
    from fsdp_shard.inference.available_memory import machine_budgets
    from fsdp_shard.models import no_split_blocks

    strategy, budgets = parse_device_map(settings.device_map), parse_budgets(settings.max_memory)
    if budgets is None:
        share = share or Share()
        budgets = {} if isinstance(strategy, dict) else machine_budgets(share.local_rank, share.num_groups)
    blocks = quantized_blocks(model, no_split_blocks(model), settings.quantize)
    caches = {} if room is None else cache_bytes(model.config, blocks, model.dtype.itemsize, room)
    ties = tied_blocks(model, blocks)
    plan = plan_device_map(blocks, strategy, budgets, ties=ties, prefetch=settings.prefetch_blocks, cache_bytes=caches)
    check_stays(plan, settings.quantize)
    return blocks, plan


def plan_from_config(config: PretrainedConfig, settings: DispatchConfig, room: Room | None) -> DevicePlan:
    """Where the blocks of a model would lie whose weights need not be there: `keep` is the dtype of its config."""
    import torch

    named = str(config.dtype or torch.float32) if settings.dtype == "keep" else settings.dtype
    dtype: torch.dtype = getattr(torch, named.removeprefix("torch."))
    return plan_dispatch(_build(config, dtype, settings.trust_remote_code), settings, room)[1]


def tied_blocks(model: nn.Module, blocks: Sequence[Block]) -> list[list[str]]:
    """Groups of block FQNs that have a parameter in common."""
    holders: dict[int, list[str]] = {}
    for block in blocks:
        module = model.get_submodule(block.fqn)
        for param in {id(p): p for p in module.parameters(recurse=not block.direct)}.values():
            holders.setdefault(id(param), []).append(block.fqn)
    groups: list[set[str]] = []
    for fqns in holders.values():
        if len(fqns) > 1:
            touching = [group for group in groups if group & set(fqns)]
            groups = [group for group in groups if group not in touching] + [set(fqns).union(*touching)]
    order = [block.fqn for block in blocks]
    return [sorted(group, key=order.index) for group in groups]


def _dtype(wanted: str, index: TensorIndex) -> torch.dtype:
    """The dtype to load in: `wanted`, or with `keep` the one that most bytes are stored in."""
    import torch

    from fsdp_shard.checkpoint import CASTABLE, to_torch

    if wanted != "keep":
        return getattr(torch, wanted)  # type: ignore[no-any-return]  # one of DTYPES
    num_bytes: dict[str, int] = {}
    for entry in index.tensors.values():
        if entry.dtype in CASTABLE:
            num_bytes[entry.dtype] = num_bytes.get(entry.dtype, 0) + entry.num_bytes
    if not num_bytes:
        raise CheckpointError(f"{index.root} holds no floating-point tensors, so there is no model in it.")
    return to_torch(max(num_bytes, key=lambda name: num_bytes[name]))


def _build(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The model on meta; parameters and buffers that its class wants kept in float32 are, as in `from_pretrained`."""
    from torch import nn

    model = build_on_meta(config, dtype, trust_remote_code=trust_remote_code).requires_grad_(False)
    kept = [(re.compile(glob.replace("*", ".*")), its) for glob, its in model._get_dtype_plan(dtype).items()]
    swapped: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            its = next((its for pattern, its in kept if pattern.search(f"{prefix}.{name}")), None)
            if param is not None and its is not None:
                swapped.setdefault(id(param), nn.Parameter(param.to(its), requires_grad=False))
                module._parameters[name] = swapped[id(param)]
        for name, buffer in module._buffers.items():
            its = next((its for pattern, its in kept if pattern.search(f"{prefix}.{name}")), None)
            if buffer is not None and its is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(its)
    return model


def _load_generation_config(model: PreTrainedModel, source: ModelSource) -> None:
    """Take generation_config.json where there is one; the model already has what its config says."""
    from transformers import GenerationConfig

    if model.can_generate() and has_file(source.directory, "generation_config.json"):
        try:
            model.generation_config = GenerationConfig.from_pretrained(source.directory)
        except Exception as error:  # whatever is wrong with what the file says
            raise ModelError(
                f"{source.directory / 'generation_config.json'} is no generation config ({type(error).__name__}); "
                "repair it, or remove it to use the defaults."
            ) from error


def check_stays(plan: DevicePlan, kind: str) -> None:
    """Raise PlanError when a block is streamed: it would be quantized anew for each token."""
    streamed = [fqn for fqn in plan.devices if plan.is_streamed(fqn)]
    if kind != "none" and streamed:
        raise PlanError(
            f"dispatch.quantize={kind} is for models that fit when quantized, and {len(streamed)} blocks "
            f"({streamed[0]} first) would be on disk or beside the GPU that computes; give more memory, or leave "
            "quantize out."
        )
