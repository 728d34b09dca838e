"""The tree of units as text: the bytes of each unit, gathered and on each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from torch import nn

from fsdp_shard.sharding.config import Shape, ShardConfig, Unit
from fsdp_shard.sharding.mesh import num_shards
from fsdp_shard.sharding.wrap_policy import plan_units
from fsdp_shard.utils import format_size, format_table

_HEAD = ("unit", "class", "units", "parameters", "gathered", "per rank")


@dataclass
class _Node:
    """A unit, its name in the unit around it, and the least and the largest fraction of it that a rank stores."""

    unit: Unit
    name: str
    held: tuple[float, float]
    inner: list[_Node] = field(default_factory=list)

    @property
    def key(self) -> object:
        """Equal for units that are joined in one line."""
        template = re.sub(r"\d+", "*", self.name)
        return template, self.unit.cls, self.unit.num_params, self.unit.dtype, self.held, [n.key for n in self.inner]


def unit_tree(model: nn.Module, shard: ShardConfig, num_ranks: int) -> list[str]:
    """The tree of units as a table; units that are alike and follow each other are one line.

    Args:
        model: The model before it is sharded; it may be on meta.
        shard: The shard settings.
        num_ranks: Number of ranks.

    Returns:
        The lines. *Gathered* are the bytes of a unit in the dtype that it computes in, *per rank* those that a rank
        stores, the least and the most where they differ.
    """
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    units = plan_units(model, shard)
    local = shard.local_shapes(shapes, units, num_shards(shard, num_ranks))
    return format_table([list(_HEAD), *_rows([_tree(units, shapes, local)], 0)])


def _tree(units: Sequence[Unit], shapes: Mapping[str, Shape], local: Sequence[Mapping[str, Shape]]) -> _Node:
    """The root, with all other units in it; `units` has inner ones before those around them."""
    nodes: list[_Node] = []
    for unit in units:
        elements = max(1, sum(prod(shapes[name]) for name in unit.parameters))
        held = [sum(prod(shard[name]) for name in unit.parameters) / elements for shard in local]
        inner = [node for node in nodes if not unit.fqn or node.name.startswith(unit.fqn + ".")]
        nodes = [node for node in nodes if node not in inner]
        for node in inner:
            node.name = node.name.removeprefix(unit.fqn + ".")
        nodes.append(_Node(unit, unit.fqn, (min(held), max(held)), inner))
    (root,) = nodes
    return root


def _rows(nodes: Sequence[_Node], depth: int) -> list[list[str]]:
    rows = []
    for _, run in groupby(nodes, key=lambda node: node.key):
        alike = list(run)
        unit, held = alike[0].unit, alike[0].held
        kept = dict.fromkeys(format_size(part * unit.num_bytes) for part in held)
        rows.append(
            [
                "  " * depth + (_folded(alike[0].name, alike[-1].name) or "(root)"),
                unit.cls,
                str(len(alike)),
                f"{unit.num_params:,}",
                format_size(unit.gathered_bytes),
                "-".join(kept),
            ]
        )
        rows += _rows(alike[0].inner, depth + 1)
    return rows


def _folded(first: str, last: str) -> str:
    """`layers.0` and `layers.29` as `layers.0-29`."""
    pairs = zip(first.split("."), last.split("."), strict=True)
    return ".".join(one if one == two else f"{one}-{two}" for one, two in pairs)
