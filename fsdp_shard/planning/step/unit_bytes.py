"""Bytes of each unit on a rank, with the wrapper's padding of shards."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_shard.sharding import ShardConfig, Unit, flat_spans, itemsize, padded_shape, unused_by_text


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of one unit on one rank, including the padding that makes shards even.

    Attributes:
        fqn: FQN of the module; "" for the root.
        num_shards: Number of ranks that the unit is gathered from.
        cast: The shard in the unit's compute dtype; 0 if that is the stored dtype.
        largest_cast: The same for its largest parameter.
        gathered: The gathered parameters, in the compute dtype.
        gradients: The unsharded gradients that the backward pass produces.
        alignment: Those bytes of a flat gradient that are between parameters, or of parameters without a gradient.
        reduced_from: The input of the reduction: the unsharded gradients in its dtype.
        reduced: This rank's part of the reduction.
        kept: The same in the dtype of the parameters.
        stored: The shard in its stored dtype.
        undivided: Elements of the gradient of an embedding whose rows are divided over tensor-parallel ranks: torch
            computes it whole on each rank.
        others_rows: Those of them that belong to other ranks, if the gradient is kept whole until it is reduced.
        last: Elements of its last trained parameter, whose unsharded gradient a loop in torch holds a little longer.
        is_kept: Whether the unit stays gathered after the forward pass regardless of settings.
        is_scaled: Whether its gradient is divided by a number other than its number of ranks.
    """

    fqn: str
    num_shards: int
    cast: int = 0
    largest_cast: int = 0
    gathered: int = 0
    gradients: int = 0
    alignment: int = 0
    reduced_from: int = 0
    reduced: int = 0
    kept: int = 0
    stored: int = 0
    undivided: int = 0
    others_rows: int = 0
    last: int = 0
    is_kept: bool = False
    is_scaled: bool = False


def unit_bytes(
    model: PreTrainedModel,
    units: Sequence[Unit],
    shard: ShardConfig,
    num_shards: int,
    experts: Collection[str],
) -> tuple[list[UnitBytes], int]:
    """The bytes of each unit, and of all shards of a rank with padding.

    Args:
        model: The model on meta, in its stored dtypes.
        units: The units, the root last.
        shard: The shard settings.
        num_shards: Number of ranks that one replica is sharded over.
        experts: FQNs of the units of experts that were divided over ranks beforehand.
    """
    if not shard.is_sharded:
        held = sum(param.nbytes for param in model.parameters())
        return [UnitBytes(unit.fqn, num_shards=1) for unit in units], held
    head = model.get_output_embeddings()
    embeddings = {id(module.weight): module for module in model.modules() if isinstance(module, nn.Embedding)}
    found, held = [], 0
    for unit in units:
        params = [model.get_parameter(name) for name in unit.parameters]
        is_kept = not unit.fqn or model.get_submodule(unit.fqn) is head
        is_divided = unit.fqn in experts
        over = num_shards // shard.expert_parallel if is_divided else num_shards
        if shard.flattens_units:
            of_unit = _flat_bytes(unit, params, shard, over, is_kept, unused_by_text(model))
        else:
            of_unit = _rows_bytes(unit, params, shard, over, is_kept)
        if shard.tensor_parallel > 1:
            undivided, others_rows = zip(*(_undivided(param, embeddings, head) for param in params), strict=True)
            of_unit = replace(of_unit, undivided=sum(undivided), others_rows=sum(others_rows))
        found.append(replace(of_unit, is_scaled=is_divided))
        held += of_unit.stored
    return found, held


def _undivided(param: nn.Parameter, embeddings: Mapping[int, nn.Embedding], head: nn.Module | None) -> tuple[int, int]:
    """`undivided` and `others_rows` of a parameter; an embedding that is also the head keeps only its own rows."""
    embedding = embeddings.get(id(param))
    if embedding is None or not param.requires_grad:
        return 0, 0
    whole = embedding.num_embeddings * embedding.embedding_dim
    return whole, 0 if getattr(head, "weight", None) is param else whole - param.numel()


def _rows_bytes(
    unit: Unit, params: Sequence[nn.Parameter], shard: ShardConfig, num_shards: int, is_kept: bool
) -> UnitBytes:
    """Unit bytes under `fully_shard`: each parameter's rows are divided, and padded to the same number per rank."""
    compute, reduce = itemsize(unit.dtype), itemsize(shard.reduce_dtype)
    stored = cast = largest = gathered = gradients = reduced = kept = last = 0
    for param in params:
        padded = prod(padded_shape(tuple(param.shape), num_shards))
        stored += padded * param.element_size()
        if not param.ndim:
            continue
        is_cast = param.is_floating_point() and not unit.is_quantized
        wide = compute if is_cast else param.element_size()
        if is_cast and wide != param.element_size():
            cast += padded * wide
            largest = max(largest, padded * wide)
        gathered += padded * num_shards * wide
        if param.requires_grad:
            last = param.numel()
            gradients += last * wide
            reduced += padded * reduce
            kept += padded * param.element_size()
    return UnitBytes(
        unit.fqn,
        num_shards,
        cast=cast,
        largest_cast=largest,
        gathered=gathered,
        gradients=gradients,
        reduced_from=reduced * num_shards,
        reduced=reduced,
        kept=kept,
        stored=stored,
        last=last,
        is_kept=is_kept,
    )


def _flat_bytes(
    unit: Unit,
    params: Sequence[nn.Parameter],
    shard: ShardConfig,
    num_shards: int,
    is_kept: bool,
    unused: Collection[str],
) -> UnitBytes:
    """Unit bytes under FullyShardedDataParallel: one flat parameter, with a gradient for all if any part is trained.

    `unused` are the names of parameters that no pass over text uses.
    """
    compute, reduce = itemsize(unit.dtype), itemsize(shard.reduce_dtype)
    shapes = {name: tuple(param.shape) for name, param in zip(unit.parameters, params, strict=True)}
    _, end = flat_spans(shapes, unit.dtype)
    length = -(-end // num_shards)
    wide = params[0].element_size() if params else compute
    is_cast = wide != compute and not unit.is_quantized
    whole = length * num_shards
    used = [param for name, param in zip(unit.parameters, params, strict=True) if name not in unused]
    trained = bool(used) and any(param.requires_grad for param in params)
    cast = length * compute if is_cast else 0
    return UnitBytes(
        unit.fqn,
        num_shards,
        cast=cast,
        largest_cast=cast,
        gathered=whole * (compute if is_cast else wide) if is_cast or num_shards > 1 else 0,
        gradients=end * compute if trained else 0,
        alignment=(end - sum(param.numel() for param in used)) * compute if trained else 0,
        reduced_from=whole * reduce if trained else 0,
        reduced=length * reduce if trained else 0,
        kept=length * wide if trained else 0,
        stored=length * wide,
        is_kept=is_kept,
    )


def trained_dtype(model: nn.Module) -> torch.dtype:
    """The stored dtype of most trained parameters; float32 if there are none."""
    sizes: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.requires_grad:
            sizes[param.dtype] = sizes.get(param.dtype, 0) + param.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
