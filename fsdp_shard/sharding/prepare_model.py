"""The steps common to all wrappers: check a model, plan its units, replace the forward of its blocks, and allocate
memory for parameters and buffers on meta, unfilled.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import no_split_blocks, rebuild_buffers
from fsdp_shard.sharding.activation_checkpointing import recompute_blocks, recomputed_fqns
from fsdp_shard.sharding.activations.activation_offload import offload_blocks
from fsdp_shard.sharding.config import ShardConfig, Unit
from fsdp_shard.sharding.context_parallel.attention import resolve_context_method, use_context_parallel
from fsdp_shard.sharding.wrap_policy import plan_units
from fsdp_shard.utils import give_back_free_memory, nearest, non_persistent_buffers, persistent_buffers

_LARGE_BYTES = 1 << 20
_TORCH_WRAPPERS = {
    DistributedDataParallel: "DistributedDataParallel",
    FullyShardedDataParallel: "FullyShardedDataParallel",
    FSDPModule: "fully_shard",
    nn.DataParallel: "DataParallel",
}


def prepare_model(model: nn.Module, shard: ShardConfig, context: DistributedContext) -> tuple[Unit, ...]:
    """Check `model`, replace the forward of its blocks according to the settings, and materialize its buffers.

    Returns:
        The units to shard.
    """
    refuse_wrapped(model)
    units = check_shardable(model, shard)
    _divide_sequences(model, shard, context)
    for param in model.parameters():
        if not param.numel():  # MobileBERT has one unless its embeddings are smaller
            param.requires_grad_(False)  # torch cannot reduce an empty gradient
    blocks = recompute_blocks(model, shard)
    if shard.compile is not False:
        # One graph serves all blocks of a kind, and parameters are gathered outside of it. Only the `forward` of a
        # block is replaced, so parameter names do not change.
        for block in blocks:
            block.forward = torch.compile(block.forward, backend="inductor" if shard.compile is True else shard.compile)
    if shard.activation_offload:
        offload_blocks(blocks, context.device, compiled=shard.compile is not False)
    for owner, name, _, buffer in persistent_buffers(model):
        if buffer.is_meta:
            setattr(owner, name, torch.empty_like(buffer, device=context.device))
    return units


def _divide_sequences(model: nn.Module, shard: ShardConfig, context: DistributedContext) -> None:
    if shard.context_parallel != context.num_context_ranks:
        raise ConfigError(
            f"context_parallel={shard.context_parallel}, but the process group was initialized with "
            f"context_parallel={context.num_context_ranks}; pass the same to both."
        )
    if shard.context_parallel > 1:
        assert isinstance(model, PreTrainedModel), "context_parallel is for finetune, whose models are transformers'"
        use_context_parallel(model, resolve_context_method(shard, model.config))


def complete_buffers(model: nn.Module, context: DistributedContext) -> None:
    """Compute the meta buffers that checkpoints do not store; raise ModelError if only the model's own code could."""
    if any(buffer.is_meta for module in model.modules() for _, buffer in non_persistent_buffers(module)):
        rebuild_buffers(model, context.device)


def refuse_wrapped(model: object) -> None:
    """Raise ConfigError if `model`, or a module in it, is wrapped or sharded already, or if it is no module."""
    if not isinstance(model, nn.Module):
        is_sharded = isinstance(getattr(model, "module", None), nn.Module)
        raise ConfigError(
            f"The model is {type(model).__name__}, {'a model that is sharded already' if is_sharded else 'no module'}; "
            f"pass the torch.nn.Module before any wrapper."
        )
    for name, module in model.named_modules():
        for kind, wrapper in _TORCH_WRAPPERS.items():
            if isinstance(module, kind):
                raise ConfigError(
                    f"{name or 'The model'} ({type(module).__name__}) is already under torch's {wrapper}, and two "
                    f"wrappers do not agree on who reduces gradients; shard the model before it is wrapped."
                )


def warn_of_batch_norms(model: nn.Module, context: DistributedContext) -> None:
    """Warn of layers that compute statistics over a rank's own samples."""
    found = [
        module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    ]
    kinds = sorted({type(module).__name__ for module in found})
    if kinds and context.world_size > 1:
        warnings.warn(
            f"{' and '.join(kinds)} of {type(model).__name__} keep the statistics of each rank's own samples, and a "
            f"checkpoint has those of rank 0. On GPUs, torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before "
            f"sharding makes them those of all.",
            stacklevel=3,
        )


def check_shardable(model: nn.Module, shard: ShardConfig) -> tuple[Unit, ...]:
    """Check that `model` can be sharded, compiled and checkpointed with these settings.

    Returns:
        The units to shard.

    Raises:
        ModelError: No blocks are found in the model.
        ConfigError: A setting cannot work for this model, or has no effect.
    """
    _check_backend(shard.compile)
    units = plan_units(model, shard)
    _check_recomputed(model, shard, units)
    shard.check_supported(model)
    return units


def _check_recomputed(model: nn.Module, shard: ShardConfig, units: Sequence[Unit]) -> None:
    kind = shard.activation_checkpointing
    if kind in (False, "none"):
        return
    repeated = [block.fqn for block in no_split_blocks(model, shard.blocks) if block.repeated]
    inside = [unit.fqn for unit in units if any(unit.fqn.startswith(f"{block}.") for block in repeated)]
    if kind == "selective" and inside:
        # Its parameters are gathered within the recomputed part, and torch treats that as a computation.
        raise ConfigError(
            f"shard.activation_checkpointing=selective cannot be combined with units inside of blocks, such as "
            f"{inside[0]} (from shard.norms_in_float32, shard.min_params or adapter.quantize); set it to true."
        )
    if not recomputed_fqns(repeated, kind):
        raise ConfigError(
            f"shard.activation_checkpointing={kind} has no effect, as {type(model).__name__} has "
            f"{len(repeated)} repeated blocks."
        )


def check_dtypes(model: nn.Module, shard: ShardConfig) -> None:
    """Raise ConfigError if units have parameters of different dtypes.

    Only the trained parameters of a unit need one dtype, but all of them if the wrapper flattens units.
    """
    params = dict(model.named_parameters())
    for unit in plan_units(model, shard):
        held = [params[name] for name in unit.parameters if shard.flattens_units or params[name].requires_grad]
        dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in held})
        if len(dtypes) > 1:
            raise ConfigError(
                f"shard={shard.wrapper} cannot shard {unit.fqn or 'the root'} ({unit.cls}), which has "
                f"parameters of {' and '.join(dtypes)}; set model.dtype=float32"
                f"{', or use shard=fsdp2' if shard.flattens_units else ''}."
            )


def _check_backend(backend: bool | str) -> None:
    if not isinstance(backend, bool) and backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise ConfigError(
            f"shard.compile={backend} is neither true, false nor a backend of torch.compile: "
            f"{', '.join(known)}{nearest(backend, known)}."
        )


def empty_parameters(device: torch.device) -> Callable[[nn.Module], None]:
    """Return a `param_init_fn` that allocates a module's own parameters, unfilled; tied ones stay tied."""
    # The meta parameter is kept alive, so ids stay unique; the real one is not, so a sharded unit can be freed.
    made: dict[int, tuple[nn.Parameter, weakref.ref[nn.Parameter]]] = {}

    def init(module: nn.Module) -> None:
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not param.is_meta:
                continue
            known = made[id(param)][1]() if id(param) in made else None
            if known is None:
                if device.type == "cpu" and param.nbytes >= _LARGE_BYTES:
                    give_back_free_memory()  # left when the previous unit was sharded
                known = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
                made[id(param)] = param, weakref.ref(known)
            setattr(module, name, known)

    return init
