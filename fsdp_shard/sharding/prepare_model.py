"""What all wrappers do with a model before they shard it: check it, plan its units, replace the forward of blocks."""

from collections.abc import Sequence

from torch import nn

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import no_split_blocks
from fsdp_shard.sharding.activation_checkpointing import recompute_blocks, recomputed_fqns
from fsdp_shard.sharding.compile import check_backend, compile_blocks
from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.sharding.materialize import materialize_buffers
from fsdp_shard.sharding.shard_sizes import Unit
from fsdp_shard.sharding.wrap_policy import plan_units


def prepare_model(model: nn.Module, shard: ShardConfig, context: DistributedContext) -> tuple[Unit, ...]:
    """Check `model`, replace the forward of its blocks as the settings say, and materialize its buffers.

    Returns:
        The units to shard.
    """
    check_shardable(model, shard)
    units = plan_units(model, shard)
    compile_blocks(recompute_blocks(model, shard), shard.compile)
    materialize_buffers(model, context.device)
    return units


def check_shardable(model: nn.Module, shard: ShardConfig) -> None:
    """Check that `model` can be sharded, compiled and checkpointed with these settings.

    Raises:
        ModelError: No blocks are found in the model.
        ConfigError: A setting cannot work for this model, or would do nothing.
    """
    check_backend(shard.compile)
    _check_recomputed(model, shard, plan_units(model, shard))
    shard.check_supported(model)


def _check_recomputed(model: nn.Module, shard: ShardConfig, units: Sequence[Unit]) -> None:
    kind = shard.activation_checkpointing
    if kind in (False, "none"):
        return
    repeated = [block.fqn for block in no_split_blocks(model, shard.blocks) if block.repeated]
    inside = [unit.fqn for unit in units if any(unit.fqn.startswith(f"{block}.") for block in repeated)]
    if kind == "selective" and inside:
        # Its parameters are gathered within what is computed again, and torch takes that for a computation.
        raise ConfigError(
            f"shard.activation_checkpointing=selective does not go together with units inside of blocks, such as "
            f"{inside[0]} (from shard.norms_in_float32, shard.min_params or adapter.quantize); set it to true."
        )
    if not recomputed_fqns(repeated, kind):
        raise ConfigError(
            f"shard.activation_checkpointing={kind} would do nothing, as {type(model).__name__} has "
            f"{len(repeated)} repeated blocks."
        )


def check_dtypes(model: nn.Module, shard: ShardConfig) -> None:
    """Raise ConfigError when parameters that the wrapper keeps together have several dtypes.

    Together are the trained parameters of a unit; the frozen ones too, where the wrapper flattens units.
    """
    shard.check_supported(model)
    params = dict(model.named_parameters())
    for unit in plan_units(model, shard):
        held = [params[name] for name in unit.parameters if shard.flattens_units or params[name].requires_grad]
        dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in held})
        if len(dtypes) > 1:
            raise ConfigError(
                f"shard={type(shard).__name__.removesuffix('Config').lower()} cannot shard {unit.fqn or 'the root'} "
                f"({unit.cls}), which has parameters of {' and '.join(dtypes)}; set model.dtype=float32"
                f"{', or use shard=fsdp2' if shard.flattens_units else ''}."
            )
