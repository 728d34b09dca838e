"""Bytes of parameters and gradients that a rank holds unsharded for a while in a training step."""

from collections.abc import Sequence

from fsdp_shard.sharding import ShardConfig, Unit, itemsize


def unsharded_bytes(shard: ShardConfig, units: Sequence[Unit], *, accumulates: bool) -> int:
    """An upper bound on the bytes of gathered units and of gradients that are not reduced yet.

    Gathered are the root, the unit that computes and the prefetched ones, in the dtype that they compute in, and what
    all units keep after the forward pass. Gradients are those of the root and of one unit, and a copy of one of the two
    in the dtype of the reduction; those of all units, if they are reduced once per step only.

    Args:
        shard: The shard settings.
        units: All units of the model, the root last.
        accumulates: Whether a step has several micro-batches.

    Returns:
        The bytes; 0 where nothing is sharded, as everything is then counted as state of the rank.
    """
    if not shard.is_sharded:
        return 0
    *inner, root = (unit.gathered_bytes for unit in units)
    every, num_ahead = shard.reshard_after_forward, max(1, shard.prefetch_forward or 0, shard.prefetch_backward or 0)
    gathered = root + (sum(inner) if every is False else sum(sorted(inner)[-1 - num_ahead :]))
    if type(every) is int:
        gathered += sum(inner) // every
    *trained, of_root = (unit.num_trained * itemsize(unit.dtype) for unit in units)
    reduce = itemsize(shard.reduce_dtype)
    gradients = of_root + max(trained, default=0) + reduce * max(unit.num_trained for unit in units)
    if accumulates and not shard.sync_every_micro_batch:
        gradients += sum(unit.num_trained for unit in units) * reduce
    return gathered + gradients
