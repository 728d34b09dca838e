"""Checks data settings against the files and the tokenizer, before any rank starts."""

from collections.abc import Sequence
from itertools import islice

from fsdp_shard.data.config import (
    DataConfig,
    all_sources,
    default_of,
    held_out_sets_of,
    is_running_text,
    kind_of,
    sources_of,
)
from fsdp_shard.data.kinds.chat_template import with_chat_template
from fsdp_shard.data.kinds.kind import ROWS, Kind, Tokenizer
from fsdp_shard.data.sources.source import DatasetSource, Source, open_source
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import CAUSAL

_NUM_FIRST = 256  # rows checked together


def check_data(config: DataConfig, task: str = CAUSAL, samples: str = ROWS) -> None:
    """Check that the rows can be read, up to the first row with something to learn.

    Nothing is written, and torch is not imported. A hub dataset is downloaded into the `datasets` cache, where the
    ranks will find it.

    Args:
        config: The data settings.
        task: The value of `model.task`.
        samples: The shape of samples, as in `Task`.

    Raises:
        DataError: The file or a column does not exist, or there are no rows.
        ConfigError: Settings for datasets on the hub are given for a local path.
    """
    trained = list(sources_of(config).values())
    held_out: list[DataConfig] = list(held_out_sets_of(config).values())
    found = [check_source(source, held_out=False, task=task, samples=samples) for source in trained]
    sets = [check_source(source, held_out=False, task=task, samples=samples) for source in held_out]
    if (
        sets
        and config.eval_split != default_of("eval_split")
        and not any(isinstance(one, DatasetSource) for one in sets)
    ):
        raise ConfigError(
            f"data.eval_split={config.eval_split} is for datasets on the hub or with saved splits, and data.eval_sets "
            f"has none; remove it."
        )
    if config.eval_path is not None:
        held_out.append(config)
        sets.append(check_source(config, held_out=True, task=task, samples=samples))
    refuse_unread([*trained, *held_out], [*found, *sets])


def refuse_unread(given: Sequence[DataConfig], found: Sequence[Source]) -> None:
    """Raise ConfigError for a setting of plain text files, or of columns, if no source with the setting has such rows.

    Args:
        given: The settings of sources.
        found: The sources, in the same order.
    """
    for name, rows, plain in (("sample_by", "plain text files", True), ("text_column", "rows with columns", False)):
        set_for = [n for n, one in enumerate(given) if getattr(one, name) != default_of(name)]
        if set_for and not any(found[n].has_rows(plain=plain) for n in set_for):
            first = set_for[0]
            raise ConfigError(
                f"data.{name}={getattr(given[first], name)} is for {rows}, and {found[first].name} has none; leave it "
                f"out."
            )


def check_source(config: DataConfig, held_out: bool, task: str, samples: str) -> Source:
    """Check one source as `check_data` does, and return it: `eval_path` if `held_out`, else `path`."""
    source = open_source(config, held_out)
    if config.streaming and not held_out:
        source.check_stream()
    _require_rows(source, kind_of(config, task), samples)
    return source


def check_tokenizer(config: DataConfig, tokenizer: Tokenizer, task: str = CAUSAL) -> None:
    """Raise DataError if the tokenizer lacks something that the rows need, such as a chat template."""
    for source in all_sources(config):
        if not is_running_text(source, task):
            kind_of(source, task).check_tokenizer(with_chat_template(tokenizer, source))


def encode_prompts(config: DataConfig, texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenize prompts like the beginnings of rows of `config`, or of a mixture's first source; for causal models.

    Args:
        config: The data settings.
        texts: The prompts; with data.kind=chat messages of a user, with data.kind=instruction instructions.
        tokenizer: The model's tokenizer.

    Returns:
        Token ids of each prompt.

    Raises:
        DataError: The chat template rejects a prompt, or a prompt has no tokens.
    """
    source = all_sources(config)[0]
    kind, tokenizer = kind_of(source), with_chat_template(tokenizer, source)
    encoded = [kind.encode_prompt(text, tokenizer) for text in texts]
    if empty := [text for text, ids in zip(texts, encoded, strict=True) if not ids]:
        raise DataError(f"The prompt {empty[0]!r} has no tokens in the model's tokenizer; give other text.")
    return encoded


def _require_rows(source: Source, kind: Kind, samples: str) -> None:
    number, rows = 0, source.rows(kind.columns)
    while first := list(islice(rows, _NUM_FIRST)):
        if kind.check_rows(first, samples):
            return
        number += len(first)
    raise source.empty(number)
