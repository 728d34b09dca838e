"""All private names of torch that the package uses; CONTRIBUTING.md lists where each would break.

Imported lazily through `utils`, so torch is loaded only if one of these is used.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

# Without them, operators cannot be observed, and models cannot run without memory: `plan` needs both.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    FakeTensorMode as FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.tensor import Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes,
)

# Without them, `plan` would find the tensors in few arguments of blocks.
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map as tree_map

# Without the private ones, selective checkpointing recomputes attention, 8-bit matrix products and collectives.
_COSTLY_OPERATORS = frozenset((
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_grouped_mm",
    "aten::convolution", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::fwd", "flash_attn_3::_flash_attn_forward", "flex_attention", "inductor_compiled_code",
    "_c10d_functional::all_reduce", "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_to_all_single",
))  # fmt: skip


@cache  # dispatch modes ask for each operator of a forward pass
def is_costly_operator(operator: Any) -> bool:
    """Whether an operator is a matrix product, attention or a collective: nearly all of a forward pass's time.

    Args:
        operator: The operator passed to a dispatch mode, such as `torch.ops.aten.mm.default`.
    """
    return str(operator.name()) in _COSTLY_OPERATORS


def fake_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return what an all-reduce of a fake tensor returns, by the operator that selective checkpointing looks for."""
    result: torch.Tensor = torch.ops._c10d_functional.all_reduce(tensor, "sum", "")
    return result


def fake_all_to_all(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return what an all-to-all of a fake tensor returns if this rank receives `num_rows`; see `fake_all_reduce`."""
    result: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(tensor, [num_rows], [len(tensor)], "")
    return result


def persistent_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Yield (owner, name in owner, FQN, buffer) of each buffer that checkpoints store; shared ones under each name.

    Without `_non_persistent_buffers_set`, this would need a state dict, which gathers a sharded model.
    """
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if name not in owner._non_persistent_buffers_set:
                yield owner, name, f"{prefix}.{name}" if prefix else name, buffer


def non_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of each buffer of `module` itself that checkpoints do not store."""
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name in module._non_persistent_buffers_set:
            yield name, buffer


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass in which this is called, as from a hook of a tensor.

    Without `_execution_engine`, the gradients of scalar parameters would be averaged one by one, in the order of each
    rank's own pass. FSDP itself ends its backward passes so.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def uncompiled(module: nn.Module) -> nn.Module | None:
    """The module inside a module returned by `torch.compile`, or None.

    Without `_dynamo` (OptimizedModule) and `_orig_mod`, a compiled model would be saved without its config, or under
    torch's names for what is in it. `torch.compile` imports `_dynamo`, which takes a second.
    """
    compiled = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())
    return cast(nn.Module, module._orig_mod) if isinstance(module, compiled) else None


def view_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which `tensor` is a view, or itself. Without `_base`, offload would move views of parameters."""
    return tensor if tensor._base is None else tensor._base


def version(tensor: torch.Tensor) -> int:
    """The number of in-place changes to the memory of `tensor`.

    Without `_version`, offload would copy each view separately, and a background save would copy changed weights.
    """
    return int(tensor._version)


def local_shape_and_offset(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of this rank's part of a DTensor with `shape`.

    Without it, the part that each rank holds under tensor parallelism would be unknown for checkpoints.
    """
    return compute_local_shape_and_global_offset(shape, mesh, placements)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of a storage among live ones. Without `_cdata`, `plan` could not count each one only once."""
    return int(storage._cdata)


def int8_matmul(inputs: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`inputs` [rows, in] times the transpose of int8 `weight` [out, in], scaled by `scales` [out]; for CPUs.

    Without the operator, int8 weights would have to be cast before each product.
    """
    product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(inputs, weight, scales)
    return product


@contextmanager
def record_memory_history(path: Path) -> Iterator[None]:
    """Write a timeline of all GPU allocations within the block to the self-contained HTML page `path`.

    torch's guide to CUDA memory documents these private names. Without them, `train.profile` has no memory timeline;
    the public export is a pickle.
    """
    from torch.cuda import _memory_viz

    torch.cuda.memory._record_memory_history()
    try:
        yield
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    path.write_text(_memory_viz.trace_plot(snapshot), encoding="utf-8")


def hybrid_shard_grad_op() -> ShardingStrategy:
    """FSDP1's strategy for `shard.replicas` with `reshard_after_forward=false`, which has no public name."""
    return ShardingStrategy._HYBRID_SHARD_ZERO2


def keep_batch_norms_wrapped(precision: MixedPrecision) -> None:
    """Keep FSDP1 from moving batch norms out of their unit, as it does to keep them in full precision."""
    precision._module_classes_to_ignore = ()


def flat_parameter_shards(
    module: nn.Module,
) -> Iterator[tuple[nn.Parameter, torch.Tensor, int, tuple[int, ...], list[int]]]:
    """Yield (original parameter, this rank's elements, offset of the first one, full shape, ranks that divide it).

    Covers all parameters of `module` under FSDP1. torch's only public access to a rank's part of a parameter is a
    sharded state dict, which gathers every unit first. The flat parameter records the offset of each original one. The
    names have been stable since torch 2.0.
    """
    for handle in _flat_handles(module):
        flat, divided = handle.flat_param, handle.uses_sharded_strategy
        ranks = dist.get_process_group_ranks(handle.process_group)
        for param, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
            if not divided:
                whole = param.detach().view(-1)
                yield param, whole, 0, tuple(shape), [dist.get_rank()]
            elif info.in_shard:
                data = flat.detach()[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                yield param, data, info.intra_param_start_idx, tuple(shape), ranks
            else:
                yield param, flat.detach()[:0], prod(shape), tuple(shape), ranks


def pin_flat_parameters(module: nn.Module) -> None:
    """Move the shards of a module under FSDP1 with CPU offload into pinned memory, where they stay.

    Otherwise, the first forward pass copies them: holders of earlier `flat_parameter_shards`, such as optimizers and
    averages, would keep memory that is no longer read or written. Pinned shards are not copied.
    """
    for handle in _flat_handles(module):
        handle.flat_param.data = handle.flat_param.data.pin_memory()
        handle.flat_param_to("cpu")  # already there: this makes the original parameters views of it again


def hides_originals(module: nn.Module) -> bool:
    """Whether a part of `module` is under FSDP1 with `use_orig_params=False`, and so has only flat parameters."""
    return any(handle.flat_param._params is None for handle in _flat_handles(module))


def restore_frozen_parameters(module: nn.Module) -> None:
    """Register frozen parameters again, which FSDP1 drops after a backward pass on one rank.

    FSDP1 assumes that parameters that are not divided are already registered. If any of them are tied, the next forward
    pass would fail with an assertion in torch.
    """
    for handle in _flat_handles(module):
        if handle.uses_sharded_strategy or handle.flat_param.requires_grad:
            continue
        first = handle.flat_param._param_infos[0]
        if not isinstance(getattr(first.module, first.param_name), nn.Parameter):
            handle._use_unsharded_views(as_params=True)


def free_flat_parameters(module: nn.Module) -> None:
    """Free parameters that FSDP1 keeps gathered after a forward pass, so that the next one gathers the shards again.

    FSDP1 keeps the root's parameters, and without resharding all parameters, until a backward pass, and would miss
    values written into the shards before it. On one rank, and if no backward pass follows, it also keeps views of a
    flat parameter and its gradient. The views own the flat parameter invisibly to Python, so it would never be freed.
    """
    for handle in _flat_handles(module):
        has_run = getattr(handle.flat_param, "_full_param_padded", None) is not None
        if has_run and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(free_unsharded_flat_param=True)
        if (views := handle.flat_param._tensors) is not None:
            handle.flat_param._tensors = [None] * len(views)
        handle._reset_flat_param_grad_info_if_needed()


def _flat_handles(module: nn.Module) -> Iterator[Any]:
    return (unit._handle for unit in FullyShardedDataParallel.fsdp_modules(module) if unit._handle is not None)


def fake_store() -> dist.Store:
    """Return the store for a process group with the `fake` backend, which this registers with torch.

    Without it, a single rank of a run could not be planned: each collective would wait for the other ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def clear_sharding_caches() -> None:
    """Delete this thread's caches of DTensor's shardings, which refer to meshes and so to their process groups.

    A group would live as long as the thread. In a process forked by another thread, Python deletes this thread's
    objects, and the group's destructor would join threads that are only in the parent.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def initialize_fsdp2(module: nn.Module) -> None:
    """Perform the initialization of the first forward pass of a module under `fully_shard`.

    It pads uneven shards, and recognizes padded ones by their memory address, which fake tensors lack. Without it,
    references to the shards from before the first forward pass would keep the old memory.
    """
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]  # torch sets it on the function
    state._lazy_init()


def reshard_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module that `fully_shard` has just wrapped reshard its parameters over `mesh` after the forward pass.

    Given a number of ranks, `fully_shard` creates a separate mesh for each module: two process groups, which use GPU
    memory and have torch's own timeout.

    Args:
        module: Wrapped with `reshard_after_forward=True`.
        mesh: All ranks of its mesh, as [replicate, shard] with neighbors in the second dimension.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]  # torch sets it on the function
        if (group := state._fsdp_param_group) is None:  # all of its parameters are ignored
            return
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        for param in group.fsdp_params:
            assert param.post_forward_mesh_info is group.post_forward_mesh_info is group.mesh_info
            param.post_forward_mesh_info = info
            param._init_sharded_post_forward_param_metadata(torch.empty(param._orig_size, device="meta"))
        group.post_forward_mesh_info = info
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"torch {torch.__version__} has not what shard.reshard_after_forward=N needs") from error


def without_fakes() -> AbstractContextManager[object]:
    """Deactivate fake tensor modes within the block. Without it, meshes could not read their ranks."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    found: AbstractContextManager[object] = unset_fake_temporarily()
    return found


def changed_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The values of the arguments that an operator declares to change in place.

    Without it, selective checkpointing would recompute from changed results, and nobody would notice; a trace would not
    know the values that routers of experts compute.

    Args:
        operator: The operator passed to a dispatch mode; those of higher order declare none.
        args: Its arguments.
        kwargs: Those given by name.
    """
    if not (changed := _changed_by(operator)):
        return []
    values = (args[number] if number < len(args) else kwargs.get(name) for number, name in changed)
    return [value for value in values if value is not None]


@cache
def _changed_by(operator: Any) -> tuple[tuple[int, str], ...]:
    """The number and the name of each argument that an operator declares to change."""
    arguments = enumerate(getattr(getattr(operator, "_schema", None), "arguments", ()))
    return tuple((number, each.name) for number, each in arguments if each.alias_info and each.alias_info.is_write)


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Suspend all dispatch modes, so that none of them sees the operators of the block."""
    return _disable_current_modes()


def is_faking() -> bool:
    """Whether a fake tensor mode is active. Without it, DTensor's shape computations would be counted."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def in_backward() -> bool:
    """Whether a backward pass runs on this thread. Without it, operators of backward passes could not be recognized."""
    return torch._C._current_graph_task_id() != -1


def num_storage_users(tensor: torch.Tensor) -> int:
    """Return how many tensors use the memory of `tensor`, including itself."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # `storage` is a user, too
