"""Plans which modules become separate units of sharding, from the model's structure alone.

The parameters of a unit are gathered together. Parameters outside of all units belong to the root. The wrappers apply
the plan, and `unit_tree` shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from torch import nn

from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import Block, no_split_blocks, quantized_weights, tied_names, weights_per_parameter
from fsdp_shard.sharding.config import Shape, ShardConfig, Unit, itemsize
from fsdp_shard.sharding.forward_trace import trace_forward
from fsdp_shard.sharding.rank_counts import num_shards
from fsdp_shard.sharding.routed_lists import is_within, routed_lists, skippable_modules
from fsdp_shard.utils import format_size, format_table

# A block outside of the layers (an embedding, a head) is a unit from this size; a final norm with its few kilobytes is
# not worth a collective and stays in the root.
_OWN_UNIT_BYTES = 4 * 2**20

_COLUMNS = ("unit", "class", "units", "parameters", "gathered", "per rank")


def plan_units(model: nn.Module, settings: ShardConfig) -> tuple[Unit, ...]:
    """Return the units of `model`: its blocks or every large enough module, except norms and quantized weights.

    Parameters tied across units must be gathered at the same time, so modules that share them are never units: the
    input embedding of a model with a tied head is in the root, which is gathered when the head runs. Modules that a run
    of the model on meta does not call, or whose parameters are used from elsewhere, are not units either; they are
    gathered with the unit around them.

    Args:
        model: The model, which may be on meta.
        settings: `blocks` or `min_params` choose the units, `norms_in_float32` makes one of each norm, and a
            `quantized_dtype` other than uint8 one of each quantized weight, which would be cast with the others.

    Returns:
        The units in module order, but inner units before outer ones, and the root last.

    Raises:
        ModelError: No blocks are found in the model.
        ConfigError: Units of norms are requested, but the model has no norms.
    """
    try:
        blocks = no_split_blocks(model, settings.blocks)
    except ModelError:
        if settings.min_params is None:  # units by size need no blocks
            raise
        blocks = []
    can_gather = _gathers_when_called(model, blocks) if settings.is_sharded else lambda fqn: True
    if settings.min_params is None:
        chosen = {block.fqn for block in blocks if _stands_alone(block) and can_gather(block.fqn)}
    else:
        chosen = _large_modules(model, settings.min_params, can_gather)
    norms = set(_norms(model)) if settings.norms_in_float32 else set()
    if settings.norms_in_float32 and not norms:
        raise ConfigError(f"shard.norms_in_float32=true: {type(model).__name__} has no norm layer with parameters.")
    quantized = set() if settings.quantized_dtype == "uint8" else {fqn for fqn, _ in quantized_weights(model)}
    fqns = _without_ties(model, chosen | norms | quantized)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {fqn: [] for fqn in [*_inner_first(model, fqns), ""]}
    for name, param in model.named_parameters():
        members[_unit_of(name, fqns)].append((name, param))
    counted = weights_per_parameter(model)
    dtypes = dict.fromkeys(norms, "float32") | dict.fromkeys(quantized, settings.quantized_dtype)
    units = []
    for fqn, held in members.items():
        dtype = dtypes.get(fqn, settings.param_dtype)
        units.append(
            Unit(
                fqn=fqn,
                cls=type(model.get_submodule(fqn)).__name__,
                parameters=tuple(name for name, _ in held),
                num_params=sum(counted[name] for name, _ in held),
                num_bytes=sum(param.nbytes for _, param in held),
                dtype=dtype,
                num_trained=sum(param.numel() for _, param in held if param.requires_grad),
                gathered_bytes=sum(param.numel() * _gathered_itemsize(param, dtype) for _, param in held),
                is_quantized=fqn in quantized,
            )
        )
    return tuple(units)


def _gathered_itemsize(param: nn.Parameter, dtype: str) -> int:
    """Bytes per element: floating-point parameters are gathered in the unit's dtype, others as stored."""
    return itemsize(dtype) if param.is_floating_point() else param.element_size()


def _stands_alone(block: Block) -> bool:
    return not block.direct and bool(block.fqn) and (block.repeated or block.num_bytes >= _OWN_UNIT_BYTES)


def _gathers_when_called(model: nn.Module, blocks: Sequence[Block]) -> Callable[[str], bool]:
    """Return a function that determines whether the module with an FQN can gather its parameters when called.

    Modules that were not called, such as the image encoder of a model that ran on text, count as separable if they are
    layers. So do modules that no run reached, except lists that may be called or iterated over.
    """
    trace, layers = trace_forward(model), {block.fqn for block in blocks if block.repeated}
    routed = tuple(f"{fqn}." for fqn, _ in routed_lists(model))
    may_run = {fqn for fqn in skippable_modules(model) if fqn not in layers and is_within(fqn, layers)}

    def can_gather(fqn: str) -> bool:
        module = model.get_submodule(fqn)
        if type(module).forward is nn.Module.forward or fqn in trace.outside:  # lists have no forward pass
            return False
        if fqn.startswith(routed) or is_within(fqn, may_run):  # runs only on some ranks
            return False
        return fqn in trace.called or fqn in layers or not (trace.is_complete or isinstance(module, nn.Sequential))

    return can_gather


def _large_modules(model: nn.Module, min_params: int, can_gather: Callable[[str], bool]) -> set[str]:
    """Return the FQNs of the modules with at least `min_params` parameters outside of such modules inside them."""
    counted: set[int] = set()
    found: set[str] = set()

    def count(module: nn.Module, fqn: str) -> int:
        """Add the large modules in `module` to `found`; return the number of its parameters outside of them."""
        if id(module) in counted:  # one module under two names
            return 0
        counted.add(id(module))
        params = list(module.parameters(recurse=_reads_its_children(module)))
        own = sum(param.numel() for param in params if id(param) not in counted)
        counted.update(map(id, params))
        children = [] if _reads_its_children(module) else list(module.named_children())
        own += sum(count(child, f"{fqn}.{name}" if fqn else name) for name, child in children)
        if not fqn or own < min_params or not can_gather(fqn):
            return own
        found.add(fqn)
        return 0

    count(model, "")
    return found


def _norms(model: nn.Module) -> Iterator[str]:
    """Yield the FQNs of norm layers with their own parameters."""
    for fqn, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
        if fqn and is_norm and next(module.parameters(), None) is not None:
            yield fqn


def _inner_first(model: nn.Module, fqns: set[str]) -> list[str]:
    """Return `fqns` in module order, but each after those inside it."""
    order = [fqn for fqn, _ in model.named_modules(remove_duplicate=False) if fqn in fqns]
    done: list[str] = []
    around: list[str] = []
    for fqn in order:
        while around and not fqn.startswith(around[-1] + "."):
            done.append(around.pop())
        around.append(fqn)
    return done + around[::-1]


def _without_ties(model: nn.Module, fqns: set[str]) -> set[str]:
    """Return `fqns` without those that hold one name of a tied parameter whose other name is elsewhere."""
    left, ties = set(fqns), tied_names(model)
    while True:
        pairs = {(_unit_of(alias, left), _unit_of(kept, left)) for alias, kept in ties.items()}
        split = [(one, two) for one, two in pairs if one != two]
        if not split:
            return left
        for one, two in split:
            # A module around both names may stay; the root always does.
            left -= {fqn for fqn, other in ((one, two), (two, one)) if fqn and not other.startswith(fqn + ".")}


def _unit_of(parameter: str, fqns: Sequence[str] | set[str]) -> str:
    """The innermost of `fqns` that holds `parameter`, or the root."""
    while parameter:
        parameter = parameter.rpartition(".")[0]
        if parameter in fqns:
            return parameter
    return ""


@dataclass
class _Node:
    """A unit, its name in the outer unit, and the smallest and largest fraction of it that a rank stores."""

    unit: Unit
    name: str
    held: tuple[float, float]
    inner: list[_Node] = field(default_factory=list)

    @property
    def key(self) -> object:
        """A key that is equal for units shown in one line."""
        template = re.sub(r"\d+", "*", self.name)
        return template, self.unit.cls, self.unit.num_params, self.unit.dtype, self.held, [n.key for n in self.inner]


def unit_tree(model: nn.Module, shard: ShardConfig, num_ranks: int) -> list[str]:
    """Format the tree of units as a table; consecutive equal units share one line.

    Args:
        model: The model before sharding; it may be on meta.
        shard: The shard settings.
        num_ranks: Number of ranks.

    Returns:
        The lines. *Gathered* are the bytes of a unit in its computation dtype. *Per rank* are the bytes that a rank
        stores, with minimum and maximum if they differ.
    """
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    units = plan_units(model, shard)
    local = shard.local_shapes(shapes, units, num_shards(shard, num_ranks))
    return format_table([list(_COLUMNS), *_rows([_tree(units, shapes, local)], 0)])


def _tree(units: Sequence[Unit], shapes: Mapping[str, Shape], local: Sequence[Mapping[str, Shape]]) -> _Node:
    """Return the root with all other units in it; `units` lists inner ones before outer ones."""
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
                "  " * depth + (_fold_range(alike[0].name, alike[-1].name) or "(root)"),
                unit.cls,
                str(len(alike)),
                f"{unit.num_params:,}",
                format_size(unit.gathered_bytes),
                "-".join(kept),
            ]
        )
        rows += _rows(alike[0].inner, depth + 1)
    return rows


def _fold_range(first: str, last: str) -> str:
    """`layers.0` and `layers.29` as `layers.0-29`."""
    pairs = zip(first.split("."), last.split("."), strict=True)
    return ".".join(one if one == two else f"{one}-{two}" for one, two in pairs)


def _reads_its_children(module: nn.Module) -> bool:
    """Whether a module computes with parameters of its children, instead of calling these, which would gather them."""
    return isinstance(module, nn.MultiheadAttention) or is_param_wrapper(module)


def is_param_wrapper(module: nn.Module) -> bool:
    """Whether a module is peft's LoRA of single parameters, such as the stacked weights of experts."""
    return type(module).__name__ == "ParamWrapper"  # by name, as peft may not be installed
