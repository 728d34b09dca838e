"""What to train on: the settings of `data.*`, and the check of them that the parent makes before any rank starts.

Imports neither torch, numpy nor `datasets`, so that composing a config stays quick. Knows nothing of tokens: that is
`tokens.py`, and how they are read back is `windows.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import REQUIRED, check_one, nearest, setting, user_cache, walk

if TYPE_CHECKING:
    pass


@dataclass
class DataConfig:
    """Settings of the text that is trained on and of the text that is held out."""

    # What need not be given where another setting is.
    instead: ClassVar[dict[str, str]] = {"path": "mixture"}

    path: str = setting(
        REQUIRED,
        "What to train on: a .txt, .md, .jsonl, .parquet or .csv file, a directory of such files, or a hub data set.",
    )
    mixture: Any = field(
        default=None,
        metadata={
            "help": "Several sources instead of data.path, by names of your own: {books: {path: a.jsonl, weight: 2}, "
            "web: {path: b.parquet}}. weight (1) is a source's part of the samples; one that comes to its end begins "
            "anew. kind, subset, split, sample_by and the columns may be given for each."
        },
    )
    streaming: bool = setting(
        False,
        "Read and tokenize data.path, or each source of data.mixture, while training, no further than needed, for what "
        "is too large to be tokenized first. Every rank reads all of it.",
    )
    shuffle_buffer: int = setting(
        1000,
        "With data.streaming: so many rows (of each source of data.mixture) are read and trained in a seeded order "
        "before the next; 1: in that of the files. With data.packing, these are what is packed together.",
        minimum=1,
    )
    eval_path: str | None = setting(None, "Held-out text, given like data.path. Default: see data.eval_fraction.")
    eval_fraction: float = setting(
        0.0,
        "Part of data.path (of each source of data.mixture) to hold out when data.eval_path is not given: its last "
        "windows, which are then not trained.",
        minimum=0.0,
        maximum=0.5,
    )
    kind: str = setting(
        "text",
        "What a row is. text: running text, joined and cut into windows. chat: a conversation, of which the words of "
        "the assistant are learnt. instruction: an instruction and its response. pairs: a source and its target.",
        choices=("text", "chat", "instruction", "pairs"),
    )
    sequence_length: int = setting(
        1024, "Tokens in each window. Rows that are longer are cut; how many were is reported.", minimum=1
    )
    packing: bool = setting(
        False,
        "Put several rows (text: documents) into one window by best fit, each with positions and attention of its own; "
        "otherwise a row has a window to itself (text: documents run on from window to window).",
    )
    target_length: int | None = setting(
        None, "model.task=seq2seq: the most tokens of a target. Default: data.sequence_length.", minimum=1
    )
    mask_fraction: float = setting(
        0.15, "model.task=masked_lm: part of the tokens to hide and predict.", above=0.0, maximum=1.0
    )
    label_column: str = setting(
        "label", "model.task=sequence_classification: the column with the number or name of each text's class."
    )
    workers: int = setting(
        1, "Processes that tokenize; 1: this one, with the tokenizer's own threads. The tokens are the same.", minimum=1
    )
    text_column: str = setting("text", "The column that holds the text (.jsonl, .parquet, .csv, hub data sets).")
    sample_by: str = setting(
        "document",
        "What counts as one document in a plain text file: the whole file, a paragraph or a line. An end-of-text token "
        "is put between documents.",
        choices=("document", "paragraph", "line"),
    )
    messages_column: str | None = setting(
        None, "kind=chat: the column with the conversation. Default: messages or conversations, whichever there is."
    )
    instruction_column: str = setting("instruction", "kind=instruction: the column with the instruction.")
    input_column: str = setting("input", "kind=instruction: the column with an input to it; rows may lack it.")
    response_column: str = setting("output", "kind=instruction: the column with the response.")
    prompt: str = setting(
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "kind=instruction: what is put before the response of a row with an input.",
    )
    prompt_no_input: str = setting(
        "### Instruction:\n{instruction}\n\n### Response:\n",
        "kind=instruction: what is put before the response of a row without an input.",
    )
    source_column: str = setting("source", "kind=pairs: the column with the source.")
    target_column: str = setting("target", "kind=pairs: the column with the target.")
    source_format: str | None = setting(
        None,
        "kind=pairs: what the model is given of a source, such as 'summarize: {source}'. Default: the source alone for "
        "seq2seq models, the source and a new line for causal ones.",
    )
    subset: str | None = setting(None, "Named configuration of a hub data set, such as wikitext-2-raw-v1.")
    split: str = setting("train", "Split of the hub data set in data.path.")
    eval_split: str = setting("validation", "Split of the hub data set in data.eval_path.")
    cache_dir: str | None = setting(
        None, "Where tokenized text is kept; every rank must see it. Default: ~/.cache/fsdp-shard/tokens."
    )

    @property
    def where(self) -> str:
        """Where the settings of this source stand, for messages."""
        return "data"

    def check(self, prefix: str) -> None:
        """Refuse settings that are at odds with each other."""
        _check_mixture(self, prefix)
        _check_streaming(self, prefix)
        if self.eval_path is not None and self.eval_fraction > 0:
            raise ConfigError(
                f"{prefix}eval_path={self.eval_path} and {prefix}eval_fraction={self.eval_fraction} both say what to "
                f"hold out; give one of them."
            )
        if self.eval_path is None and self.eval_split != type(self).__dataclass_fields__["eval_split"].default:
            raise ConfigError(
                f"{prefix}eval_split={self.eval_split} is of {prefix}eval_path, which is not given; give that too, "
                f"such as {prefix}eval_path={self.path}, or leave it out."
            )
        for name, kinds in _ONLY_FOR.items():
            value = getattr(self, name)
            if self.kind not in kinds and value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{prefix}{name}={value} is for {prefix}kind={' or '.join(kinds)}, not {self.kind}; leave it out."
                )
        for name, part in (("prompt", "{instruction}"), ("prompt", "{input}"), ("prompt_no_input", "{instruction}")):
            if part not in getattr(self, name):
                raise ConfigError(f"{prefix}{name} has no {part} in it, so what is in that column would be left out.")
        if self.source_format is not None and "{source}" not in self.source_format:
            raise ConfigError(f"{prefix}source_format={self.source_format} has no {{source}} in it.")


# Settings that do something for some kinds of rows only.
_ONLY_FOR = {
    "text_column": ("text",),
    "sample_by": ("text",),
    "messages_column": ("chat",),
    "instruction_column": ("instruction",),
    "input_column": ("instruction",),
    "response_column": ("instruction",),
    "prompt": ("instruction",),
    "prompt_no_input": ("instruction",),
    "source_column": ("pairs",),
    "target_column": ("pairs",),
    "source_format": ("pairs",),
}


@dataclass
class OneOfMixture(DataConfig):
    """The settings of the source `source_name` of a mixture: its own, and those of `data.*` for what it leaves open."""

    source_name: str = ""

    @property
    def where(self) -> str:
        return f"data.mixture.{self.source_name}"


def sources_of(config: DataConfig) -> dict[str, DataConfig]:
    """The settings of each source that is trained on, by its name; without a mixture there is one, without a name."""
    if not config.mixture:
        return {"": config}
    shared = {member.name: getattr(config, member.name) for member in fields(DataConfig)} | {"mixture": None}
    return {
        name: OneOfMixture(**(shared | _own(source)), source_name=name) for name, source in mixture_of(config).items()
    }


def mixture_of(config: DataConfig, prefix: str = "data.") -> dict[str, MixtureSource]:
    """The sources of `data.mixture` by name; raises ConfigError when something in it is wrong."""
    return parse_sources(config.mixture, f"{prefix}mixture") if config.mixture else {}


def _own(source: MixtureSource) -> dict[str, str]:
    """What is given for this source, beside its weight."""
    given = {member.name: getattr(source, member.name) for member in fields(source) if member.name != "weight"}
    return {name: value for name, value in given.items() if value is not None}


def _check_streaming(config: DataConfig, prefix: str) -> None:
    """Refuse what needs all of the text, or a second process that reads it."""
    if not config.streaming:
        if config.shuffle_buffer != 1000:
            raise ConfigError(
                f"{prefix}shuffle_buffer={config.shuffle_buffer} is for {prefix}streaming=true: without it, all "
                f"samples are shuffled. Leave it out."
            )
        return
    refused = {
        "eval_fraction": (config.eval_fraction > 0, f"whose part is known at the end only; give {prefix}eval_path"),
        "workers": (config.workers > 1, "as each rank tokenizes by itself, with the tokenizer's own threads"),
        "cache_dir": (config.cache_dir is not None and config.eval_path is None, "as nothing is kept"),
    }
    for name, (is_given, reason) in refused.items():
        if is_given:
            raise ConfigError(
                f"{prefix}streaming=true does not go together with {prefix}{name}={getattr(config, name)}, {reason}."
            )
    if config.packing and config.shuffle_buffer == 1:
        raise ConfigError(f"{prefix}packing=true packs the rows of {prefix}shuffle_buffer, but that is 1; give more.")


def _check_mixture(config: DataConfig, prefix: str) -> None:
    if not config.mixture:
        return
    if config.path not in ("", REQUIRED):
        raise ConfigError(
            f"{prefix}path={config.path} and {prefix}mixture both say what to train on; give one of them, or make the "
            f"path a source of the mixture."
        )
    for setting_name in ("subset", "split"):
        value = getattr(config, setting_name)
        if value != DataConfig.__dataclass_fields__[setting_name].default:
            raise ConfigError(
                f"{prefix}{setting_name}={value} is for {prefix}path; give it to a source of {prefix}mixture."
            )
    for name, source in mixture_of(config, prefix).items():
        kind = source.kind or config.kind
        for setting_name in _own(source):
            if kind not in (kinds := _ONLY_FOR.get(setting_name, (kind,))):
                raise ConfigError(
                    f"{prefix}mixture.{name}.{setting_name} is for kind={' or '.join(kinds)}, not {kind}; leave it out."
                )


def all_sources(config: DataConfig) -> list[DataConfig]:
    """Those of `sources_of`, and beside a mixture the settings that data.eval_path is read by."""
    held_out = [config] if config.mixture and config.eval_path is not None else []
    return [*sources_of(config).values(), *held_out]


def is_stream(config: DataConfig, task: str) -> bool:
    """Whether documents run on from window to window, so that there are no rows."""
    return config.kind == "text" and not config.packing and task in ("causal_lm", "masked_lm")


def cache_directory(config: DataConfig) -> Path:
    """Directory of the token cache: `data.cache_dir`, else below XDG_CACHE_HOME, else below ~/.cache."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    return user_cache("tokens")


@dataclass
class MixtureSource:
    """A source of `data.mixture`; what is null is as in `data.*`."""

    path: str = setting(REQUIRED, "What to train on, given like data.path.")
    weight: float = setting(1.0, "Its part of the samples, in proportion to the other weights.", above=0.0)
    kind: str | None = setting(None, "See data.kind.", choices=("text", "chat", "instruction", "pairs"))
    subset: str | None = setting(None, "See data.subset.")
    split: str | None = setting(None, "See data.split.")
    sample_by: str | None = setting(None, "See data.sample_by.", choices=("document", "paragraph", "line"))
    text_column: str | None = setting(None, "See data.text_column.")
    label_column: str | None = setting(None, "See data.label_column.")
    messages_column: str | None = setting(None, "See data.messages_column.")
    instruction_column: str | None = setting(None, "See data.instruction_column.")
    input_column: str | None = setting(None, "See data.input_column.")
    response_column: str | None = setting(None, "See data.response_column.")
    source_column: str | None = setting(None, "See data.source_column.")
    target_column: str | None = setting(None, "See data.target_column.")


def parse_sources(given: Any, name: str) -> dict[str, MixtureSource]:
    """The sources of a mixture by name, from the mapping that the setting `name` holds, as a config has it.

    Raises ConfigError for whatever in it is unknown, missing, of the wrong type or out of range.
    """
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"{name}={given} is no mapping; give sources by name, such as {{books: {{path: a.jsonl}}}}.")
    return {str(key): _parse(value, f"{name}.{key}") for key, value in given.items()}


def _parse(given: Any, name: str) -> MixtureSource:
    if isinstance(given, Mapping):
        known = {member.name: member for member in fields(MixtureSource)}
        for key, value in given.items():
            if key not in known:
                raise ConfigError(f"{name}.{key} is no setting of a source{nearest(str(key), list(known))}.")
            kinds, words = ((int, float), "a number") if key == "weight" else ((str, type(None)), "text")
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ConfigError(f"{name}.{key}={value} is not {words}.")
        given = MixtureSource(**given)
    if not isinstance(given, MixtureSource):
        raise ConfigError(f"{name}={given} is no mapping; give at least its path, such as {{path: a.jsonl}}.")
    for dotted, member, value in walk(given, f"{name}."):
        check_one(dotted, member, value)
    if not math.isfinite(given.weight):
        raise ConfigError(f"{name}.weight={given.weight} is no weight; give a number.")
    return given
