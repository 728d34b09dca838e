"""This rank's shards of any module: plain, or under DDP, FSDP1, FSDP2 or tensor parallelism, on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from transformers import PreTrainedModel

from fsdp_shard.distributed import Communicator, LocalShard, is_first_copy, shard_of
from fsdp_shard.errors import ModelError
from fsdp_shard.sharding.config import ShardedModel
from fsdp_shard.utils import (
    flat_parameter_shards,
    free_flat_parameters,
    hides_originals,
    local_shape_and_offset,
    persistent_buffers,
    restore_frozen_parameters,
    uncompiled,
)

# Modules that wrappers add to the paths of parameters, which must not enter a checkpoint.
_WRAPPED = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_COMPILED = "_orig_mod"  # of torch.compile


class ModuleShards(NamedTuple):
    """A rank's part of a module.

    Attributes:
        shards: Its parameters and persistent buffers, by their FQN in the unwrapped module.
        aliases: {tied name: name in `shards`}.
        replicated: Names of the parameters that no wrapper shards: each rank holds them in full.
    """

    shards: dict[str, LocalShard]
    aliases: dict[str, str]
    replicated: Sequence[str] = ()


def clean_fqns(module: nn.Module) -> Callable[[str], str]:
    """Return the function that turns the name of a part of `module` into its FQN in the model without wrappers."""
    named = module.named_modules(remove_duplicate=False)
    compiled = {tuple(_without_wrapped(name)) for name, part in named if uncompiled(part) is not None}

    def clean(name: str) -> str:
        parts = _without_wrapped(name)
        # A module of the user's own may have torch.compile's name, too.
        is_added = [part == _COMPILED and tuple(parts[:at]) in compiled for at, part in enumerate(parts)]
        return ".".join(part for part, added in zip(parts, is_added, strict=True) if not added)

    return clean


def _without_wrapped(name: str) -> list[str]:
    """The parts of a name without those of wrappers, which names of parameters may lack (`checkpoint_wrapper`)."""
    return [part for part in name.split(".") if part and part not in _WRAPPED]


def shards_of(module: nn.Module | ShardedModel, ranks: Communicator) -> ModuleShards:
    """Return this rank's shards of a module. One of the ranks that hold a parameter writes it.

    Parameters gathered for a forward pass are released first.

    Args:
        module: The module in training: inside DistributedDataParallel, FullyShardedDataParallel or torch.compile, with
            DTensor parameters, or a result of `shard`.
        ranks: All ranks that hold parts of it, each with the same parameters.

    Returns:
        Views of the parameters and buffers; writing into them changes the module, except for buffers that are not
        contiguous in memory (`fill_copied_buffers`).

    Raises:
        ModelError: A parameter or buffer has no values (on meta, of a lazy module); a parameter is quantized, is not
            contiguous in memory, or is kept in a way that does not say which part a rank has; or elements of a buffer
            share memory.
    """
    if not isinstance(module, nn.Module) and not isinstance(getattr(module, "module", None), nn.Module):
        raise ModelError(f"{module!r} is neither a torch.nn.Module nor a result of `shard`.")
    inside = without_wrappers(bare_module(module), DistributedDataParallel)
    _reshard(inside)
    flat, clean_fqn = _flat_shards(inside), clean_fqns(inside)
    # Both are slow, and layers have the same parameters.
    box, is_first = cache(local_shape_and_offset), cache(is_first_copy)
    names: dict[int, str] = {}
    shards: dict[str, LocalShard] = {}
    aliases: dict[str, str] = {}
    replicated: list[str] = []
    for number, (raw, param) in enumerate(inside.named_parameters(remove_duplicate=False)):
        name = clean_fqn(raw)
        if (kept := names.setdefault(id(param), name)) != name:
            aliases[name] = kept
            continue
        _refuse_unfilled(name, param, inside)
        if (found := flat.get(id(param))) is not None:
            shards[name] = found
        elif isinstance(param, DTensor):
            _refuse_partial(name, param)
            shards[name] = shard_of(param, writes=is_first(param.device_mesh, param.placements), box=box)
        else:
            _refuse_quantized(name, param)
            _refuse_strided(name, param)
            replicated.append(name)
            shards[name] = shard_of(param, writes=number % ranks.world_size == ranks.rank)  # the ranks divide the work
    for _, _, raw, buffer in persistent_buffers(inside):
        _refuse_unfilled(clean_fqn(raw), buffer, inside)
        if isinstance(buffer, DTensor):
            shards[clean_fqn(raw)] = shard_of(buffer, writes=is_first(buffer.device_mesh, buffer.placements))
        else:
            _refuse_expanded(clean_fqn(raw), buffer)
            whole = (0, tuple(buffer.shape))
            shards[clean_fqn(raw)] = LocalShard(buffer, buffer.detach().reshape(-1), *whole, writes=ranks.is_main)
    return ModuleShards(shards, aliases, replicated)


def free_gathered(module: nn.Module) -> None:
    """Free parameters that FSDP keeps gathered after a forward pass, which a change to shards would not update.

    Otherwise, FSDP1 would also keep an unused module in memory.
    """
    _reshard(module)
    free_flat_parameters(module)


def free_after_passes_without_gradients(module: nn.Module) -> None:
    """Free gathered parameters after each forward pass without gradients, from which no backward pass follows.

    torch keeps the root gathered: `parameters()` would yield gathered parameters, which have no gradients, and the next
    pass would not see what an optimizer or a copy had changed since.
    """

    def free(root: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():
            free_gathered(root)

    module.register_forward_hook(free)


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def bare_module(module: nn.Module | ShardedModel) -> nn.Module:
    """The module itself, also for a result of `shard`."""
    return module if isinstance(module, nn.Module) else module.module


def transformers_model(module: nn.Module | ShardedModel) -> PreTrainedModel | None:
    """Return the transformers model that `module` is or wraps, if any."""
    inside = _inside(bare_module(module))
    return inside if isinstance(inside, PreTrainedModel) else None


def modules_with_extra_state(module: nn.Module | ShardedModel) -> dict[str, nn.Module]:
    """The submodules of `module` that define `get_extra_state()`, by their FQN without wrappers."""
    inside, base = _inside(bare_module(module)), nn.Module.get_extra_state
    clean_fqn, parts = clean_fqns(inside), inside.named_modules()
    return {clean_fqn(raw): part for raw, part in parts if type(part).get_extra_state is not base}


def fill_copied_buffers(found: ModuleShards) -> None:
    """Copy values read into shards back to buffers that are not contiguous in memory, whose shards are copies."""
    with torch.no_grad():
        for shard in found.shards.values():
            if not isinstance(shard.tensor, DTensor) and not shard.tensor.is_contiguous():
                shard.tensor.copy_(shard.data.view(shard.shape))


def _inside(module: nn.Module) -> nn.Module:
    """The module without wrappers around the whole of it."""
    return without_wrappers(module, DistributedDataParallel, fsdp.FullyShardedDataParallel)


def without_wrappers(module: nn.Module, *wrappers: type[nn.Module]) -> nn.Module:
    """The module without torch.compile and without `wrappers` around the whole of it, in any order."""
    while True:
        if isinstance(module, wrappers):
            module = cast(nn.Module, module.module)
        elif (compiled := uncompiled(module)) is not None:
            module = compiled
        else:
            return module


def _flat_shards(module: nn.Module) -> dict[int, LocalShard]:
    """The shards of FSDP1 parameters, by parameter id."""
    if hides_originals(module):
        raise ModelError(
            f"{type(_inside(module)).__name__} is in FullyShardedDataParallel(use_orig_params=False), which hides its "
            f"parameters; wrap it with use_orig_params=True."
        )
    restore_frozen_parameters(module)
    return {
        id(param): LocalShard(param, data, start, shape, writes=0 in ranks)
        for param, data, start, shape, ranks in flat_parameter_shards(module)
    }


def _refuse_unfilled(name: str, tensor: torch.Tensor, module: nn.Module) -> None:
    if is_lazy(tensor):
        raise ModelError(
            f"{name} of {type(module).__name__} has no shape and no values until the first forward pass of its lazy "
            f"module; run one before the model is saved or restored."
        )
    if tensor.is_meta:
        raise ModelError(
            f"{name} of {type(module).__name__} is on the meta device and has no values; give it memory (`to_empty`) "
            f"and fill it before it is saved or restored."
        )


def _refuse_quantized(name: str, param: nn.Parameter) -> None:
    """Reject a parameter whose elements are not all of its value: those of bitsandbytes and torchao."""
    if getattr(param, "quant_state", None) is not None or hasattr(param, "__tensor_flatten__"):
        raise ModelError(
            f"{name} is a {type(param).__name__}, a quantized weight, of which only the packed numbers would be saved "
            f"or filled; give the modules that are trained over it, such as an adapter's, or weights that are whole."
        )


def _refuse_strided(name: str, param: nn.Parameter) -> None:
    if not param.is_contiguous():
        raise ModelError(
            f"{name} of shape {list(param.shape)} is not contiguous in memory (strides {list(param.stride())}), as of "
            f"channels_last or transposed weights, so that it cannot be saved or filled; make it so by "
            f"`param.data = param.data.contiguous()`."
        )


def _refuse_expanded(name: str, buffer: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
        raise ModelError(
            f"{name} of shape {list(buffer.shape)} is a buffer whose elements share memory (strides "
            f"{list(buffer.stride())}), as of `expand`, so that it cannot be filled; register `buffer.clone()`, or "
            f"make it persistent=False."
        )


def _refuse_partial(name: str, param: DTensor) -> None:
    if any(placement.is_partial() for placement in param.placements):
        raise ModelError(f"{name} is a DTensor with partial sums ({param.placements}), which have no single value.")
