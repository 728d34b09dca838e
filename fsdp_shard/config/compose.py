"""Turns a command line into checked configs with Hydra: overrides, groups, presets, sweeps, --cfg.

Hydra only composes. It runs nothing, writes nothing and creates no directory; the recipe does that after all configs of
a sweep have been checked.
"""

import argparse
import dataclasses
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Generic, TypeVar

import hydra
from hydra.conf import HydraConf, RunDir, SweepDir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdp_shard.config.command_configs import OPTIONS, RunConfig, command_of
from fsdp_shard.config.config_errors import composition_error, flag_suggestion, unknown_setting_message
from fsdp_shard.config.preset_file import (
    CONFIG_NAME,
    check_values,
    check_whole_config,
    register_preset_file,
    split_preset_file,
)
from fsdp_shard.config.reference import groups_of, settings_of
from fsdp_shard.config.run_to_plan import register_run, split_run
from fsdp_shard.config.text_overrides import quote_text, refuse_unquoted_list
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import (
    check,
    is_chosen,
    missing_error,
    set_environment,
    shipped_directory,
)

C = TypeVar("C", bound=RunConfig)

_ONE_AT_A_TIME = threading.Lock()  # Hydra composes for the whole process

# A composed config, its number in a sweep, and the overrides that make it.
_Composed = tuple[Any, int | None, tuple[str, ...]]

# The groups of Hydra's own config that it needs to run jobs. Composing needs none of them, and each omitted group saves
# reading a file.
_FOR_JOBS = (
    {"launcher": "basic"},
    {"sweeper": "basic"},
    {"hydra_help": "default"},
    {"hydra_logging": "none"},
    {"job_logging": "none"},
)

# Overrides of Hydra itself, which only hydra.main applies.
_HYDRA_PREFIXES = ("hydra.", "hydra/", "+hydra", "~hydra")
_HYDRA_SETTINGS = ("hydra.mode", "hydra.searchpath")  # that have an effect although Hydra runs nothing


@dataclasses.dataclass(frozen=True)
class Job(Generic[C]):
    """A run: its config, and the overrides that distinguish it from the other runs of a sweep."""

    config: C
    overrides: tuple[str, ...]


def compose_config(schema: type[C], settings: Sequence[str]) -> C:
    """Compose the config of a command as its command line does, for a program that calls the stages itself.

    Groups choose their options here: the wrapper by `shard=fsdp1`, the optimizer by `optim=adafactor`.

    Args:
        schema: The config of a command, such as `fs.FinetuneConfig`, or your dataclass that extends one.
        settings: Settings as on the command line, such as "model.path=DIR"; a user's preset, a .yaml file, may be
            the first.

    Returns:
        The config, whose settings have been checked one by one. What takes it checks it again, so it may be changed;
        `check_finetune` and `start_run` also find settings of different sections that contradict each other.

    Raises:
        ConfigError: A setting is unknown, missing, of the wrong type, or out of range.

    Example:
        >>> config = fs.compose_config(fs.FinetuneConfig, [f"model.path={model}", f"data.path={text}", "shard=fsdp1"])
        >>> config.train.steps = 10
        >>> fs.check_finetune(config)
    """
    refuse_flags(settings, "compose_config")
    return compose_jobs(schema, settings, "compose_config")[0].config


def refuse_flags(settings: Sequence[str], function: str) -> None:
    """Raise ConfigError for what is not a list of settings, as flags such as --multirun are not.

    Args:
        settings: What the caller gave.
        function: The public function that was called.
    """
    is_list = isinstance(settings, Sequence) and not isinstance(settings, str)
    if not is_list or not all(isinstance(setting, str) for setting in settings):
        raise ConfigError(f"{function} takes a list of settings, such as ['train.steps=4'], not {settings!r}.")
    if flags := [setting for setting in settings if setting.startswith("-")]:
        raise ConfigError(f"{flags[0]} is a flag of the command line, not a setting; {function} takes settings only.")


def compose_jobs(schema: type[C], arguments: Sequence[str], program: str) -> list[Job[C]]:
    """Compose and check the configs of a command line.

    Args:
        schema: The config dataclass of the command.
        arguments: Overrides and flags, without the command; a user's YAML file may come first.
        program: The command as the user typed it, for Hydra's messages.

    Returns:
        The jobs: one, several for a sweep, none for flags that only print.

    Raises:
        ConfigError: A setting is unknown, missing, of the wrong type, out of range, or contradicts another.
    """
    is_sweep = bool({"-m", "--multirun"} & set(arguments))
    _refuse_hydra_settings(arguments)
    if removed := next((group for group in groups_of(schema) if f"~{group}" in arguments), None):
        raise ConfigError(f"~{removed} would leave {command_of(schema)} without {removed}, which it needs; remove it.")
    run, arguments = split_run(arguments, schema)
    preset_file, arguments = split_preset_file(arguments)
    if run is not None and preset_file is not None:
        raise ConfigError(f"{preset_file} and run={run} both have settings; give one of them.")
    quoted = quote_text(arguments, settings_of(schema), is_sweep=is_sweep)
    try:
        with _preserved_hydra_state():
            if preset_file is not None:
                register_preset_file(preset_file, schema)
            if run is not None:
                preset_file = register_run(run, schema)
            composed = _compose(schema, quoted, program, command_of(schema) if preset_file is None else CONFIG_NAME)
    except (ConfigError, BrokenPipeError):
        raise
    except Exception as error:  # Hydra's exceptions, which include assertions, share no base class
        # Hydra's own traceback, two screens long, does not help callers from Python.
        raise composition_error(error, schema, quoted, preset_file) from None
    if is_sweep and len(composed) == 1:
        refuse_unquoted_list(arguments, quoted)
    if is_sweep and not composed:
        raise ConfigError("Hydra's launcher or sweeper ran no job; leave hydra/launcher and hydra/sweeper unchanged.")
    try:
        jobs = [_job(config, number, overrides, schema) for config, number, overrides in composed]
    except OmegaConfBaseException as error:
        raise composition_error(error, schema, quoted, preset_file) from error
    for job in jobs:
        check(job.config)
    return jobs


def _refuse_hydra_settings(arguments: Sequence[str]) -> None:
    """Raise ConfigError for Hydra settings and flags about jobs, which Hydra does not run here."""
    for argument in arguments:
        name = argument.partition("=")[0]
        setting = name.lstrip("+~")
        if name in ("--package", "-p") or (setting.startswith("hydra.") and setting not in _HYDRA_SETTINGS):
            raise ConfigError(
                f"{argument} has no effect: Hydra only composes the settings, and runs nothing. Remove it; "
                f"run_dir=DIR is the directory of a run, and that of a sweep."
            )


@contextmanager
def _preserved_hydra_state() -> Iterator[None]:
    """Restore Hydra's global state after composing, for programs that use Hydra themselves."""
    running, store, current = GlobalHydra.instance(), ConfigStore.instance(), HydraConfig.instance()
    with _ONE_AT_A_TIME:
        Plugins.instance()  # its creation adds their configs to the store
        hydra_before, repo, config = running.hydra, store.repo, current.cfg
        store.repo = _copy_groups(repo)
        running.clear()
        try:
            yield
        finally:
            running.hydra, store.repo, current.cfg = hydra_before, repo, config


def _copy_groups(repo: dict[str, Any]) -> dict[str, Any]:
    """Copy the groups of a ConfigStore, with the same options."""
    return {name: _copy_groups(value) if isinstance(value, dict) else value for name, value in repo.items()}


def _compose(schema: type, arguments: list[str], program: str, config_name: str) -> list[_Composed]:
    if not any(argument.startswith(("-", *_HYDRA_PREFIXES)) for argument in arguments):
        # hydra.main would compose it twice, first to detect a sweep.
        _register(schema, ".", ())
        with hydra.initialize_config_dir(str(shipped_directory("conf")), version_base="1.3"):
            return [(hydra.compose(config_name, arguments), None, tuple(arguments))]
    with tempfile.TemporaryDirectory() as scratch:
        _register(schema, scratch, _FOR_JOBS)
        return _run_hydra_main(schema, arguments, program, config_name)


def _register(schema: type, scratch: str, defaults: Sequence[Mapping[str, str]]) -> None:
    """Add the names used in YAML files to Hydra's ConfigStore: `schema`, its groups' options, Hydra's own settings.

    A recipe's own schema, with its own settings, replaces the one that it extends. Hydra logs nothing, and writes the
    files of a sweep to `scratch`.
    """
    store: Any = ConfigStore.instance()
    store.store(name=f"{command_of(schema)}_schema", node=schema)
    for field in dataclasses.fields(schema):
        for option, node in OPTIONS.get(field.name, {}).items():
            store.store(group=field.name, name=option, node=node)
    conf = HydraConf(defaults=[*defaults], run=RunDir("."), sweep=SweepDir(scratch, "jobs"), output_subdir=None)
    store.store(group="hydra", name="config", node=conf, provider="fsdp-shard")


def _run_hydra_main(schema: type, arguments: list[str], program: str, config_name: str) -> list[_Composed]:
    """Apply Hydra's flags: a sweep, a config that is only printed, presets from another directory."""
    composed: list[_Composed] = []

    def collect(config: Any) -> None:
        job = HydraConfig.get().job
        number = None if OmegaConf.is_missing(job, "num") else int(job.num)  # only sweeps number their jobs
        composed.append((config, number, tuple(HydraConfig.get().overrides.task)))
        if conf != shipped_directory("conf"):
            for file in _chosen_files(conf):
                check_values(file)

    conf, arguments = _preset_directories(arguments, schema)
    # argparse requires contiguous positional arguments, but users put -m anywhere.
    arguments = sorted(arguments, key=lambda argument: "=" in argument and not argument.startswith("-"))
    stderr, own_argv = io.StringIO(), sys.argv
    sys.argv = [program, *arguments]  # from which hydra.main reads the command line
    try:
        with set_environment({"HYDRA_FULL_ERROR": "1"}), redirect_stderr(stderr):  # exceptions are passed on unchanged
            hydra.main(version_base="1.3", config_path=str(conf), config_name=config_name)(collect)()
    except SystemExit as leaving:
        if leaving.code:
            line = stderr.getvalue().strip().rpartition("\n")[2]
            message = line.partition("error: ")[2] or line  # argparse prints the usage and the program's name first
            message = f"{message[:1].upper()}{message[1:]}{flag_suggestion(message, schema)}"
            raise ConfigError(f"{message}; settings have the form name=value; --help lists them.") from None
    else:
        sys.stderr.write(stderr.getvalue())
    finally:
        sys.argv = own_argv
    return composed


def _chosen_files(conf: Path) -> list[Path]:
    """The files of a directory from which the config is composed."""
    hydra_config = HydraConfig.get()
    names = [str(hydra_config.job.config_name)]
    for group, chosen in hydra_config.runtime.choices.items():
        options = chosen if isinstance(chosen, Sequence) and not isinstance(chosen, str) else [chosen]
        names += [f"{group.partition('@')[0]}/{option}" for option in options]
    files = (conf / f"{name.removesuffix('.yaml')}.yaml" for name in names)
    return [file for file in files if file.is_file()]


def _preset_directories(arguments: list[str], schema: type) -> tuple[Path, list[str]]:
    """The directory that Hydra searches first, and the arguments with --config-dir as the one searched next.

    A file in the user's directory takes precedence over a shipped one of the same name; in Hydra, it is the reverse.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn")
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        return shipped_directory("conf"), arguments  # Hydra reports the error
    own = shipped_directory("conf") if options.config_dir is None else Path(options.config_dir).expanduser().absolute()
    if not own.is_dir():
        raise ConfigError(f"--config-dir {options.config_dir}: there is no such directory.")
    if options.config_name is not None:
        check_whole_config(own / f"{options.config_name.removesuffix('.yaml')}.yaml", schema)
        rest = [*rest, f"--config-name={options.config_name}"]
    return own, rest if options.config_dir is None else [*rest, f"--config-dir={shipped_directory('conf')}"]


def _job(composed: Any, number: int | None, overrides: tuple[str, ...], schema: type[C]) -> Job[C]:
    # Hydra accepts `+name=value` for any name, although nothing would read it.
    if (name := next(_unknown_keys(composed), None)) is not None:
        raise ConfigError(unknown_setting_message(name, schema))
    _fill_alternatives(composed)
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise missing_error(missing, {setting.name: setting.help for setting in settings_of(schema)})
    config: C = OmegaConf.to_object(composed)  # type: ignore[assignment]  # the schema is C
    if config.run_dir in ("", "null"):
        raise ConfigError(
            f"run_dir is {config.run_dir or 'empty'}; give a directory, or remove it for a directory named by date."
        )
    run_dir = os.path.expanduser(config.run_dir)  # a shell does not expand the ~ in name=~/directory
    if number is not None:
        run_dir = str(Path(run_dir) / str(number))
    config = dataclasses.replace(config, run_dir=run_dir)
    raw: Any = OmegaConf.to_container(composed, resolve=False)
    # A sweep keeps all directories, as its table is created from them.
    config.explicit_settings = frozenset(override.lstrip("+~").partition("=")[0] for override in overrides)
    config.is_default_run_dir = number is None and raw["run_dir"] == schema.run_dir
    return Job(config, overrides)


def _fill_alternatives(composed: Any) -> None:
    """Set required settings to "" if their dataclass has an alternative (`instead`) that is set.

    `instead` maps a setting to alternatives: `other` (with any value), `other=value` or `other=value|value`.
    """
    for name, others in getattr(OmegaConf.get_type(composed), "instead", {}).items():
        section, _, leaf = name.rpartition(".")
        if section and section not in composed:  # removed by ~section, which is reported later
            continue
        holder = composed[section] if section else composed
        if OmegaConf.is_missing(holder, leaf) and any(is_chosen(composed, other) for other in others):
            holder[leaf] = ""
    for _, section in _sections(composed):
        _fill_alternatives(section)


def _unknown_keys(composed: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of keys that are not fields of their section's dataclass."""
    kind = OmegaConf.get_type(composed)
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(composed)
    yield from (f"{prefix}{key}" for key in composed if key not in fields)
    for key, section in _sections(composed):
        if key in fields:
            yield from _unknown_keys(section, f"{prefix}{key}.")


def _sections(composed: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, mapping) for each mapping in `composed`."""
    for key in composed:
        is_set = not OmegaConf.is_interpolation(composed, key) and not OmegaConf.is_missing(composed, key)
        if is_set and isinstance(section := composed[key], DictConfig):
            yield key, section
