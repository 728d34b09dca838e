"""What to train on: the settings of `data.*`, and the check of them that the parent makes before any rank starts.

Imports neither torch, numpy nor `datasets`, so that composing a config stays quick. Knows nothing of tokens: that is
`tokens.py`, and how they are read back is `windows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_shard.data.mixture_base import MixtureSource, parse_sources
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.settings import REQUIRED, setting
from fsdp_shard.user_cache import user_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fsdp_shard.data.kinds.base import Kind
    from fsdp_shard.data.sources import Source


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
        "Read and tokenise data.path, or each source of data.mixture, while training, no further than needed, for what "
        "is too large to be tokenised first. Every rank reads all of it.",
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
        1, "Processes that tokenise; 1: this one, with the tokenizer's own threads. The tokens are the same.", minimum=1
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
        None, "Where tokenised text is kept; every rank must see it. Default: ~/.cache/fsdp-shard/tokens."
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
        "workers": (config.workers > 1, "as each rank tokenises by itself, with the tokenizer's own threads"),
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


def check_data(config: DataConfig, task: str = "causal_lm") -> None:
    """Raise DataError or ConfigError when the rows cannot be read: no such file, no rows, no such column.

    Reads up to the first row that has something to learn in it, and no further. Nothing is written and no torch is
    imported; a hub data set is downloaded into the `datasets` cache, where the ranks will find it.
    """
    for source in sources_of(config).values():
        check_source(source, held_out=False, task=task)
    if config.eval_path is not None:
        check_source(config, held_out=True, task=task)


def check_source(config: DataConfig, held_out: bool, task: str = "causal_lm") -> None:
    """`check_data` for one of the two sources."""
    from fsdp_shard.data.kinds.registry import kind_of
    from fsdp_shard.data.places import check_documents
    from fsdp_shard.data.sources import FileSource, open_source

    source = open_source(config, held_out)
    if config.streaming and not held_out and isinstance(source, FileSource):
        check_documents(source.files, config.sample_by)
    if is_stream(config, task):
        source.check()
    else:
        _require_rows(source, kind_of(config, task))


def check_tokenizer(config: DataConfig, tokenizer: PreTrainedTokenizerBase, task: str = "causal_lm") -> None:
    """Raise DataError when the tokenizer lacks what rows of this kind need, such as a chat template."""
    from fsdp_shard.data.kinds.registry import kind_of

    for source in all_sources(config):
        if not is_stream(source, task):
            kind_of(source, task).check_tokenizer(tokenizer)


def _require_rows(source: Source, kind: Kind) -> None:
    """Raise DataError when no row of `source` has anything to learn."""
    number = 0
    for row in source.rows(kind.columns):
        if kind.check_row(row):
            return
        number += 1
    raise DataError(
        f"{source.name} is empty: it has {number} rows, and none with anything to learn. Give a file with rows."
    )
