"""Reads a user's YAML file, given as the first argument: settings as in a preset, or the complete config of a run."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from fsdp_shard.config.command_configs import COMMANDS, command_of
from fsdp_shard.config.config_yaml import escape
from fsdp_shard.config.reference import groups_of, settings_of
from fsdp_shard.config.yaml_values import load_yaml
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import flatten, in_yaml, walk

CONFIG_NAME = "own_file"  # name of the file in Hydra's ConfigStore
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # `\${`, as in config.yaml, is not one


def split_preset_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the YAML file that is the first argument apart from flags, if any, and all other arguments."""
    first = next((n for n, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if first is None or Path(arguments[first]).suffix not in (".yaml", ".yml"):
        return None, list(arguments)
    if "=" in arguments[first] and not Path(arguments[first]).is_file():  # an override such as output=a.yaml
        return None, list(arguments)
    rest = [*arguments[:first], *arguments[first + 1 :]]
    if flag := next((argument for argument in rest if argument.startswith(("--config-name", "-cn"))), None):
        raise ConfigError(f"{arguments[first]} and {flag} both name a config; give one of them.")
    return arguments[first], rest


def register_preset_file(file: str, schema: type) -> None:
    """Add the settings in `file` to Hydra's ConfigStore as CONFIG_NAME, on top of the command's defaults.

    Raises:
        ConfigError: The file cannot be read, is not a mapping in YAML, or is the config of another command.
    """
    content, command = _as_text(read_settings(file)), command_of(schema)
    _refuse_twice(file, content)
    defaults = content.pop("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(f"{file}: defaults is not a list of configs, such as `- override /adapter: lora`.")
    schemas = [entry for entry in defaults if isinstance(entry, str) and entry.endswith("_schema")]
    if schemas and f"{command}_schema" not in schemas:
        raise ConfigError(f"{file} is a config of {schemas[0].removesuffix('_schema')}, not of {command}.")
    groups = groups_of(schema)
    unset = {setting.name: setting.default for setting in settings_of(schema) if setting.has_no_default}
    content = _unset_nulls(content, unset)
    options = [key for key, value in content.items() if key in groups and isinstance(value, str) and "${" not in value]
    chosen = {key: content.pop(key) for key in options}
    sections = {setting.name.partition(".")[0] for setting in settings_of(schema) if "." in setting.name}
    for name in sections & content.keys():
        if not isinstance(content[name], dict):
            likely = "an option or settings" if name in groups else "settings"
            raise ConfigError(f"{file}: {name} is {in_yaml(content[name])}, and must have {likely}, such as in --help.")
    if not schemas:
        overrides = [{f"override /{group}": option} for group, option in chosen.items()]
        after = [entry for entry in defaults if entry != "_self_"]
        defaults = [f"/{command}", *after, *overrides, "_self_"]
    node = OmegaConf.create({"defaults": defaults})
    for name, value in content.items():
        OmegaConf.update(node, name, value)  # a name may have dots, as on the command line
    ConfigStore.instance().store(name=CONFIG_NAME, node=node)


def _as_text(value: Any, name: str = "") -> Any:
    r"""Escape `${` as `\${` in free texts, so that OmegaConf leaves them unchanged."""
    if isinstance(value, dict):
        return {key: _as_text(one, f"{name}.{key}" if name else str(key)) for key, one in value.items()}
    if name not in _prose():
        return value
    if isinstance(value, list):
        return [_as_text(one, name) for one in value]
    return _INTERPOLATION.sub(lambda found: escape(found[0]), value) if isinstance(value, str) else value


def _unset_nulls(value: Any, unset: dict[str, str], name: str = "") -> Any:
    """Replace null by the value in `unset`: in Hydra, only settings whose type allows it can be null."""
    if isinstance(value, dict):
        return {key: _unset_nulls(one, unset, f"{name}.{key}" if name else str(key)) for key, one in value.items()}
    return unset[name] if value is None and name in unset else value


@cache
def _prose() -> frozenset[str]:
    """The names of all settings that are text for a model, in which `${...}` has no special meaning."""
    found = (walk(schema()) for schema in COMMANDS.values())
    return frozenset(name for settings in found for name, field, _ in settings if field.metadata.get("is_prose"))


def _refuse_twice(file: str, content: dict[str, Any]) -> None:
    """Raise ConfigError for a setting given twice, as `model.path` and in `model`."""
    places: dict[str, str] = {}
    for key, value in content.items():
        names = [name for name, _ in flatten({key: value})]
        for name in names:
            if name in places:
                raise ConfigError(f"{file}: {name} is given twice, in {places[name]} and in {key}; give it once.")
        places |= dict.fromkeys(names, key)


def check_whole_config(file: Path, schema: type) -> None:
    """Raise ConfigError if a file for --config-name is not a complete config, or that of another command."""
    if not file.is_file():
        return  # Hydra reports it
    command, defaults = command_of(schema), read_settings(str(file)).get("defaults")
    if not defaults:
        raise ConfigError(
            f"{file} has some settings, and --config-name is for a whole config. Give the file as the first argument, "
            f"or begin it with `defaults: [{command}, _self_]`."
        )
    named = [entry.removesuffix("_schema") for entry in defaults if isinstance(entry, str)]
    if other := next((name for name in named if name in COMMANDS and name != command), None):
        raise ConfigError(f"{file} is a config of {other}, not of {command}.")


def unresolved_message(error: OmegaConfBaseException) -> str:
    """The message for a `${...}` that OmegaConf cannot replace, with the name of its setting."""
    reason = str(error).partition("\n")[0].rstrip(".").rpartition("while resolving interpolation: ")[2]
    return (
        f"{error.full_key or 'a setting'} has ${{...}}, which would be replaced by another setting or a variable, and "
        f"cannot be: {reason}. Name one that there is, as in ${{seed}} or ${{oc.env:HOME}}, or write \\${{ for text."
    )


def check_values(file: Path) -> None:
    """Raise ConfigError for a value that Hydra, which reads YAML 1.1, parses differently from the command line."""
    values, of_hydra = read_settings(str(file)), OmegaConf.to_container(OmegaConf.load(file))
    if (found := _first_difference(values, of_hydra)) is not None:
        name, value, other = found
        raise ConfigError(
            f"{file}: {name} is the text {value!r} as on the command line, but Hydra reads it as {other!r}; put it in "
            f"quotes, or give the file as the first argument."
        )


def _first_difference(value: Any, other: Any, name: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(value, dict) and isinstance(other, dict):
        pairs = ((f"{name}.{key}" if name else str(key), one, other.get(key)) for key, one in value.items())
    elif isinstance(value, list) and isinstance(other, list):
        pairs = ((f"{name}[{n}]", one, two) for n, (one, two) in enumerate(zip(value, other, strict=True)))
    else:
        return None if repr(value) == repr(other) else (name, value, other)
    return next((found for of, one, two in pairs if (found := _first_difference(one, two, of)) is not None), None)


def read_settings(file: str) -> dict[str, Any]:
    """The settings in a YAML file, by name.

    Raises:
        ConfigError: The file cannot be read, or is not a mapping in YAML.
    """
    try:
        content = load_yaml(Path(file).expanduser().read_text(encoding="utf-8"))
        if isinstance(content, dict):
            OmegaConf.create(_as_text(content))  # rejects values that no setting can have
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file of settings.") from None
    except GrammarParseError as error:
        raise ConfigError(f"{file}: {unresolved_message(error)}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict | None):
        raise ConfigError(f"{file} must have settings such as `train: {{steps: 100}}`, and has a list or a text.")
    return {str(name): value for name, value in (content or {}).items()}
