"""The tree of units as text: what is gathered together, how large it is, and what each rank holds of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.sharding.shard_sizes import Shape
from fsdp_shard.sharding.wrap_policy import Unit
from fsdp_shard.utils import format_size

_HEAD = ("unit", "class", "units", "parameters", "gathered", "per rank")


@dataclass
class _Node:
    """A unit, its name below the unit around it, and what part of it the emptiest and the fullest rank hold."""

    unit: Unit
    name: str
    held: tuple[float, float]
    inner: list[_Node] = field(default_factory=list)

    @property
    def looks(self) -> object:
        """Equal for units that one line can stand for."""
        template = re.sub(r"\d+", "*", self.name)
        return template, self.unit.cls, self.unit.num_params, self.unit.dtype, self.held, [n.looks for n in self.inner]


def explain(units: Sequence[Unit], shapes: Mapping[str, Shape], shard: ShardConfig, num_ranks: int) -> list[str]:
    """Lines of a table: each unit below the one around it, in one line with those like it that follow.

    `shapes` are those of all parameters. *Gathered* is a unit in the dtype that it computes in, *per rank* what a rank
    keeps of it, the least and the most where they differ.
    """
    shares = shard.shares(shapes, units, shard.num_shards(num_ranks))
    rows = [list(_HEAD), *_rows([_tree(units, shapes, shares)], 0)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) if place > 1 else cell.ljust(width) for place, cell, width in line).rstrip()
        for line in (zip(range(len(widths)), row, widths, strict=True) for row in rows)
    ]


def _tree(units: Sequence[Unit], shapes: Mapping[str, Shape], shares: Sequence[Mapping[str, Shape]]) -> _Node:
    """The root, with all others in it; outer units come after those inside them."""
    nodes: list[_Node] = []
    for unit in units:
        elements = max(1, sum(prod(shapes[name]) for name in unit.parameters))
        held = [sum(prod(share[name]) for name in unit.parameters) / elements for share in shares]
        inner = [node for node in nodes if not unit.fqn or node.name.startswith(unit.fqn + ".")]
        nodes = [node for node in nodes if node not in inner]
        for node in inner:
            node.name = node.name.removeprefix(unit.fqn + ".")
        nodes.append(_Node(unit, unit.fqn, (min(held), max(held)), inner))
    (root,) = nodes
    return root


def _rows(nodes: Sequence[_Node], depth: int) -> list[list[str]]:
    rows = []
    for _, run in groupby(nodes, key=lambda node: node.looks):
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
