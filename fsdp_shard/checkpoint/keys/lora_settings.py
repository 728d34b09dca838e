"""The settings in adapter_config.json: the modules that a LoRA adapts, with rank and scale. Imports no torch, no peft.

The rules are peft's (0.21: `check_target_module_exists`, `get_pattern_key`, `LoraConfig`), including quirks: a file
must have the same meaning as in peft.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import run_limited

# Settings of LoRA variants that change the base, or are more than a product of two matrices and, in DoRA, its norms.
_OTHER_KINDS = (
    "use_qalora",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
)
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
_STARTS_AT_ZERO = (True, "gaussian")  # B is zero before it is trained
_DEFAULT_RANK = _DEFAULT_ALPHA = 8  # peft's
# Settings that affect what the tensors mean, with peft's defaults.
_PEFT_DEFAULTS = {
    "r": _DEFAULT_RANK,
    "lora_alpha": _DEFAULT_ALPHA,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "trainable_token_indices": None,
}
_ALL_LINEAR = "all-linear"
# Last parts of the names of embeddings and output heads, which all-linear excludes.
_NOT_LINEAR = frozenset({"embed_tokens", "wte", "wpe", "word_embeddings", "shared", "embed_in", "lm_head", "embed_out"})

_PLAIN = re.compile(r"[\w.-]*")  # patterns that match fast

Names = str | list[str] | None


@dataclass(frozen=True)
class LoraSettings:
    """The settings of a LoRA or DoRA adapter; module names are those in the model.

    Attributes:
        path: adapter_config.json, for messages.
        targets: Names of the adapted modules or their ends, a regular expression for whole names, or `all-linear`.
        excluded: The same for modules to exclude.
        parameters: Names of adapted parameters or their ends (`target_parameters`), such as the experts of a layer.
        saved: Ends of the names of modules that are stored in full (`modules_to_save`).
        tokens: Ends of the names of embeddings and heads -> the trained rows (`trainable_token_indices`); None for the
            input embedding.
        layers: Numbers of the adapted layers; None for all.
        layers_pattern: Names of the lists of layers.
        ranks, alphas: Pattern of a module name -> the module's rank or alpha; None -> that of other modules.
        root_of_rank: Whether alpha is divided by the root of the rank (`use_rslora`).
        is_dora: Whether adapted modules have magnitudes (`use_dora`).
        starts_at_zero: Whether a module without tensors equals that of the base.
        fan_in_fan_out: The value in the file, which peft corrects for known modules.
    """

    path: Path
    targets: str | list[str]
    excluded: Names
    parameters: list[str]
    saved: list[str]
    tokens: Mapping[str | None, list[int]]
    layers: list[int] | None
    layers_pattern: list[str]
    ranks: Mapping[str | None, int]
    alphas: Mapping[str | None, float]
    root_of_rank: bool
    is_dora: bool
    starts_at_zero: bool
    fan_in_fan_out: bool

    @property
    def is_all_linear(self) -> bool:
        """Whether the adapter covers every linear layer except the output head."""
        return isinstance(self.targets, str) and self.targets.lower() == _ALL_LINEAR

    def is_saved(self, module: str) -> bool:
        """Whether the adapter must store this module in full."""
        return any(module.endswith(end) for end in self.saved)

    def token_rows(self, module: str) -> list[int] | None:
        """The rows that replace those of an embedding or head, if the adapter holds any; None if peft reads none."""
        return next((rows for end, rows in self.tokens.items() if end is None or module.endswith(end)), None)

    def is_target_parameter(self, name: str) -> bool:
        """Whether this parameter is adapted by its own factors, regardless of its module."""
        return bool(self.parameters) and _is_named(name, self.parameters, self.path)

    def is_target(self, module: str) -> bool:
        """Whether this module is adapted."""
        if self.excluded and _is_named(module, self.excluded, self.path):
            return False
        if any(_match(rf"(^|.*\.){name}($|\..*)", module, self.path) for name in self.saved):
            return False
        if isinstance(self.targets, str):
            if self.is_all_linear:
                return module.rpartition(".")[2] not in _NOT_LINEAR
            return _is_named(module, self.targets, self.path)
        if module in self.targets or not self.layers:
            return _is_named(module, self.targets, self.path)
        return _is_named(module, self.targets, self.path) and self._layer_of(module) in self.layers

    def _layer_of(self, module: str) -> int | None:
        patterns = [rf"(?:^|.*?\.){name}\.(?P<number>\d+)\." for name in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<number>\d+)\."]:
            if match := _match(pattern, module, self.path):
                return int(match["number"])
        return None

    def rank(self, module: str) -> int:
        """The rank of an adapted module, or of a parameter for each expert."""
        return self.ranks[self._pattern_of(module, self.ranks)]

    def scale(self, module: str) -> float:
        """The scale of the product of the matrices for an adapted module or parameter."""
        rank = self.rank(module)
        return self.alphas[self._pattern_of(module, self.alphas)] / (math.sqrt(rank) if self.root_of_rank else rank)

    def try_patterns(self, modules: Collection[str]) -> None:
        """Match the patterns with module and parameter names in a process that is ended if that takes too long.

        Raises:
            CheckpointError: Matching takes too long, or a pattern is not a regular expression.
        """
        lists = (self.targets, self.excluded, self.saved, self.layers_pattern, *map(list, (self.ranks, self.alphas)))
        patterns = [name for names in lists for name in ([names] if isinstance(names, str) else names or ()) if name]
        if all(map(_PLAIN.fullmatch, patterns)):
            return

        def match() -> None:
            for module in modules:
                if self.is_target(module) or self.is_target_parameter(module):
                    self._pattern_of(module, self.ranks)
                    self._pattern_of(module, self.alphas)

        what = f"matching the patterns in {self.path} with the names of modules"
        run_limited(match, what, kind="build", error=CheckpointError)

    def _pattern_of(self, module: str, patterns: Iterable[str | None]) -> str | None:
        """The first pattern that is the module's name, or the end of it after a dot."""
        matching = (key for key in patterns if key and _match(rf"(.*\.)?({key})$", module, self.path))
        return next(matching, None)


def parse_lora(path: Path, config: Mapping[str, Any]) -> LoraSettings:
    """Parse the document of an adapter_config.json at `path`.

    Raises:
        CheckpointError: It is neither LoRA nor DoRA, or peft rejects the settings.
    """
    _refuse_other_kinds(path, config)
    parameters = _list(path, "target_parameters", config.get("target_parameters"))
    settings = LoraSettings(
        path=path,
        targets=_targets(path, config.get("target_modules")) if config.get("target_modules") or not parameters else [],
        excluded=_names(path, "exclude_modules", config.get("exclude_modules")),
        parameters=parameters,
        saved=_list(path, "modules_to_save", config.get("modules_to_save")),
        tokens=_tokens(path, config.get("trainable_token_indices")),
        layers=_layers(path, config.get("layers_to_transform")),
        layers_pattern=_list(path, "layers_pattern", config.get("layers_pattern")),
        ranks=_numbers(path, config, "r", "rank_pattern", _DEFAULT_RANK),
        alphas=_numbers(path, config, "lora_alpha", "alpha_pattern", _DEFAULT_ALPHA),
        root_of_rank=bool(config.get("use_rslora")),
        is_dora=bool(config.get("use_dora")),
        starts_at_zero=config.get("init_lora_weights", True) in _STARTS_AT_ZERO,
        fan_in_fan_out=bool(config.get("fan_in_fan_out")),
    )
    if isinstance(settings.targets, str) and (settings.layers is not None or settings.layers_pattern):
        raise _wrong(path, "layers_to_transform and layers_pattern need a list of target_modules, and it has a pattern")
    if settings.layers_pattern and settings.layers is None:
        raise _wrong(path, "layers_pattern needs layers_to_transform")
    return settings


def setting_differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Describe, in lines, differences between two adapter_config.json that matter for adapters with equal matrices."""
    sides = [
        _PEFT_DEFAULTS | {name: value for name in _PEFT_DEFAULTS if (value := each.get(name)) is not None}
        for each in (one, two)
    ]
    found = [(name, *(side[name] for side in sides)) for name in _PEFT_DEFAULTS]
    return [f"{name} is {str(a)[:80]} and {str(b)[:80]}" for name, a, b in found if a != b]


def _refuse_other_kinds(path: Path, config: Mapping[str, Any]) -> None:
    start, bias = config.get("init_lora_weights"), config.get("bias", "none")
    start = start.lower() if isinstance(start, str) else start
    if config["peft_type"] != "LORA":
        raise _wrong(path, f"an adapter of type {config['peft_type']} cannot be merged here, LORA can")
    if kind := next((name for name in _OTHER_KINDS if config.get(name) or config.get(name) == {}), None):
        raise _wrong(path, f"LoRA with {kind} cannot be merged here; merge it with peft")
    if start not in _PLAIN_STARTS:
        raise _wrong(
            path,
            f"init_lora_weights={start!r} changes the base model, so it cannot be merged here; merge it with peft",
        )
    alone = ("use_dora", "fan_in_fan_out", "lora_dropout")  # which peft rejects together with it
    if config.get("target_parameters") and (other := next((name for name in alone if config.get(name)), None)):
        raise _wrong(path, f"target_parameters and {other} cannot be combined")
    if bias not in ("none", "all", "lora_only"):
        raise _wrong(path, f"bias is {bias!r}; expected none, all or lora_only")


def _targets(path: Path, value: Any) -> str | list[str]:
    if not value:
        raise _wrong(path, f"target_modules is {value!r}, so which modules it adapts is not known; list them there")
    found = _names(path, "target_modules", value)
    assert found is not None
    return found


def _names(path: Path, key: str, value: Any) -> Names:
    """A list of names, or a regular expression."""
    if value is None or isinstance(value, str):
        return value
    return _list(path, key, value)


def _list(path: Path, key: str, value: Any) -> list[str]:
    names = [value] if value and isinstance(value, str) and key == "layers_pattern" else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(path, f"{key} is {value!r}; expected a list of names")
    return names


def _tokens(path: Path, value: Any) -> dict[str | None, list[int]]:
    found = {None: value} if isinstance(value, list) else value or {}
    for rows in found.values() if isinstance(found, dict) else [found]:
        are_rows = isinstance(rows, list) and all(type(row) is int and row >= 0 for row in rows)
        if not are_rows or len({*rows}) < len(rows):
            raise _wrong(path, f"trainable_token_indices is {str(value)[:80]}; expected different numbers of tokens")
    return found


def _layers(path: Path, value: Any) -> list[int] | None:
    numbers = [value] if type(value) is int else value
    if numbers is not None and not (isinstance(numbers, list) and all(type(number) is int for number in numbers)):
        raise _wrong(path, f"layers_to_transform is {value!r}; expected the numbers of layers")
    return numbers


def _numbers(path: Path, config: Mapping[str, Any], key: str, patterns: str, default: int) -> dict[Any, Any]:
    """The value of `key` under None, and the values of modules named in the setting `patterns`."""
    named = config.get(patterns, {})
    if not isinstance(named, Mapping):
        raise _wrong(path, f"{patterns} is {named!r}; expected names of modules with a number each")
    check = _positive if key == "r" else _finite
    values = {name: check(path, f"{patterns} of {name}", value) for name, value in named.items()}
    return values | {None: check(path, key, config.get(key, default))}


def _positive(path: Path, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(path, f"{key} is {value!r}; expected a positive integer")
    return value


def _finite(path: Path, key: str, value: Any) -> float:
    try:
        if type(value) in (int, float) and math.isfinite(number := float(value)):
            return number
    except OverflowError:
        pass
    raise _wrong(path, f"{key} is {repr(value)[:40]}; expected a finite number")


def _is_named(module: str, names: str | list[str], path: Path) -> bool:
    """Whether a pattern matches the whole name, or a list contains it or its end after a dot."""
    if isinstance(names, str):
        return bool(_match(names, module, path, is_whole=True))
    return any(module == name or module.endswith(f".{name}") for name in names)


def _match(pattern: str, text: str, path: Path, *, is_whole: bool = False) -> re.Match[str] | None:
    """`re.match` or `re.fullmatch`; all patterns of the file go through this function."""
    try:
        return re.fullmatch(pattern, text) if is_whole else re.match(pattern, text)
    except (re.error, RecursionError, OverflowError) as error:
        raise _wrong(path, f"{pattern[:80]!r} is not a regular expression ({error})") from None


def _wrong(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: {problem}.")
