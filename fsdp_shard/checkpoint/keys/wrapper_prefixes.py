"""Selects the weights among stored names, and finds the model's own names for them, from the names alone.

`split_state` splits a nested state dict: `{"model": ..., "optimizer": ...}` and the additions of trainers.
`plain_names` strips the prefixes of wrappers: FSDP, DDP, torch.compile, checkpointing, peft.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_shard.errors import CheckpointError

# Keys that hold optimizer states: torch's recipes, torchtitan, accelerate, Lightning, torchtune, verl.
_OPTIMIZER = frozenset(
    {"optimizer", "optim", "optimizers", "optim_state", "optimizer_state", "optimizer_states", "optimizer_state_dict"}
)
# Keys that hold weights, where a state dict has several parts.
_MODEL = frozenset({"model", "module", "state_dict", "model_state_dict", "model_state", "net", "network"})
# Keys of a trainer's own state, which may also hold tensors.
_TRAINER = frozenset(
    {"lr_scheduler", "scheduler", "lr_schedulers", "train_state", "trainer", "dataloader", "extra_state", "ema"}
    | {"rng", "rng_state", "rng_states", "scaler", "grad_scaler", "loops", "callbacks", "metrics", "step", "epoch"}
)
# Modules that wrappers insert between a module and its parent.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module", "_ddp_module")
PEFT_PREFIX = "base_model.model."  # of all names in a file of peft
# Parts of names found only in peft adapters.
_ADAPTER = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "original_module")

# Matches if there is anything to strip, so most checkpoints need only one search.
_TRACES = re.compile(
    rf"(^|\.)({'|'.join((*_WRAPPERS, *_ADAPTER, 'base_layer', 'modules_to_save'))})\."
    r"|^(module|base_model\.model|model\.(model|lm_head))\.",
    re.MULTILINE,
)

OPTIMIZER, ADAPTER, OTHER = "optimizer", "adapter", "other"


@dataclass(frozen=True)
class Selection:
    """The weights among stored names.

    Attributes:
        names: Stored name of a weight -> its FQN.
        extras: The other stored names, by kind: `optimizer`, `adapter`, `other`.
    """

    names: dict[str, str]
    extras: dict[str, list[str]]


def split_state(paths: Mapping[str, Sequence[object]]) -> Selection:
    """Separate weights from the rest in a nested state dict.

    If several parts could be the model, the one under a key such as `model` is used. Parts under unknown keys all count
    as weights, under their dotted paths, as in a dict of several models.

    Args:
        paths: Stored name -> the keys that lead to it.

    Returns:
        The weights, and the other names by kind.

    Raises:
        CheckpointError: There are several models, or two names mean the same tensor.
    """
    extras: dict[str, list[str]] = {}
    weights: dict[str, tuple[str, ...]] = {}
    flat = {str(path[0]) for path in paths.values() if len(path) == 1}
    for name, path in paths.items():
        keys = _keys(path)
        kind = OPTIMIZER if len(keys) == 1 and _is_flat_state(keys[0], flat) else _kind(keys)
        if kind is None:
            weights[name] = keys
        else:
            extras.setdefault(kind, []).append(name)
    models = {keys[:-1] for keys in weights.values() if len(keys) > 1 and keys[-2] in _MODEL}
    if models:
        depth = min(map(len, models))
        top, *more = sorted(group for group in models if len(group) == depth)
        if more:
            some = ", ".join(".".join(group) for group in (top, *more))
            raise CheckpointError(f"it has several models, {some}; save the state dict of one of them.")
        extras.setdefault(OTHER, []).extend(name for name, keys in weights.items() if keys[:-1][:depth] != top)
        weights = {name: keys[depth:] for name, keys in weights.items() if keys[:-1][:depth] == top}
    found = {name: ".".join(keys) for name, keys in weights.items()}
    _refuse_equal(found)
    return Selection(found, {kind: names for kind, names in extras.items() if names})


def _keys(path: Sequence[object]) -> tuple[str, ...]:
    """The path as strings; a name that holds its whole path in dots, without a model in front, is split once."""
    keys = tuple(str(key) for key in path)
    if len(keys) == 1 and "." in keys[0]:
        first, rest = keys[0].split(".", 1)
        if first in _OPTIMIZER and rest.startswith(("state.", "param_groups.", "exp_avg")):
            return first, rest
    return keys


def _is_flat_state(name: str, names: Collection[str]) -> bool:
    """Whether a name is `state.FQN.exp_avg` and FQN itself is stored: `flatten_optimizer_state_dict` of torch."""
    first, _, rest = name.partition(".")
    return first == "state" and rest.rpartition(".")[0] in names


def _kind(keys: tuple[str, ...]) -> str | None:
    """The kind of extra that keys lead to, None for a weight. The last key is a tensor's own name."""
    # An optimizer's own state dict, with a key in front or without: state -> parameter -> exp_avg.
    if any(key in _OPTIMIZER for key in keys[:-1]) or "state" in keys[:-2]:
        return OPTIMIZER
    if any(key in _TRAINER for key in keys[:-1]) or keys[0] in _TRAINER:
        return OTHER
    return None


def plain_names(names: Iterable[str], *, is_nested: bool = True) -> Selection:
    """Strip wrapper prefixes from names.

    Prefixes (`module.`, `base_model.model.`, `model.` before `model.`) are removed only if all weights have them.
    peft adapters stored together with the weights that they adapt are extras; a checkpoint with only adapters keeps its
    names.

    Args:
        names: The stored names.
        is_nested: Whether a trainer may have nested the model under `model`; some models begin all names like that.

    Returns:
        The weights, and the adapters.

    Raises:
        CheckpointError: Two tensors would get the same name.
    """
    stored = list(names)
    if not _TRACES.search("\n".join(stored)):
        return Selection({name: name for name in stored}, {})
    # A model may have modules with peft's names itself: in a Hugging Face directory only peft's own prefix counts.
    is_peft = all(PEFT_PREFIX in name for name in stored) or (is_nested and any(_is_of_adapter(n) for n in stored))
    adapters = [name for name in stored if is_peft and _is_of_adapter(name)]
    if adapters and len(adapters) == len(stored):
        return Selection({name: name for name in stored}, {})
    dropped = set(adapters)
    plain = {name: _without_wrappers(name, is_peft) for name in stored if name not in dropped}
    for prefix in ("module.", PEFT_PREFIX, *(("model.",) if is_nested else ())):
        while _is_removable(prefix, plain.values()):
            plain = {name: fqn.removeprefix(prefix) for name, fqn in plain.items()}
    _refuse_equal(plain)
    return Selection(plain, {ADAPTER: adapters} if adapters else {})


def _is_of_adapter(name: str) -> bool:
    return any(part in _ADAPTER for part in name.split("."))


def _without_wrappers(name: str, is_peft: bool) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS and not (is_peft and part == "base_layer")]
    if is_peft and "modules_to_save" in parts:  # peft: `head.modules_to_save.default.weight` is the trained head
        at = parts.index("modules_to_save")
        parts = parts[:at] + parts[at + 2 :]
    return ".".join(parts)


def _is_removable(prefix: str, names: Collection[str]) -> bool:
    """Whether all names have the prefix of a module that holds the model: `module` of DDP and DeepSpeed, peft's
    `base_model.model`, or a trainer's `model`, if the model's own names begin with `model.` again, or one is its head.
    """
    is_nested = prefix != "model." or any(name.startswith(("model.model.", "model.lm_head.")) for name in names)
    return is_nested and bool(names) and all(name.startswith(prefix) for name in names)


def _refuse_equal(plain: Mapping[str, str]) -> None:
    counts = Counter(plain.values())
    for fqn, count in counts.items():
        if count > 1:
            both = " and ".join(name for name, found in plain.items() if found == fqn)
            raise CheckpointError(f"{both} both mean the tensor {fqn}; which one is meant?")
