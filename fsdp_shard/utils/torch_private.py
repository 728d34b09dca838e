"""All private names of torch that the package uses; CONTRIBUTING.md says where each would break.

Imported through the lazy door of `utils`, so that torch is loaded only where one of these is used.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Without them operators cannot be seen and models not be run without memory: `plan` needs both.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    FakeTensorMode as FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.tensor import Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Without them `plan` would know the tensors of few arguments of blocks.
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map as tree_map

# Without the private ones, selective checkpointing recomputes attention, products in 8 bits and collectives.
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


def is_costly_operator(operator: Any) -> bool:
    """Whether it is a matrix product, attention, or a collective: they take nearly all of the time of a forward pass.

    Args:
        operator: What a dispatch mode is called with, such as `torch.ops.aten.mm.default`.
    """
    return str(operator.name()) in _COSTLY_OPERATORS


def persistent_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """(owner, name in the owner, FQN, buffer) of each buffer that a checkpoint has; shared ones under every name.

    Without `_non_persistent_buffers_set`, one would have to ask for a state dict, which gathers a sharded model.
    """
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if name not in owner._non_persistent_buffers_set:
                yield owner, name, f"{prefix}.{name}" if prefix else name, buffer


def non_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of each buffer of `module` itself that no checkpoint has."""
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name in module._non_persistent_buffers_set:
            yield name, buffer


def uncompiled(module: nn.Module) -> nn.Module | None:
    """The module in a module that `torch.compile` has returned, or None.

    Without `_orig_mod`, a compiled model would be saved without its config.
    """
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def view_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that `tensor` is a view of, or itself. Without `_base`, offload would move views of parameters."""
    return tensor if tensor._base is None else tensor._base


def version(tensor: torch.Tensor) -> int:
    """How often the memory of `tensor` was changed in place.

    Without `_version`, offload would copy views once each, and a save in the background weights that have changed.
    """
    return int(tensor._version)


def local_shape_and_offset(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of this rank's part of a DTensor of `shape`.

    Without it, checkpoints of models under tensor parallelism would not know which part each rank has.
    """
    return compute_local_shape_and_global_offset(shape, mesh, placements)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of a storage among all that are alive. Without `_cdata`, `plan` could not count each one once."""
    return int(storage._cdata)


def int8_matmul(inputs: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`inputs` [rows, in] times the transpose of int8 `weight` [out, in], scaled by `scales` [out]; for CPUs.

    Without the operator, int8 weights would have to be cast before each product.
    """
    product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(inputs, weight, scales)
    return product


@contextmanager
def record_memory_history(path: Path) -> Iterator[None]:
    """Write a timeline of all allocations of the GPU inside to the HTML page `path`, with its data.

    The guide to CUDA memory documents these private names. Without them, `train.profile` has no picture of memory; the
    public export is a pickle.
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
    """FSDP1's strategy of `shard.replicas` with `reshard_after_forward=false`, which has no public name."""
    return ShardingStrategy._HYBRID_SHARD_ZERO2


def keep_batch_norms_wrapped(precision: MixedPrecision) -> None:
    """Keep FSDP1 from taking batch norms out of their unit, which it does to keep them in full precision."""
    precision._module_classes_to_ignore = ()


def flat_parameter_shards(
    module: nn.Module,
) -> Iterator[tuple[nn.Parameter, torch.Tensor, int, tuple[int, ...], list[int]]]:
    """(original parameter, this rank's elements of it, the first one's offset, full shape, ranks that divide it).

    Of all parameters of `module` under FSDP1. torch gives no public way to a rank's part of a parameter short of a
    sharded state dict, which gathers every unit first. The flat parameter records the offset of each original one. The
    names are the same since torch 2.0.
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
    """Move the shards of a module under FSDP1 with CPU offload into page-locked memory, where they stay.

    The first forward pass does so else, by a copy: whoever has taken `flat_parameter_shards` before, as optimizers and
    averages do, would go on with memory that nothing reads or writes any more. What is page-locked is not copied.
    """
    for handle in _flat_handles(module):
        handle.flat_param.data = handle.flat_param.data.pin_memory()
        handle.flat_param_to("cpu")  # where it is: this makes the original parameters views of it again


def hides_originals(module: nn.Module) -> bool:
    """Whether a part of `module` is under FSDP1 with `use_orig_params=False`, and so has flat parameters only."""
    return any(handle.flat_param._params is None for handle in _flat_handles(module))


def restore_frozen_parameters(module: nn.Module) -> None:
    """Register frozen parameters again, which FSDP1 leaves out after a backward pass on one rank.

    It assumes that what is not divided is registered already. If any of them are tied, the next forward pass would
    end with an assertion of torch's.
    """
    for handle in _flat_handles(module):
        if handle.uses_sharded_strategy or handle.flat_param.requires_grad:
            continue
        first = handle.flat_param._param_infos[0]
        if not isinstance(getattr(first.module, first.param_name), nn.Parameter):
            handle._use_unsharded_views(as_params=True)


def free_flat_parameters(module: nn.Module) -> None:
    """Free what FSDP1 keeps gathered after a forward pass, so that the next one gathers the shards again.

    Of the root, and without resharding of all, it keeps the parameters until a backward pass: what is written into the
    shards before that would be overlooked. On one rank, and where no backward pass follows, it also keeps views of a
    flat parameter, which own it by a way that Python cannot see, so that it would never be freed; and its gradient.
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
    """The store of a process group with the backend `fake`, which this makes known to torch.

    Without it, one rank of a run could not be planned alone: each collective would wait for the others.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def initialize_fsdp2(module: nn.Module) -> None:
    """Do what the first forward pass of a module under `fully_shard` does before anything else.

    It pads uneven shards, and finds that this is done by the address of their memory, which fake tensors do not have;
    without it, what was taken of the shards before the first forward pass would keep the memory of before.
    """
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]  # torch sets it on the function
    state._lazy_init()


def reshard_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a module that `fully_shard` has just wrapped divide its parameters over `mesh` after the forward pass.

    Asked for a number of ranks, `fully_shard` makes a mesh of its own for each module: two process groups, which take
    memory of the GPU and have torch's own timeout.

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
    """Within the block no mode of fake tensors is active. Without it, meshes would not know which rank is where."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    found: AbstractContextManager[object] = unset_fake_temporarily()
    return found


def changes_arguments(operator: Any) -> bool:
    """Whether an operator changes arguments in place, as far as it says. Without it, all values would be unknown."""
    return bool(operator._schema.is_mutable)


def is_faking() -> bool:
    """Whether a mode of fake tensors is active. Without it, DTensor's computing of shapes would count."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def in_backward() -> bool:
    """Whether a backward pass runs on this thread. Without it, operators of backward passes could not be recognized."""
    return torch._C._current_graph_task_id() != -1


def num_storage_users(tensor: torch.Tensor) -> int:
    """Return how many tensors use the memory of `tensor`, itself included."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # `storage` is a user, too
