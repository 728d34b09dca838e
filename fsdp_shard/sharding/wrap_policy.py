"""Which modules are sharded as a unit of their own: a plan, computed from the model's structure alone.

The parameters of a unit are gathered together, so a unit is what a rank holds whole at one time. What is in no unit
belongs to the root. Knows no wrapper; the wrappers apply the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from fsdp_shard.errors import ConfigError
from fsdp_shard.models import Block, no_split_blocks, num_weights, quantized_weights, tied_names
from fsdp_shard.sharding.config import ShardConfig
from fsdp_shard.sharding.shard_sizes import itemsize

# A block beside the layers (an embedding, a head) gets a unit of its own from this size on; a final norm with its few
# kilobytes is not worth a collective and stays in the root.
_OWN_UNIT_BYTES = 4 * 2**20

# Modules that are used without being called: their hooks would never gather anything.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_USES_ITS_CHILDREN = (nn.MultiheadAttention,)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module and the `parameters` that are gathered with it: all in it but those of units inside it, tied ones once.

    `num_trained` of them are not frozen. `dtype` is what it computes in. The root's FQN is empty. `num_bytes` are as
    they are held, `gathered_bytes` as they are gathered. Where it `is_bytes`, they look like numbers, not to be cast.
    """

    fqn: str
    cls: str
    parameters: tuple[str, ...]
    num_params: int
    num_bytes: int
    dtype: str
    num_trained: int
    gathered_bytes: int
    is_bytes: bool = False


def plan_units(model: nn.Module, shard: ShardConfig) -> tuple[Unit, ...]:
    """The units of `model`: inner ones before those around them, else in module order, the root last.

    They are the blocks (see `no_split_blocks` for `shard.blocks`), or with `shard.min_params` whatever is large enough;
    and each norm, where `shard.norms_in_float32` asks for it; and each quantized weight, where the wrapper would cast
    it with the others. Raises ModelError or ConfigError.

    Parameters that are tied across units must be gathered at one time, so such modules are no units, whichever they
    are: the input embedding of a model with a tied head is in the root, which is there when the head runs.
    """
    if shard.min_params is None:
        chosen = {block.fqn for block in no_split_blocks(model, shard.blocks) if _stands_alone(block)}
    else:
        chosen = set(_large_enough(model, shard.min_params))
    norms = set(_norms(model)) if shard.norms_in_float32 else set()
    if shard.norms_in_float32 and not norms:
        raise ConfigError(f"shard.norms_in_float32=true: {type(model).__name__} has no norm layer with parameters.")
    apart = set() if shard.held_bytes == "uint8" else {fqn for fqn, _ in quantized_weights(model)}
    fqns = _without_ties(model, chosen | norms | apart)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {fqn: [] for fqn in [*_inner_first(model, fqns), ""]}
    for name, param in model.named_parameters():
        members[_home(name, fqns)].append((name, param))
    counted = num_weights(model)
    dtypes = dict.fromkeys(norms, "float32") | dict.fromkeys(apart, shard.held_bytes)
    return tuple(
        Unit(
            fqn,
            type(model.get_submodule(fqn)).__name__,
            tuple(name for name, _ in held),
            sum(counted[name] for name, _ in held),
            sum(param.numel() * param.element_size() for _, param in held),
            dtype := dtypes.get(fqn, shard.param_dtype),
            sum(param.numel() for _, param in held if param.requires_grad),
            sum(param.numel() * _gathered_itemsize(param, dtype) for _, param in held),
            fqn in apart,
        )
        for fqn, held in members.items()
    )


def _gathered_itemsize(param: nn.Parameter, dtype: str) -> int:
    """Bytes of an element: numbers are gathered in what the unit computes in, anything else as it is held."""
    return itemsize(dtype) if param.is_floating_point() else param.element_size()


def _stands_alone(block: Block) -> bool:
    return not block.direct and bool(block.fqn) and (block.repeated or block.num_bytes >= _OWN_UNIT_BYTES)


def _large_enough(model: nn.Module, min_params: int) -> Iterator[str]:
    """FQNs of the modules that hold at least `min_params` parameters beside those of such modules inside them."""
    counted: set[int] = set()
    found = []

    def left(module: nn.Module, fqn: str) -> int:
        if id(module) in counted:  # one module under two names
            return 0
        counted.add(id(module))
        params = list(module.parameters(recurse=isinstance(module, _USES_ITS_CHILDREN)))
        own = sum(param.numel() for param in params if id(param) not in counted)
        counted.update(map(id, params))
        children = [] if isinstance(module, _USES_ITS_CHILDREN) else list(module.named_children())
        own += sum(left(child, f"{fqn}.{name}" if fqn else name) for name, child in children)
        if not fqn or own < min_params or isinstance(module, _NEVER_CALLED):
            return own
        found.append(fqn)
        return 0

    left(model, "")
    yield from found


def _norms(model: nn.Module) -> Iterator[str]:
    """FQNs of the norm layers with parameters of their own."""
    for fqn, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
        if fqn and is_norm and next(module.parameters(), None) is not None:
            yield fqn


def _inner_first(model: nn.Module, fqns: set[str]) -> list[str]:
    """`fqns` in module order, but each after those inside it."""
    order = [fqn for fqn, _ in model.named_modules(remove_duplicate=False) if fqn in fqns]
    done: list[str] = []
    around: list[str] = []
    for fqn in order:
        while around and not fqn.startswith(around[-1] + "."):
            done.append(around.pop())
        around.append(fqn)
    return done + around[::-1]


def _without_ties(model: nn.Module, fqns: set[str]) -> set[str]:
    """`fqns` without those that hold one name of a tied parameter while its other name is elsewhere."""
    left, ties = set(fqns), tied_names(model)
    while split := {(_home(a, left), _home(b, left)) for a, b in ties.items() if _home(a, left) != _home(b, left)}:
        for one, two in split:
            # What is around both may stay; the root always does.
            left -= {fqn for fqn, other in ((one, two), (two, one)) if fqn and not other.startswith(fqn + ".")}
    return left


def _home(parameter: str, fqns: Sequence[str] | set[str]) -> str:
    """The innermost of `fqns` that holds `parameter`, or the root."""
    while parameter:
        parameter = parameter.rpartition(".")[0]
        if parameter in fqns:
            return parameter
    return ""
