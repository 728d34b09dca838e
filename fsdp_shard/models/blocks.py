"""No-split blocks: the units in which a model is sharded, recomputed, offloaded and planned.

They depend only on the modules, their names and the shapes of their parameters, so a model on meta suffices.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models.file_errors import config_file
from fsdp_shard.models.transformers_private import no_split_modules
from fsdp_shard.utils import nearest

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_LISTS, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Block:
    """One module that is never divided. A tied parameter counts once, in its first block.

    Attributes:
        fqn: Name of the module.
        cls: Name of its class.
        num_params: Number of its parameters.
        num_bytes: Size of its parameters.
        repeated: Whether it is a layer (decoder layer, residual block, recurrent cell), not an embedding, a final norm
            or an output head.
        direct: Whether it has only the module's own parameters; its submodules are separate blocks.
    """

    fqn: str
    cls: str
    num_params: int
    num_bytes: int
    repeated: bool
    direct: bool = False


def no_split_blocks(model: nn.Module, names: Sequence[str] | None = None) -> list[Block]:
    """Find the blocks of a model.

    Layers are found by class name, from `names` or those of the model's own `_no_split_modules` that are present, or
    else by structure: recurrent cells, and modules that repeat in a list. Other modules with parameters are also
    blocks.

    Args:
        model: The model; may be on the meta device.
        names: Class names of the layers.

    Returns:
        The blocks in module order. They are disjoint and not nested, and each parameter is in exactly one of them.

    Raises:
        ModelError: A class in `names` is not in the model, or nothing repeats. The message lists the candidates.
        ConfigError: `names` is not a list of names.

    Example:
        >>> no_split_blocks(model)[1]
        Block(fqn='model.layers.0', cls='LlamaDecoderLayer', num_params=..., num_bytes=..., repeated=True, direct=False)
    """
    layers = set(_layers(model, names))
    seen: set[int] = set()
    blocks = []
    for fqn, module, direct in _cover(model, "", layers):
        params = [p for p in module.parameters(recurse=not direct) if id(p) not in seen]
        seen.update(map(id, params))
        num_bytes = sum(p.nbytes for p in params)
        num_params = sum(p.numel() for p in params)
        blocks.append(Block(fqn, type(module).__name__, num_params, num_bytes, module in layers, direct))
    return blocks


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map the other names of tied parameters to the name under which each is stored, the first in module order."""
    kept: dict[int, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if kept.setdefault(id(param), name) != name:
            aliases[name] = kept[id(param)]
    return aliases


def _layers(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    if names:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"Blocks are a list of class names, such as ['LlamaDecoderLayer'], not {names!r}.")
        for name in names:
            if next(_outermost(model, {name}), None) is None:
                known = _candidates(model)
                raise ModelError(
                    f"{type(model).__name__} has no module of class {name}{nearest(name, known)}; "
                    f"its modules that could be blocks are {', '.join(known)}."
                )
        return list(_outermost(model, set(names)))
    layers = _own(model) or list(_structural(model, _classes(model, _is_layer)))
    if not layers:  # one that serves as all layers (ALBERT), or the only one
        layers = list(_structural(model, _classes(model, _is_listed)))
    if not layers:
        config: Any = getattr(model, "config", None)
        source = f" of {config_file(config)}" if hasattr(config, "name_or_path") else ""
        raise ModelError(
            f"No blocks were found in {type(model).__name__}{source}: no module repeats, and it lists none itself. "
            f"{_other_units(model)}"
        )
    return layers


def _own(model: nn.Module) -> list[nn.Module]:
    """Find the modules named in the model's own list, or the layers around them if it names only parts of layers.

    A listed class is a part if it is always the only one of its class in a module other than a list, and a surrounding
    module has a class that repeats: the shortcut of a residual block (ResNet), the attention of an encoder layer
    (Idefics). All modules of the surrounding class are then blocks. If the list contains no layers at all (BiT's
    embeddings), they are found by structure.
    """
    names = no_split_modules(model)
    listed = list(_outermost(model, names))
    if not listed:
        return []
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    repeated = _classes(model, _is_repeated)
    own = {type(module) for module in listed if not _is_single(module, parents[module])}
    above = (_around(module, parents, repeated) for module in listed if type(module) not in own)
    around = {type(module).__name__ for module in above if module is not None}
    found = list(_outermost(model, names | around))
    if not own and not around:
        taken = {id(inner) for module in found for inner in module.modules()}
        structural = _structural(model, _classes(model, _is_layer))
        found += [block for block in structural if not any(id(inner) in taken for inner in block.modules())]
    return found


def _is_single(child: nn.Module, parent: nn.Module) -> bool:
    return not isinstance(parent, _CONTAINERS) and [type(part) for part in parent.children()].count(type(child)) == 1


def _classes(model: nn.Module, test: Callable[[nn.Module, nn.Module], bool]) -> set[type[nn.Module]]:
    """Return the classes, except lists, with a module that passes `test`, which also receives its parent."""
    found = {type(child) for parent in model.modules() for child in parent.children() if test(child, parent)}
    return found - set(_CONTAINERS)


def _around(module: nn.Module, parents: dict[nn.Module, nn.Module], repeated: set[type[nn.Module]]) -> nn.Module | None:
    """Return the innermost module around `module` of a class that repeats."""
    while (parent := parents.get(module)) is not None:
        if type(parent) in repeated:
            return parent
        module = parent
    return None


def _outermost(module: nn.Module, classes: set[str]) -> Iterator[nn.Module]:
    """Yield modules of one of `classes` that have parameters and are not inside another such module."""
    for child in module.children():
        if type(child).__name__ in classes and _has_params(child):
            yield child
        else:
            yield from _outermost(child, classes)


def _structural(module: nn.Module, whole: set[type[nn.Module]]) -> Iterator[nn.Module]:
    """Find the layers of a model without its own list: recurrent cells, and modules that repeat in a list.

    A module that is only a list of repeated modules (a stage of a ResNet) is searched; one that has more than a list (a
    residual block with its shortcut, a decoder layer) is a layer, and so are all of its class (`whole`): those whose
    shortcut is the identity, and one that is alone in its list.
    """
    for child in module.children():
        is_alike = type(child) in whole and isinstance(module, _CONTAINERS) and _has_params(child)
        if isinstance(child, (nn.RNNBase, nn.RNNCellBase)) or is_alike or _is_layer(child, module):
            yield child
        else:
            yield from _structural(child, whole)


def _is_layer(child: nn.Module, parent: nn.Module) -> bool:
    """Return whether the module repeats in a list and is more than a list."""
    return _is_repeated(child, parent) and not _is_stage(child)


def _is_repeated(child: nn.Module, parent: nn.Module) -> bool:
    """Return whether the module repeats in a list."""
    if not isinstance(parent, _CONTAINERS) or not any(child.children()):
        return False
    return _has_params(child) and [type(part) for part in parent.children()].count(type(child)) > 1


def _is_listed(child: nn.Module, parent: nn.Module) -> bool:
    """Return whether the module is in a list that is not called itself."""
    return isinstance(parent, nn.ModuleList) and any(child.children()) and _has_params(child)


def _is_stage(module: nn.Module) -> bool:
    """Return whether all parameters of the module are in lists of modules that repeat."""
    with_params = [child for child in module.children() if _has_params(child)]
    return bool(with_params) and all(
        _is_repeated(child, module) or (isinstance(child, _CONTAINERS) and _is_stage(child)) for child in with_params
    )


def _cover(module: nn.Module, fqn: str, layers: set[nn.Module]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the layers and the largest modules without a layer, as (FQN, module, only direct parameters).

    A list has no forward pass before which its parameters could be fetched, so each of its modules is a block.
    """
    if module in layers or not (isinstance(module, _LISTS) or any(inner in layers for inner in module.modules())):
        if _has_params(module):
            yield fqn, module, False
        return
    if any(True for _ in module.parameters(recurse=False)):
        yield fqn, module, True
    for name, child in module.named_children():
        yield from _cover(child, f"{fqn}.{name}" if fqn else name, layers)


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _other_units(model: nn.Module) -> str:
    """The settings to use for a model without blocks."""
    if known := _candidates(model):
        return f"Set shard.blocks=[CLASS]; candidates are {', '.join(known)}."
    sizes = [(sum(param.numel() for param in module.parameters(recurse=False)), module) for module in model.modules()]
    num_params, largest = max(sizes, key=lambda size: size[0])
    if not num_params:
        return "It has no parameters."
    return f"Set shard.min_params={num_params}: that makes a unit of {type(largest).__name__}, its largest module."


def _candidates(model: nn.Module) -> list[str]:
    """Return the class names of modules with parameters and other modules, most frequent first."""
    inner = (module for module in model.modules() if module is not model and not isinstance(module, _CONTAINERS))
    counts = Counter(type(module).__name__ for module in inner if _has_params(module) and any(module.children()))
    return [name for name, _ in counts.most_common()]
