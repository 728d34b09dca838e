"""Turns Hydra and OmegaConf exceptions into one-paragraph ConfigErrors with the setting and the closest known one."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
    ValidationError,
)

from fsdp_shard.config.command_configs import COMMANDS, command_of
from fsdp_shard.config.names_elsewhere import known_elsewhere
from fsdp_shard.config.preset_file import CONFIG_NAME, unresolved_message
from fsdp_shard.config.reference import groups_of, settings_of
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import REQUIRED, nearest


def composition_error(
    error: BaseException, schema: type, arguments: Sequence[str], preset_file: str | None = None
) -> ConfigError:
    """The ConfigError for an exception of Hydra or OmegaConf.

    Args:
        error: The exception raised while composing.
        schema: The config dataclass of the command.
        arguments: Overrides and flags.
        preset_file: The user's settings file.
    """
    if isinstance(error, InterpolationResolutionError | UnsupportedInterpolationType):
        is_in_file = preset_file is not None and not any(one.startswith(f"{error.full_key}=") for one in arguments)
        return ConfigError(f"{preset_file}: {unresolved_message(error)}" if is_in_file else unresolved_message(error))
    if message := _wrong_override_message(error, schema, arguments) or _wrong_value_message(error, schema):
        return ConfigError(message.replace(f"{CONFIG_NAME}.yaml", preset_file or ""))
    name = _config_not_found(error)
    if name.startswith("hydra/"):
        group, _, option = name.rpartition("/")
        return ConfigError(
            f"{group}={option}: plugins of Hydra are not supported, and the runs of -m follow one another; remove "
            f"{group}."
        )
    if preset_file is not None and name:
        return ConfigError(f"{preset_file}: {_no_such_config_message(name, schema)}")
    message = str(error) if error.__cause__ is None else f"{error}: {error.__cause__}"
    message = " ".join(message.split()).replace(f"{Path.cwd()}/", "")
    if preset_file is not None and message.startswith("Error resolving interpolation"):  # of an option in its defaults
        message = f"{preset_file}: {message}"
    return ConfigError(message.replace(f"In '{CONFIG_NAME}'", preset_file or ""))


def _config_not_found(error: BaseException) -> str:
    """The config that Hydra could not find, such as group/option; empty for other errors."""
    match = re.search(r"Could not (?:find|load) '([^']+)'", str(error))
    return match[1] if match else ""


def _no_such_config_message(name: str, schema: type) -> str:
    group, _, option = name.rpartition("/")
    if options := groups_of(schema).get(group):
        return f"{group}={option}: there is no such option; {group} has {', '.join(options)}{nearest(option, options)}."
    return f"there is no config {name}; `fsdp-shard ls` lists them."


def _wrong_override_message(error: BaseException, schema: type, arguments: Sequence[str]) -> str | None:
    """The message for the first override that cannot be parsed, or names an unknown setting, group or option."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value_of_flag = before.startswith("-") and "=" not in argument
        if argument.startswith("-") or is_value_of_flag or "hydra" in argument.partition("=")[0]:
            continue
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:
            return _unreadable_message(argument, schema)
        if (message := _unknown_override_message(override, schema, error, arguments)) is not None:
            return message
        if override.is_sweep_override() and "Ambiguous value" in str(error):
            value = argument.partition("=")[2]
            return (
                f"{argument} has several values, which only -m takes, as a run for each; give one of them, or "
                f"[{value}] where a list is expected."
            )
    return None


def _unreadable_message(argument: str, schema: type) -> str:
    if "=" not in argument:
        is_file = argument.endswith((".yaml", ".yml"))
        settings = settings_of(schema)
        # An argument that is not a setting's name is most likely the model or checkpoint.
        needed = (setting.name for setting in settings if setting.default == REQUIRED and not setting.only_with)
        required = next(needed, "model.path")
        named = f"{argument}=VALUE" if argument in {setting.name for setting in settings} else f"{required}={argument}"
        hint = "; one file of settings is read, and must come first" if is_file else f", such as {named}"
        return f"{argument} is not of the form name=value{hint}."
    name, _, value = argument.partition("=")
    if name != name.strip():
        return f"{argument} has spaces around its =; write {name.strip()}={value.strip()}."
    return (
        f"{argument} cannot be parsed. A list is written {name}=[a,b], and a mapping {name}={{a: b}}. Text with "
        f'other characters than letters, digits and ./:-_, needs quotes, such as ["a b"]; keys have no quotes.'
    )


def _unknown_override_message(
    override: Any, schema: type, error: BaseException, arguments: Sequence[str]
) -> str | None:
    settings = {setting.name: setting for setting in settings_of(schema)}
    groups = groups_of(schema)
    name = override.key_or_group
    if name in groups:
        return _unknown_option_message(override, groups, error, schema)
    if name in settings:
        return None
    if inside := [setting.name for setting in settings.values() if setting.name.startswith(f"{name}.")]:
        return None if isinstance(override.value(), dict) else _whole_section_message(override, inside)
    if (outer := next((setting for setting in settings if name.startswith(f"{setting}.")), None)) is not None:
        inside = name.removeprefix(f"{outer}.")
        value = settings[outer].default
        return None if value.startswith("{") else f"{name}: {outer} is {value}, not a mapping that has {inside}."
    return unknown_setting_message(name, schema, [argument.partition("=")[0].lstrip("+~") for argument in arguments])


def _whole_section_message(override: Any, inside: Sequence[str]) -> str:
    name, value = override.key_or_group, override.input_line.partition("=")[2]
    likely = f"{name}.path" if f"{name}.path" in inside else inside[0]
    return f"{name}={value}: {name} is a section of settings and has no value itself; did you mean {likely}={value}?"


def unknown_setting_message(name: str, schema: type, given: Sequence[str] = ()) -> str:
    """The message for a setting that does not exist, or not with the selected options.

    Args:
        name: The setting.
        schema: The config dataclass of the command.
        given: Names of all settings that were given. If some of them belong to another command, as `name` does, the
            message names them all.
    """
    settings = {setting.name: setting for setting in settings_of(schema)}
    if name in settings:
        needed = settings[name].only_with or f"the options of {name.partition('.')[0]} that have it"
        return f"{name} needs {needed}; add that, or remove {name}."
    command, last = command_of(schema), name.rpartition(".")[2]
    is_known = known_elsewhere(name, sorted(settings)) or known_elsewhere(last, sorted(settings))
    if not is_known and (other := _command_with(name)) is not None:
        names = [one for one in dict.fromkeys([*given, name]) if one not in settings and _command_with(one) == other]
        are, them = ("is a setting", "it") if len(names) == 1 else ("are settings", "them")
        alike = [setting for setting in settings if setting.rpartition(".")[2] == last]
        close = f" (or did you mean {alike[0]}?)" if len(names) == len(alike) == 1 else ""
        return f"{', '.join(names)} {are} of {other}, not of {command}; remove {them}{close}."
    return f"{name} is not a setting of {command}{_suggestion(name, schema)}. See --help for all of them."


def _command_with(name: str) -> str | None:
    """The first command that has a setting; None if there is none."""
    for command, schema in COMMANDS.items():
        if any(setting.name == name for setting in settings_of(schema)):
            return command
    return None


def flag_suggestion(message: str, schema: type) -> str:
    """Return ` (did you mean X?)` for the first argument in `message`, such as `--learning_rate=1e-4`."""
    flag = re.search(r"Unrecognized arguments: --([\w.-]+)", message, re.IGNORECASE)
    if flag and any(setting.name == flag[1] for setting in settings_of(schema)):
        return f" (did you mean {flag[1]}=VALUE?)"
    return _suggestion(flag[1], schema) if flag else ""


def _suggestion(name: str, schema: type) -> str:
    known = sorted({*(setting.name for setting in settings_of(schema)), *groups_of(schema)})
    section, _, last = name.rpartition(".")
    if close := known_elsewhere(name, known) or (known_elsewhere(last, known) if section else ""):
        return close
    last_parts = {setting.rpartition(".")[2]: setting for setting in reversed(known)}
    if last not in last_parts and (close := nearest(name, known)):
        return close
    matches = get_close_matches(last, last_parts, n=1)  # the part that users tend to remember
    return f" (did you mean {last_parts[matches[0]]}?)" if matches else ""


def _unknown_option_message(
    override: Any, groups: dict[str, list[str]], error: BaseException, schema: type
) -> str | None:
    """The message for an option that Hydra could not find; other presets may be in the user's --config-dir."""
    group = override.key_or_group
    if override.is_sweep_override():
        of, _, option = _config_not_found(error).rpartition("/")
        if of != group:
            return None
    elif override.value() is None or _config_not_found(error):
        option = override.get_value_element_as_str()
    else:
        return None
    if option in groups[group]:
        return None
    return _no_such_config_message(f"{group}/{option}", schema)


def _wrong_value_message(error: BaseException, schema: type) -> str | None:
    """The message for a value of the wrong type, or for an unknown key in a YAML file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    name = str(getattr(cause, "full_key", None) or "")
    match = re.match(r"In '([^']+)'", str(error))  # the YAML file: `In 'group/option': ...`
    where = f"{match[1]}.yaml: " if match else ""
    if match and isinstance(cause, ConfigAttributeError | ConfigKeyError) and name in groups_of(schema):
        return f"{where}its settings are taken for a section {name}; make `# @package _global_` its first line."
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and name:
        return f"{where}{unknown_setting_message(name, schema)}"
    if isinstance(cause, ValidationError) and name:
        return f"{where}{_expected_value(name, str(cause.msg))}."
    return None


_TYPES = {
    **dict.fromkeys(("int", "Integer"), "a whole number"),
    **dict.fromkeys(("float", "Float"), "a number"),
    **dict.fromkeys(("bool", "Boolean"), "true or false"),
    **dict.fromkeys(("str", "String"), "text"),
}


def _expected_value(name: str, message: str) -> str:
    """`Value 'abc' of type 'str' could not be converted to Integer` without the names of Python types."""
    message = message.partition("\n")[0]
    if match := re.match(r"Value '(.*)' (?:of type '\w+' could not be converted to|is not a valid) (\w+)", message):
        hint = "; a range is for `fsdp-shard plan search=true`" if name == "launch.ranks" and ":" in match[1] else ""
        return f"{name}={match[1]} is not {_TYPES.get(match[2], match[2])}{hint}"
    if match := re.match(r"Value '(.*)' of type .* type hint '.*Union\[(.*)\]+'", message):
        kinds = [_TYPES[kind] for kind in match[2].rstrip("]").split(", ") if kind in _TYPES]
        return f"{name}={match[1]} is not {' or '.join(kinds)}"
    if message.endswith("is not a ListConfig, list or tuple."):
        return f"{name} is a list, which is written [a,b], also if it has one element: [a]"
    if message.endswith("is not Optional"):
        return f"{name}=null: this setting needs a value; remove it to use its default"
    return f"{name}: {message.rstrip('.')}"
