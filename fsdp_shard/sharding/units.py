"""Which modules are sharded as a unit of their own: a plan, computed from the blocks alone.

The parameters of a unit are gathered together, so a unit is what a rank holds whole at one time. What is in no unit
belongs to the root. Knows no wrapper; the wrappers apply the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_shard.blocks import Block, no_split_blocks, tied_names

# A block beside the layers (an embedding, a head) gets a unit of its own from this size on; a final norm with its few
# kilobytes is not worth a collective and stays in the root.
_OWN_UNIT_BYTES = 4 * 2**20


def plan_units(model: nn.Module, names: Sequence[str] | None = None) -> list[str]:
    """FQNs of the modules that become units, in module order; see `no_split_blocks` for `names`.

    Parameters that are tied across blocks must be gathered at one time, so such blocks stay in the root, whichever
    they are: the input embedding of a model with a tied head is there when the head runs.
    """
    shared = _tied_across_blocks(model, blocks := no_split_blocks(model, names))
    return [block.fqn for block in blocks if block.fqn not in shared and _stands_alone(block)]


def _stands_alone(block: Block) -> bool:
    return not block.direct and bool(block.fqn) and (block.repeated or block.num_bytes >= _OWN_UNIT_BYTES)


def _tied_across_blocks(model: nn.Module, blocks: Sequence[Block]) -> set[str]:
    """FQNs of the blocks that share a parameter with another block."""
    pairs = [(_home(a, blocks), _home(b, blocks)) for a, b in tied_names(model).items()]
    return {fqn for pair in pairs if pair[0] != pair[1] for fqn in pair}


def _home(parameter: str, blocks: Sequence[Block]) -> str:
    """The FQN of the innermost block that holds `parameter`."""
    holders = [block.fqn for block in blocks if not block.fqn or parameter.startswith(block.fqn + ".")]
    return max(holders, key=len)
