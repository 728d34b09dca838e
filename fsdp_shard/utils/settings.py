"""Declares settings: default, help text, range and choices in one place, at the field of a config dataclass.

`check(config)` walks a tree of config dataclasses and names the first setting out of range by its full dotted name; the
config reference is generated from the same declarations.
"""

import copy
import dataclasses
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from numbers import Integral, Real
from typing import Any, Generic, Self, TypeVar, get_type_hints, overload

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils.text import nearest

T = TypeVar("T")

_RANGES: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", operator.ge, "at least"),
    ("above", operator.gt, "more than"),
    ("maximum", operator.le, "at most"),
)

# The types in annotations of settings, with their Python classes and an example of each for errors.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "a bool: True or False"),
    "int": ((Integral,), "an int, such as 2"),
    "float": ((Real,), "a float, such as 0.5"),
    "str": ((str, os.PathLike), "a str"),
    "list": ((list, tuple), "a list"),
    "None": ((type(None),), "None"),
}

REQUIRED: Any = "???"  # OmegaConf's mark of a value that the user must set


def setting(
    default: T,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str | bool] | None = None,
    warning: str | None = None,
) -> T:
    """Declare a field of a config dataclass.

    Args:
        default: Default value; lists, dicts and nested dataclasses are copied for each instance.
        help: Help text.
        minimum: Smallest value, inclusive.
        above: Lower bound, exclusive.
        maximum: Largest value, inclusive.
        choices: Accepted values.
        warning: Text that a run prints first if the setting is on.

    Returns:
        The dataclass field.
    """
    return _field(default, help=help, minimum=minimum, above=above, maximum=maximum, choices=choices, warning=warning)


def free_text(help: str) -> Any:
    """Declare an optional text that may be any text: on the command line, `null` is that word and unsets nothing."""
    return _field(None, help=help, free_text=True, is_prose=True)


def prose(default: T, help: str) -> T:
    """Declare text for a model, or a list of such texts, such as prompts: in a settings file, `${` is part of it."""
    return _field(default, help=help, is_prose=True)


def _field(default: T, **metadata: Any) -> T:
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default):
        field: T = dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
        return field
    return dataclasses.field(default=default, metadata=metadata)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (dotted name, field, value) of each setting of a config dataclass and the dataclasses in it."""
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, name + ".")
        else:
            yield name, field, value


def warnings_of(config: Any) -> list[str]:
    """Return the warnings of settings that are on, one line each."""
    said = ((name, field.metadata.get("warning"), value) for name, field, value in walk(config))
    return [f"warning: {name}={in_yaml(value)}: {text}" for name, text, value in said if text and value]


def flatten(values: Mapping[Any, Any], separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each value in nested maps; a name is the value's keys, joined by `separator`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}{separator}{name}", inner) for name, inner in flatten(value, separator))
        else:
            yield str(key), value


def chosen_options(defaults: Iterable[Any]) -> dict[Any, Any]:
    """The chosen option of each group in the `defaults` of a config, which also name other configs."""
    return {group: option for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}


class Derived(Generic[T]):
    """A value made from settings when it is first used, and made anew once they have changed.

    Declare it in a config dataclass without an annotation, or by `derived`, so that it is not a field.
    """

    def __init__(self, settings: Sequence[str], make: Callable[[Any], T]) -> None:
        """`make` accepts the config; `settings` are the dotted names of those that it reads."""
        self._settings = tuple(map(operator.attrgetter, settings))
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, config: None, owner: type) -> Self: ...
    @overload
    def __get__(self, config: object, owner: type) -> T: ...
    def __get__(self, config: Any, owner: type) -> T | Self:
        return self if config is None else self._kept_or(config, self._make)

    def __set__(self, config: Any, value: T) -> None:
        vars(config)[self._name] = self._key(config), value

    def kept(self, config: Any) -> T | None:
        """Return the value if it was made from the present settings of `config`, else None."""
        key, value = vars(config).get(self._name, (None, None))
        return value if key == self._key(config) else None

    def _key(self, config: Any) -> str:
        # Text, because lists and dicts are changed in place.
        return repr([get(config) for get in self._settings])

    def _kept_or(self, config: Any, make: Callable[[Any], T]) -> T:
        if vars(config).get(self._name, (None, None))[0] != self._key(config):
            self.__set__(config, make(config))
        value: T = vars(config)[self._name][1]
        return value


def derived(*settings: str) -> Callable[[Callable[[Any], T]], Derived[T]]:
    """Turn a method of a config into a `Derived` value of the settings with these dotted names."""
    return partial(Derived, settings)


class Parsed(Derived[T]):
    """The typed value of one setting, parsed by `check`, or when it is first used.

    Declare it next to the setting, without an annotation:

        max_shard_size: str = setting("5GB", "...")
        max_shard_bytes = Parsed("max_shard_size", parse_size)
    """

    def __init__(self, setting: str, parse: Callable[[Any, str], T]) -> None:
        """`parse` accepts the value and the full name of `setting`, for its ConfigError."""
        super().__init__((setting,), lambda config: parse(getattr(config, setting), setting))
        self._setting = setting
        self._parse = parse

    def of(self, config: Any, prefix: str = "") -> T:
        """Return the parsed value of `config`, whose settings are named `prefix` + name."""
        return self._kept_or(config, lambda _: self._parse(getattr(config, self._setting), prefix + self._setting))


def whole_number(value: Any) -> int | None:
    """Return an integer of any library as an int; None if `value` is none, or is a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def non_default_settings(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the settings in `names` whose value is not the default of their dataclass."""
    defaults = type(config)()
    return {name: value for name in names if (value := getattr(config, name)) != getattr(defaults, name)}


def refuse_changed(config: Any, names: Iterable[str], prefix: str, why: str) -> None:
    """Raise ConfigError if a setting in `names` is not the default; `why` continues after `PREFIXname=value`."""
    for name, value in non_default_settings(config, names).items():
        raise ConfigError(f"{prefix}{name}={in_yaml(value)} {why}")


def check(config: Any) -> None:
    """Check all settings of `config`, and call `check(prefix)` of the dataclasses that have this method.

    It checks rules that involve several fields; `prefix` is the dotted name of the dataclass. Required settings that
    another setting makes unnecessary (`instead`) become "". The config of a command also has `check_run()`.

    Args:
        config: A config dataclass.

    Raises:
        ConfigError: The first setting that is missing, unknown, out of range, not a known choice, or against a rule.
    """
    _check_names(config, "")
    _fill_alternatives(config)
    if missing := {name: field.metadata.get("help", "") for name, field, value in walk(config) if value == REQUIRED}:
        raise missing_error(sorted(missing), missing)
    for name, field, value in walk(config):
        check_one(name, field, value)
    if hasattr(config, "check_run"):
        config.check_run()
    _check_rules(config, "")


@cache
def _sections_of(schema: type) -> dict[str, type]:
    """The fields of a config dataclass that are dataclasses themselves."""
    try:
        types = get_type_hints(schema)
    except NameError:  # of a class in a function, whose annotations are text that only has a meaning there
        return {}
    names = [field.name for field in dataclasses.fields(schema)]
    return {name: types[name] for name in names if dataclasses.is_dataclass(types[name])}


def _check_names(config: Any, prefix: str) -> None:
    """Raise ConfigError for an attribute that is no setting, or another value in the place of a section."""
    schema: type = type(config)
    names = [field.name for field in dataclasses.fields(schema)]
    is_of_user = not schema.__module__.startswith("fsdp_shard.")  # who may compute attributes from settings
    for name in () if is_of_user else vars(config):
        if name not in names and not name.startswith("_") and not hasattr(schema, name):
            raise ConfigError(
                f"{prefix}{name} is not a setting{nearest(name, names)}; a value of your own has a name that begins "
                f"with an underscore, or is a field of a dataclass that extends {schema.__name__}."
            )
    for name, kind in _sections_of(schema).items():
        section = getattr(config, name)
        if not isinstance(section, kind):
            named = " Names of options are for lists of settings, as in fs.plan([...])." * isinstance(section, str)
            raise ConfigError(
                f"{prefix}{name}={section!r} is {type(section).__name__}, expected an object with the settings of "
                f"{prefix}{name} ({kind.__name__}): change those of the one that a new config has.{named}"
            )
        _check_names(section, f"{prefix}{name}.")


def _fill_alternatives(config: Any) -> None:
    """Set required settings to "" if their dataclass has an alternative (`instead`) that is set."""
    for name, others in getattr(config, "instead", {}).items():
        section, _, leaf = name.rpartition(".")
        holder = operator.attrgetter(section)(config) if section else config
        if getattr(holder, leaf) == REQUIRED and any(is_chosen(config, other) for other in others):
            setattr(holder, leaf, "")
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(section := getattr(config, field.name)):
            _fill_alternatives(section)


def is_chosen(config: Any, alternative: str) -> bool:
    """Whether a setting has a value (`name`), or one of some values (`name=value|value`)."""
    name, _, values = alternative.partition("=")
    found = operator.attrgetter(name)(config)
    return found in values.split("|") if values else bool(found)


def missing_error(missing: Sequence[str], helps: Mapping[str, str]) -> ConfigError:
    """The error for required settings that are not set; `helps` are the help texts of settings."""
    verb = "is" if len(missing) == 1 else "are"
    sentences = [f"{' and '.join(missing)} {verb} not set. Add {' '.join(f'{name}=VALUE' for name in missing)}."]
    return ConfigError(
        " ".join([*sentences, *(f"{name}: {_first_sentence(helps[name])}" for name in missing if name in helps)])
    )


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]


def check_one(name: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Check the value of one setting; ConfigError if it is missing, out of range, no choice, or of another type."""
    if value == REQUIRED:
        raise ConfigError(f"{name} is not set: {field.metadata.get('help', 'it is required')} Add {name}=VALUE.")
    _check_type(name, field.type, value)
    if value is None:
        return
    rules = field.metadata
    choices = rules.get("choices")
    if choices is not None and value not in choices:
        known = [in_yaml(choice) for choice in choices]
        raise ConfigError(f"{name}={in_yaml(value)} is not one of {', '.join(known)}{nearest(str(value), known)}.")
    for rule, holds, words in _RANGES:
        if (limit := rules.get(rule)) is not None and not holds(value, limit):
            raise ConfigError(f"{name}={value} is out of range: it must be {words} {limit}.")
    if isinstance(value, float) and math.isinf(value):
        raise ConfigError(f"{name}={value} is out of range: it must be finite.")


def _check_type(name: str, annotation: Any, value: Any) -> None:
    """Raise ConfigError for a value of another type; annotations with other types than `_TYPES` accept any value."""
    text = annotation.__name__ if annotation in (bool, int, float, str) else str(annotation)
    types = [part.strip().partition("[")[0] for part in text.split("|")]
    if not all(each in _TYPES for each in types):
        return
    accepted = {kind for each in types for kind in _TYPES[each][0]}
    if bool in accepted if isinstance(value, bool) else isinstance(value, tuple(accepted)):
        return
    expected = [_TYPES[each][1] for each in types if each != "None"]
    if len(expected) > 1:  # without the examples
        expected = [words.partition(",")[0].partition(":")[0] for words in expected]
    found = f"{name} is null" if value is None else f"{name}={value!r} is {type(value).__name__}"
    raise ConfigError(f"{found}, expected {' or '.join(expected)}.")


def in_yaml(value: Any) -> str:
    """Format a value as in YAML: `true` and `null`, not `True` and `None`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_rules(config: Any, prefix: str) -> None:
    for base in type(config).__mro__:
        for parsed in vars(base).values():
            if isinstance(parsed, Parsed):
                parsed.of(config, prefix)
    if hasattr(config, "check"):
        config.check(prefix)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            _check_rules(value, f"{prefix}{field.name}.")
