"""From a command line to checked configs, through Hydra: overrides, groups, presets, sweeps, --cfg, --help.

Hydra only composes here. It runs nothing, writes nothing and makes no directory: that is left to the recipe, after all
configs of a sweep have been checked. Knows no recipe.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from fsdp_shard.config.common import RunConfig, command_of, options_of, register, schema_name
from fsdp_shard.config.config_errors import explain, unknown
from fsdp_shard.config.reference import help_text
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import check, redact, set_environment, shipped

C = TypeVar("C", bound=RunConfig)

# A composed config, its number in a sweep, and the overrides that make it.
_Composed = tuple[Any, int | None, tuple[str, ...]]

# What Hydra needs of its own to run jobs. Each entry left out is a file less to compose: its --help, `output` and
# `env` are not used, and none of all this where it only composes.
_FOR_JOBS = (
    {"launcher": "basic"},
    {"sweeper": "basic"},
    {"hydra_help": "default"},
    {"hydra_logging": "none"},
    {"job_logging": "none"},
)

# Overrides of Hydra itself, which only its own program heeds.
_HYDRAS_OWN = ("hydra.", "hydra/", "+hydra", "~hydra")


@dataclass(frozen=True)
class Job(Generic[C]):
    """One run to make: its config, and the overrides that tell it from the others of a sweep."""

    config: C
    overrides: tuple[str, ...]


def compose_jobs(schema: type[C], arguments: Sequence[str], program: str) -> list[Job[C]]:
    """The jobs that `arguments` ask of the command `program`: one, several for a sweep, none for --help and the like.

    Each config is complete and inside its ranges, or ConfigError says what is not.
    """
    if {"-h", "--help"} & set(arguments):
        # Hydra's own would take seconds: it lists every group there is by copying the whole ConfigStore for each.
        print(help_text(schema, program))
        return []

    try:
        composed = _through_hydra(schema, list(arguments), program)
    except (ConfigError, BrokenPipeError):
        raise
    except Exception as error:  # Hydra has no base class for what it raises; assertions are among it
        raise explain(error, schema, arguments) from error
    if not composed and {"-m", "--multirun"} & set(arguments):
        raise ConfigError("Hydra's launcher or sweeper has run no job here; leave hydra/launcher and sweeper alone.")
    jobs = [_job(config, number, overrides, schema) for config, number, overrides in composed]
    for job in jobs:
        check(job.config)
    return jobs


def _through_hydra(schema: type, arguments: list[str], program: str) -> list[_Composed]:
    register(schema)
    if not any(argument.startswith(("-", *_HYDRAS_OWN)) for argument in arguments):
        return [_once(schema, arguments)]
    with tempfile.TemporaryDirectory() as scratch:
        _register_hydra(scratch, _FOR_JOBS)
        return _as_hydras_program(schema, arguments, program)


def _once(schema: type, overrides: list[str]) -> _Composed:
    """One config of overrides alone. hydra.main would compose it twice, first of all to see whether it is a sweep."""
    from hydra import compose, initialize_config_dir

    _register_hydra(".", ())
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        return compose(command_of(schema), overrides), None, tuple(overrides)


def _as_hydras_program(schema: type, arguments: list[str], program: str) -> list[_Composed]:
    """What Hydra's flags ask for: a sweep, a config that is shown and not run, presets from another directory."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    composed: list[_Composed] = []

    def take(config: Any) -> None:
        mine = HydraConfig.get()
        number = int(mine.job.num) if mine.mode == RunMode.MULTIRUN else None
        composed.append((config, number, tuple(mine.overrides.task)))

    conf, arguments = _with_own_presets(arguments)
    # argparse takes what is positional in one stretch only, and users put -m anywhere.
    arguments = sorted(arguments, key=lambda argument: "=" in argument and not argument.startswith("-"))
    with _own_errors(), _as_program(program, arguments):
        hydra.main(version_base="1.3", config_path=str(conf), config_name=command_of(schema))(take)()
    return composed


def _with_own_presets(arguments: list[str]) -> tuple[Path, list[str]]:
    """The directory that Hydra looks in first, and the arguments with --config-dir naming the one it looks in next.

    A file in the user's directory goes before a shipped one of the same name; Hydra has them the other way round.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd")
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        return shipped("conf"), arguments  # Hydra says what is wrong with it
    if options.config_dir is None:
        return shipped("conf"), arguments
    own = Path(options.config_dir).expanduser().absolute()
    if not own.is_dir():
        raise ConfigError(f"--config-dir {options.config_dir}: there is no such directory.")
    return own, [*rest, f"--config-dir={shipped('conf')}"]


def _register_hydra(scratch: str, defaults: Sequence[Mapping[str, str]]) -> None:
    """Hydra's own settings: no logging, and a scratch directory for what it writes in a sweep."""
    from hydra.conf import HydraConf, RunDir, SweepDir
    from hydra.core.config_store import ConfigStore

    conf = HydraConf(defaults=[*defaults], run=RunDir("."), sweep=SweepDir(scratch, "jobs"), output_subdir=None)
    store: Any = ConfigStore.instance()
    store.store(group="hydra", name="config", node=conf, provider="fsdp-shard")


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Let exceptions out of Hydra, and turn its refusal of a flag into ours."""
    said = io.StringIO()
    try:
        with set_environment({"HYDRA_FULL_ERROR": "1"}), contextlib.redirect_stderr(said):
            yield
    except SystemExit as leaving:
        if leaving.code:
            raise ConfigError(_last_words(said.getvalue())) from None
    else:
        sys.stderr.write(said.getvalue())


def _last_words(said: str) -> str:
    """The message of argparse, without the usage above it and the program's name before it."""
    line = said.strip().rpartition("\n")[2]
    message = line.partition("error: ")[2] or line
    return f"{message[:1].upper()}{message[1:]}; settings are given as name=value, and --help lists them."


@contextlib.contextmanager
def _as_program(program: str, arguments: list[str]) -> Iterator[None]:
    """hydra.main reads the command line from sys.argv."""
    before = sys.argv
    sys.argv = [program, *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _job(composed: Any, number: int | None, overrides: tuple[str, ...], schema: type[C]) -> Job[C]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # Hydra takes `+name=value` for any name, and then nothing would read it.
    if (name := next(_unread(composed), None)) is not None:
        raise ConfigError(unknown(name, schema))
    _let_others_stand_in(composed)
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise ConfigError(_not_given(missing, schema))
    try:
        config: C = OmegaConf.to_object(composed)  # type: ignore[assignment]  # the schema is C
    except OmegaConfBaseException as error:
        raise explain(error, schema, overrides) from error
    run_dir = os.path.expanduser(config.run_dir)  # a shell leaves the ~ of name=~/place to the program
    if number is not None:
        run_dir = str(Path(run_dir) / str(number))
    return Job(dataclasses.replace(config, run_dir=run_dir), overrides)


def _let_others_stand_in(composed: Any) -> None:
    """Settings that must be given, but for another one of their section (its dataclass's `instead`): empty then.

    The other one is there, or `name=value` says which value of it is meant.
    """
    from omegaconf import DictConfig, OmegaConf

    for name, other in getattr(OmegaConf.get_type(composed), "instead", {}).items():
        key, _, value = other.partition("=")
        section, _, leaf = name.rpartition(".")
        if section and section not in composed:  # taken away by ~section, which is told of later
            continue
        holder = composed[section] if section else composed
        if OmegaConf.is_missing(holder, leaf) and (composed[key] == value if value else composed[key]):
            holder[leaf] = ""
    for key in composed:
        if isinstance(node := composed._get_node(key), DictConfig) and not node._is_none() and not node._is_missing():
            _let_others_stand_in(node)


def _unread(composed: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the keys that no field of the dataclass behind their section has."""
    from omegaconf import DictConfig, OmegaConf

    kind = OmegaConf.get_type(composed)
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(composed)
    for key in composed:
        if key not in fields:
            yield f"{prefix}{key}"
        elif isinstance(node := composed._get_node(key), DictConfig) and not node._is_none() and not node._is_missing():
            yield from _unread(node, f"{prefix}{key}.")


def _not_given(missing: Sequence[str], schema: type) -> str:
    from fsdp_shard.config.reference import settings_of

    helps = {setting.name: setting.help for setting in settings_of(schema)}
    said = "; ".join(f"{name} ({helps[name].rstrip('.')})" if name in helps else name for name in missing)
    verb = "is" if len(missing) == 1 else "are"
    return f"{said} {verb} not set. Add {' '.join(f'{name}=VALUE' for name in missing)}."


def write_config(config: RunConfig) -> None:
    """Write RUN_DIR/config.yaml, whole or not at all, over that of an earlier run that this one resumes.

    It is a config for `--config-name`, so that the same run can be made again from it.
    """
    directory, text = Path(config.run_dir), redact(_as_yaml(config))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / "config.yaml").is_file() and (directory / "config.yaml").read_bytes() == text.encode():
            return
        temporary = directory / f".config.yaml.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(directory / "config.yaml")
    except OSError as error:
        raise ConfigError(
            f"run_dir={config.run_dir} cannot be written: {error.strerror or error}. Give a directory that can be made."
        ) from error


def _as_yaml(config: RunConfig) -> str:
    """All settings; the defaults list before them has what they do not tell: the dataclass behind each group."""
    from omegaconf import OmegaConf

    command = command_of(type(config))
    chosen: list[Any] = [
        {group: option}
        for group in (field.name for field in dataclasses.fields(config))
        for option, node in options_of(group).items()
        if type(getattr(config, group)) is node
    ]
    comment = f"# To run this again: fsdp-shard {command} --config-dir THIS_DIRECTORY --config-name config run_dir=NEW"
    defaults = OmegaConf.to_yaml({"defaults": [schema_name(command), *chosen, "_self_"]})
    return f"{comment}\n{defaults}{OmegaConf.to_yaml(OmegaConf.structured(config))}"
