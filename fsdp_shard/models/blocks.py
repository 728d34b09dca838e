"""No-split blocks: the modules that stay whole when a model is sharded, recomputed, offloaded or budgeted.

Everything here is pure: it looks at modules, their names and their parameters' shapes, never at values, devices or
ranks, so it works on a model on the meta device. It knows no wrapper, no checkpoint and no device map.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from fsdp_shard.errors import ModelError
from fsdp_shard.utils import nearest

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Block:
    """One module that is never divided; `num_params` and `num_bytes` count a tied parameter once, in its first block.

    `repeated` tells a layer (decoder layer, residual block, recurrent cell) from what stands beside the layers
    (embedding, final norm, output head). A `direct` block has only the parameters that its module holds itself, not
    those of the modules in it, which are blocks of their own.
    """

    fqn: str
    cls: str
    num_params: int
    num_bytes: int
    repeated: bool
    direct: bool = False


def no_split_blocks(model: nn.Module, names: Sequence[str] | None = None) -> list[Block]:
    """The blocks of `model` in module order: disjoint, never nested, each parameter in exactly one of them.

    Repeated blocks are found by class name: `names` when given, else the model's own `_no_split_modules` as far as
    those are present (see `_own`), else by structure (see `_structural`). What holds parameters beside them is a block
    too.

    Raises ModelError when a class in `names` is not in the model, or nothing repeats; it lists the candidates.
    """
    layers = set(_layers(model, names))
    seen: set[int] = set()
    blocks = []
    for fqn, module, direct in _cover(model, "", layers):
        params = [p for p in module.parameters(recurse=not direct) if id(p) not in seen]
        seen.update(map(id, params))
        num_bytes = sum(p.numel() * p.element_size() for p in params)
        num_params = sum(p.numel() for p in params)
        blocks.append(Block(fqn, type(module).__name__, num_params, num_bytes, module in layers, direct))
    return blocks


def tied_names(model: nn.Module) -> dict[str, str]:
    """Each further name of a tied parameter -> the name it is kept under, which is its first in module order."""
    kept: dict[int, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if kept.setdefault(id(param), name) != name:
            aliases[name] = kept[id(param)]
    return aliases


def _layers(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    if names:
        found = {name: list(_outermost(model, {name})) for name in names}
        for name, modules in found.items():
            if not modules:
                known = _candidates(model)
                raise ModelError(
                    f"{type(model).__name__} has no module of class {name}{nearest(name, known)}; "
                    f"its modules that could be blocks are {', '.join(known)}."
                )
        return list(_outermost(model, set(names)))
    layers = _own(model) or list(_structural(model, _whole_classes(model)))
    if not layers:
        raise ModelError(
            f"No blocks were found in {type(model).__name__}: nothing in it repeats and it names none itself. "
            f"Name them with shard.blocks=[CLASS]; candidates are {', '.join(_candidates(model))}."
        )
    return layers


def _own(model: nn.Module) -> list[nn.Module]:
    """The modules that the model's own list names, but whole layers where it names only parts of them.

    A listed class that is always the only one of its kind in a module, which is no list, is such a part where a module
    around it is of a class that repeats: the shortcut of a residual block (ResNet), the attention of an encoder layer
    (Idefics). Then every module of the class around it stays whole. Where the list has only what stands beside the
    layers (BiT's embeddings), those are found by structure.
    """
    names = {str(name) for name in getattr(model, "_no_split_modules", None) or ()}
    listed = list(_outermost(model, names))
    if not listed:
        return []
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    repeated = _repeated_classes(model)
    own = {type(module) for module in listed if not _is_single(module, parents[module])}
    above = (_around(module, parents, repeated) for module in listed if type(module) not in own)
    around = {type(module).__name__ for module in above if module is not None}
    found = list(_outermost(model, names | around))
    if not own and not around:
        taken = {id(inner) for module in found for inner in module.modules()}
        structural = list(_structural(model, _whole_classes(model)))
        found += [block for block in structural if not any(id(inner) in taken for inner in block.modules())]
    return found


def _is_single(child: nn.Module, parent: nn.Module) -> bool:
    return not _is_container(parent) and sum(type(sibling) is type(child) for sibling in parent.children()) == 1


def _repeated_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of modules, other than lists, that repeat inside a list."""
    found: set[type[nn.Module]] = set()
    for parent in filter(_is_container, model.modules()):
        counts = Counter(map(type, parent.children()))
        found |= {type(m) for m in parent.children() if counts[type(m)] > 1 and any(m.children()) and _has_params(m)}
    return found - set(_CONTAINERS)


def _around(module: nn.Module, parents: dict[nn.Module, nn.Module], repeated: set[type[nn.Module]]) -> nn.Module | None:
    """The innermost module around `module` that is of a class which repeats."""
    while (parent := parents.get(module)) is not None:
        if type(parent) in repeated:
            return parent
        module = parent
    return None


def _outermost(module: nn.Module, classes: set[str]) -> Iterator[nn.Module]:
    """Modules of one of `classes` that hold parameters and are not inside another such module."""
    for child in module.children():
        if type(child).__name__ in classes and _has_params(child):
            yield child
        else:
            yield from _outermost(child, classes)


def _structural(module: nn.Module, whole: set[type[nn.Module]]) -> Iterator[nn.Module]:
    """Blocks of a model that names none: recurrent cells, and modules that repeat inside a list.

    A module that is nothing but a list of repeated modules (a stage of a ResNet) is looked into; one that has
    something beside its list (a residual block with its shortcut, a decoder layer) is whole, and so are all of its
    class (`whole`): those whose shortcut is the identity, and one that is alone in its list.
    """
    for child in module.children():
        is_alike = type(child) in whole and _is_container(module) and _has_params(child)
        if isinstance(child, (nn.RNNBase, nn.RNNCellBase)) or is_alike or _is_layer(child, module):
            yield child
        else:
            yield from _structural(child, whole)


def _whole_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of which some module repeats and is more than a list."""
    found = {type(child) for parent in model.modules() for child in parent.children() if _is_layer(child, parent)}
    return found - set(_CONTAINERS)


def _is_layer(child: nn.Module, parent: nn.Module) -> bool:
    return _is_repeated(child, parent) and not _is_stage(child)


def _is_repeated(child: nn.Module, parent: nn.Module) -> bool:
    if not _is_container(parent) or not any(child.children()):
        return False
    return _has_params(child) and sum(type(sibling) is type(child) for sibling in parent.children()) > 1


def _is_stage(module: nn.Module) -> bool:
    """Whether all of the module's parameters sit in lists of modules that repeat."""
    with_params = [child for child in module.children() if _has_params(child)]
    return bool(with_params) and all(
        _is_repeated(child, module) or (_is_container(child) and _is_stage(child)) for child in with_params
    )


def _cover(module: nn.Module, fqn: str, layers: set[nn.Module]) -> Iterator[tuple[str, nn.Module, bool]]:
    """The layers and, around them, the largest modules that hold no layer, as (FQN, module, only direct parameters)."""
    if module in layers or not any(inner in layers for inner in module.modules()):
        if _has_params(module):
            yield fqn, module, False
        return
    if any(True for _ in module.parameters(recurse=False)):
        yield fqn, module, True
    for name, child in module.named_children():
        yield from _cover(child, f"{fqn}.{name}" if fqn else name, layers)


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _candidates(model: nn.Module) -> list[str]:
    """Class names of modules with parameters that hold other modules, most frequent first."""
    counts: dict[str, int] = {}
    for module in model.modules():
        if module is not model and _has_params(module) and any(module.children()) and not _is_container(module):
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS)
