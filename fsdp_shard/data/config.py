"""The settings of `data.*`, their checks, and the settings of each source of a mixture.

Imports neither torch nor numpy, so that composing a config is quick.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from fsdp_shard.data.kinds.kind import Kind, RowSettings
from fsdp_shard.data.kinds.registry import KINDS, KindSettings
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import CAUSAL, MASKED_LM
from fsdp_shard.utils import REQUIRED, check_one, nearest, refuse_remote, setting, user_cache


@dataclass
class DataConfig(KindSettings):
    """Settings of the training data and of the held-out data."""

    # Not annotated, so they are not settings: the section of the settings in messages, and the default of `split`.
    section = "data"
    default_split = "train"

    # Settings that another one replaces.
    instead: ClassVar[dict[str, tuple[str, ...]]] = {"path": ("mixture",)}

    subset: str | None = setting(None, "Configuration of a dataset on the hub, such as wikitext-2-raw-v1.")
    split: str = setting(default_split, "Split of the dataset in data.path, on the hub or with saved splits.")
    mixture: Any = field(
        default=None,
        metadata={
            "help": "Several named sources instead of data.path: {books: {path: a.jsonl, weight: 2}, web: {path: "
            "b.parquet}}. weight (default 1) is the source's proportion of the samples; a source that is used up is "
            "repeated. Each may have its own kind, subset, split, sample_by and columns."
        },
    )
    kind: str = setting(
        "text",
        f"Kind of a row. {'. '.join(f'{name}: {kind.help}' for name, kind in KINDS.items())}.",
        choices=tuple(KINDS),
    )
    streaming: bool = setting(
        False,
        "Read and tokenize data.path, or each source of data.mixture, while training and only as far as needed, for "
        "data that is too large to tokenize first. Every rank reads all rows and tokenizes its share, ahead of need.",
    )
    shuffle_buffer: int = setting(
        1000,
        "With data.streaming: number of rows (of each source of data.mixture) that are read and then trained in a "
        "seeded order; 1: in the order of the files. With data.packing, these rows are packed together.",
        minimum=1,
    )
    eval_path: str | None = setting(None, "Held-out data, given like data.path. Default: see data.eval_fraction.")
    eval_split: str = setting(
        "validation", "Split of the dataset in data.eval_path or data.eval_sets, like data.split."
    )
    eval_sets: Any = field(
        default=None,
        metadata={
            "help": "Several named held-out sets instead of data.eval_path: {code: {path: c.jsonl}, news: {path: "
            "n.txt}}. Each evaluation reports the loss of each set, and the loss over the tokens of all sets, which "
            "decides the best step. Each set may have its own kind, subset, split, sample_by and columns."
        },
    )
    eval_fraction: float = setting(
        0.0,
        "Fraction of data.path (of each source of data.mixture) to hold out if data.eval_path is not given: the last "
        "windows, which are then not trained; with data.packing=true the last rows, in windows of their own.",
        minimum=0.0,
        maximum=0.5,
    )
    packing: bool = setting(
        False,
        "Pack several rows (text: documents) into each window by best fit, with separate positions and attention; "
        "kind=preference: pairs, whose prompt is computed once, or answers with a label. Otherwise each row has its "
        "own window (text: documents continue from window to window).",
    )
    target_length: int | None = setting(
        None, "model.task=seq2seq: maximum tokens of a target. Default: data.sequence_length.", minimum=1
    )
    mask_fraction: float = setting(
        0.15, "model.task=masked_lm: fraction of the tokens to mask and predict.", above=0.0, maximum=1.0
    )
    workers: int = setting(
        1,
        "Processes that tokenize, on each rank with data.streaming; 0 or 1: no extra process, only the tokenizer's own "
        "threads.",
        minimum=0,
    )
    cache_dir: str | None = setting(
        None,
        "Directory for tokenized data, visible to every rank; during tokenization it also holds the rows. Default: "
        "~/.cache/fsdp-shard/tokens.",
    )

    def check(self, prefix: str) -> None:
        """Raise ConfigError if settings contradict each other."""
        for kind in KINDS.values():
            kind.check_kind(self, prefix)
        if self.cache_dir is not None:
            refuse_remote(self.cache_dir, f"{prefix}cache_dir", "give a directory that every rank can reach.")
        _check_mixture(self, prefix)
        _check_streaming(self, prefix)
        held_out = {
            "eval_path": self.eval_path is not None,
            "eval_sets": bool(self.eval_sets),
            "eval_fraction": self.eval_fraction > 0,
        }
        given = [f"{prefix}{name}={getattr(self, name)}" for name, is_given in held_out.items() if is_given]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both say what to hold out; give one of them.")
        _check_own_settings(held_out_sets_of(self, prefix), f"{prefix}eval_sets", self.eval_sets)
        if not (self.eval_path or self.eval_sets) and self.eval_split != default_of("eval_split"):
            raise ConfigError(
                f"{prefix}eval_split={self.eval_split} is for {prefix}eval_path, which is not given; give that too, "
                f"such as {prefix}eval_path={self.path}, or remove it."
            )
        used = {source.kind: None for source in all_sources(self)}
        for name, kinds in _OWNERS.items():
            value = getattr(self, name)
            if not used.keys() & set(kinds) and value != default_of(name):
                raise ConfigError(
                    f"{prefix}{name}={value} is for {prefix}kind={' or '.join(kinds)}, not {' or '.join(used)}; remove "
                    f"it."
                )


@dataclass
class NamedSource(DataConfig):
    """A source of `data.mixture` or a set of `data.eval_sets`: its own settings, and those of `data.*` for the rest."""

    weight: float = setting(1.0, "Proportion of the samples, relative to the other weights.", above=0.0)
    section: str = ""
    default_split: str = DataConfig.default_split


def default_of(name: str) -> Any:
    """Return the default of the setting `data.<name>`."""
    return DataConfig.__dataclass_fields__[name].default


def _own_fields(settings: type[RowSettings]) -> set[str]:
    return {member.name for member in fields(settings)} - {member.name for member in fields(RowSettings)}


# The kinds of rows that use a setting, for the settings that only some kinds use.
_OWNERS = {
    name: [kind for kind, other in KINDS.items() if name in _own_fields(other)]
    for settings in KINDS.values()
    for name in sorted(_own_fields(settings))
}

# Settings that a source of a mixture may have.
_SOURCE_FIELDS: dict[str, Field[Any]] = {
    member.name: member
    for member in fields(NamedSource)
    if member.name in ("path", "weight", "kind", "subset", "split", "sample_by", "roles")
    or member.name.endswith("_column")
}
_SET_FIELDS = {name: member for name, member in _SOURCE_FIELDS.items() if name != "weight"}


def sources_of(config: DataConfig) -> dict[str, DataConfig]:
    """Return the settings of each training source by name: those in `data.mixture`, or `config` itself under "".

    Raises:
        ConfigError: A setting in `data.mixture` is unknown, missing, of the wrong type or out of range.
    """
    return dict(mixture_of(config)) if config.mixture else {"": config}


def mixture_of(config: DataConfig, prefix: str = "data.") -> dict[str, NamedSource]:
    """Return the sources of `data.mixture` by name, if any; raise ConfigError as `sources_of` does."""
    return _named(config, "mixture", prefix, _SOURCE_FIELDS, {"mixture": None})


def held_out_sets_of(config: DataConfig, prefix: str = "data.") -> dict[str, NamedSource]:
    """Return the sets of `data.eval_sets` by name, if any; raise ConfigError as `sources_of` does."""
    own = {"mixture": None, "eval_sets": None, "streaming": False, "subset": None}
    splits = {"split": config.eval_split, "default_split": config.eval_split}
    return _named(config, "eval_sets", prefix, _SET_FIELDS, own | splits)


def _named(
    config: DataConfig, section: str, prefix: str, known: Mapping[str, Field[Any]], own: Mapping[str, Any]
) -> dict[str, NamedSource]:
    """Return the sources of a section by name: their settings override `own`, and these override `data.*`."""
    inherited = {member.name: getattr(config, member.name) for member in fields(DataConfig)} | dict(own)
    found = {}
    for name, given in _by_name(getattr(config, section), f"{prefix}{section}").items():
        values = inherited | _parse_source(given, f"{prefix}{section}.{name}", known)
        found[name] = NamedSource(**values, section=f"data.{section}.{name}")
    return found


def _by_name(given: Any, name: str) -> dict[str, Any]:
    """Return the given mapping of named sources; raise ConfigError for empty or duplicate names."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"{name}={given} is not a mapping; give sources by name, such as {{books: {{path: a.jsonl}}}}."
        )
    named = {str(key): value for key, value in (given or {}).items()}  # YAML reads 2024 as a number
    if len(named) < len(given or {}) or any(not key.strip() for key in named):
        raise ConfigError(
            f"{name}={given} has an empty name, or the same one twice; give each source a name of its own."
        )
    return named


def _parse_source(given: Any, name: str, known: Mapping[str, Field[Any]]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given} is not a mapping; give at least its path, such as {{path: a.jsonl}}.")
    for key, value in ({"path": REQUIRED} | dict(given)).items():
        if key not in known:
            raise ConfigError(f"{name}.{key} is not a setting of a source{nearest(str(key), list(known))}.")
        check_one(f"{name}.{key}", known[key], value)
    return _without_nulls(given)


def _without_nulls(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a source that are not null; null stands for the value of `data.*`."""
    return {key: value for key, value in source.items() if value is not None}


def _check_streaming(config: DataConfig, prefix: str) -> None:
    """Raise ConfigError for settings that streaming excludes, and for a shuffle buffer without streaming."""
    if not config.streaming:
        if config.shuffle_buffer != default_of("shuffle_buffer"):
            raise ConfigError(
                f"{prefix}shuffle_buffer={config.shuffle_buffer} is for training with {prefix}streaming=true, which "
                f"shuffles a part of the data at a time; remove it."
            )
        return
    refused = {
        "eval_fraction": (config.eval_fraction > 0, f"which needs the length of the data; give {prefix}eval_path"),
        "cache_dir": (
            config.cache_dir is not None and not (config.eval_path or config.eval_sets),
            "because no tokenized data is stored",
        ),
    }
    for name, (is_given, reason) in refused.items():
        if is_given:
            raise ConfigError(
                f"{prefix}streaming=true cannot be combined with {prefix}{name}={getattr(config, name)}, {reason}."
            )
    if config.packing and config.shuffle_buffer == 1:
        raise ConfigError(f"{prefix}packing=true packs the rows of {prefix}shuffle_buffer, which is 1; increase it.")


def _check_mixture(config: DataConfig, prefix: str) -> None:
    if not config.mixture:
        return
    if config.path not in ("", REQUIRED):
        raise ConfigError(
            f"{prefix}path={config.path} and {prefix}mixture both say what to train on; give one of them, or add the "
            f"path to the mixture."
        )
    for name in ("subset", "split"):
        if (value := getattr(config, name)) != default_of(name):
            raise ConfigError(f"{prefix}{name}={value} is for {prefix}path; set it in a source of {prefix}mixture.")
    _check_own_settings(mixture_of(config, prefix), f"{prefix}mixture", config.mixture)


def _check_own_settings(sources: Mapping[str, DataConfig], name: str, given: Any) -> None:
    """Raise ConfigError if a named source sets columns or options of another kind of rows."""
    own = _by_name(given, name)
    for source_name, source in sources.items():
        KINDS[source.kind].check_kind(source, f"{name}.{source_name}.")
        for key in _without_nulls(own[source_name]):
            if source.kind not in (kinds := _OWNERS.get(key, [source.kind])):
                raise ConfigError(
                    f"{name}.{source_name}.{key} is for kind={' or '.join(kinds)}, not {source.kind}; remove it."
                )


def all_sources(config: DataConfig) -> list[DataConfig]:
    """Return the settings of all sources: training data, data.eval_sets and, with a mixture, data.eval_path."""
    held_out = [config] if config.mixture and config.eval_path is not None else []
    return [*sources_of(config).values(), *held_out, *held_out_sets_of(config).values()]


def is_running_text(config: DataConfig, task: str) -> bool:
    """Return whether documents continue from window to window instead of becoming separate examples."""
    return config.kind == "text" and not config.packing and task in (CAUSAL, MASKED_LM)


def kind_of(config: DataConfig, task: str = CAUSAL) -> Kind:
    """Return the kind that turns rows into examples, by `data.kind` and the task."""
    return KINDS[config.kind].build_kind(config, task)


def cache_directory(config: DataConfig) -> Path:
    """Return the directory of tokenized data: `data.cache_dir`, or one below XDG_CACHE_HOME or ~/.cache."""
    return user_cache("tokens") if config.cache_dir is None else Path(config.cache_dir).expanduser()
