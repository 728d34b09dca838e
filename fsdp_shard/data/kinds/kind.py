"""What every kind of row provides: its settings, its examples, and helpers to tokenize them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from fsdp_shard.data.sources.readers import Row, require_column, text_of
from fsdp_shard.errors import DataError
from fsdp_shard.models import is_plain_fast_tokenizer
from fsdp_shard.utils import REQUIRED, setting

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"

CAUSAL, SEQ2SEQ, MASKED_LM, CLASSIFICATION = "causal_lm", "seq2seq", "masked_lm", "sequence_classification"


class Example(NamedTuple):
    """Token ids of one row and, for each, whether it is predicted (seq2seq: whether it is part of the target).

    `label` is the class of a row that has one.
    """

    ids: list[int]
    predicted: list[bool]
    label: str | int | None = None


class Kind(Protocol):
    """How rows become examples. Plain data, so that it can be sent to other processes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""

    def check_row(self, row: Row) -> bool:
        """Return whether `row` has anything to train on; raise DataError if a column is missing or of a wrong type."""

    def check_rows(self, rows: Sequence[Row]) -> bool:
        """Return whether any of the first rows has anything to train on; raise DataError as `check_row` does."""
        return any(self.check_row(row) for row in rows)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise DataError if `tokenizer` lacks something that this kind needs."""

    def encode(self, rows: Sequence[Row], tokenizer: Tokenizer) -> list[list[Example]]:
        """Return the examples of each row; none for a row with nothing to predict."""

    def fingerprint(self) -> Any:
        """Return, as JSON, everything that decides about the examples except for rows and tokenizer."""


@dataclass
class RowSettings:
    """Base of the settings of each kind of row, all of which are settings of `data.*`.

    A subclass has the name of its kind, one sentence of help, the tasks that it can train, and its own settings.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]

    path: str = setting(
        REQUIRED,
        "Training data: files (.txt, .md, .jsonl, .ndjson, .json, .csv, .tsv, each also .gz or .zst; .parquet, .arrow) "
        "as a path, a directory, a pattern such as data/*.jsonl or an address that fsspec opens (s3://, https://, "
        "...); a directory that save_to_disk wrote; or a dataset on the hub.",
    )
    sequence_length: int = setting(
        1024, "Tokens in each window. Longer rows are truncated; the run reports how many.", minimum=1
    )

    def build_kind(self, task: str) -> Kind:
        """Build the kind with these settings for a value of `model.task`."""
        raise NotImplementedError

    def check_kind(self, prefix: str) -> None:
        """Raise ConfigError if the settings of this kind are wrong; `prefix` is that of their names."""


def require_row(row: Row, column: str, setting: str, kind: str) -> None:
    """Raise DataError unless `row` has `column`; rows of plain text files have no columns."""
    if row.is_text:
        raise DataError(
            f"{row.where} is plain text, but data.kind={kind} needs rows with columns; give .jsonl, .csv, .parquet "
            f"or a hub data set, or set data.kind=text."
        )
    require_column(row, column, setting)


def text_in(row: Row, column: str, setting: str) -> str:
    """Return the text in `column`; raise DataError for any other type."""
    return text_of(row.values[column], column, row.where, setting)


def plain_ids(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenize each text without special tokens."""
    if texts and (backend := _plain_backend(tokenizer)) is not None:
        # A third faster than a call of the tokenizer, as it computes no offsets.
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    return token_ids(texts, tokenizer, add_special_tokens=False)


def _plain_backend(tokenizer: Tokenizer) -> Backend | None:
    """Return the fast tokenizer behind `tokenizer`, or None if a call of `tokenizer` does more than call that."""
    if not is_plain_fast_tokenizer(tokenizer):
        return None
    backend: Backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def ends_in_special(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer ends a text with a special token, such as </s> or [SEP]."""
    ids = tokenizer("a")["input_ids"]  # empty if it has neither this letter nor an unknown token
    return any(number in tokenizer.all_special_ids for number in ids[-1:])


def token_ids(texts: Sequence[str], tokenizer: Tokenizer, add_special_tokens: bool = True) -> list[list[int]]:
    """Tokenize each text, by default with the special tokens that the tokenizer adds ([CLS] ... [SEP], ... </s>)."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Return [beginning-of-text] if the tokenizer adds that token to every text, else an empty list."""
    first = tokenizer("a")["input_ids"][:1]
    return [int(first[0])] if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []


def require_end(tokenizer: Tokenizer, kind: str) -> int:
    """Return the end-of-text token, with which a model learns to stop; raise DataError if there is none."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"data.kind={kind} ends each answer with the end-of-text token, but the model's tokenizer has none. Set "
            f"eos_token in its tokenizer_config.json."
        )
    return int(tokenizer.eos_token_id)


def prompt_and_answer(
    prompts: Sequence[str], answers: Sequence[str], tokenizer: Tokenizer, kind: str, seq2seq: bool
) -> list[list[Example]]:
    """Build examples in which only the answer and the token that ends it are predicted.

    Prompt and answer are tokenized separately, as the prompt is alone at inference. For a seq2seq model the tokenizer
    adds the special tokens of a source and of a target.
    """
    if seq2seq:
        sources = token_ids(prompts, tokenizer)
        targets = [list(ids) for ids in tokenizer(text_target=list(answers), verbose=False)["input_ids"]]
    else:
        begin, end = beginning(tokenizer), require_end(tokenizer, kind)
        sources = [[*begin, *ids] for ids in plain_ids(prompts, tokenizer)]
        targets = [[*ids, end] for ids in plain_ids(answers, tokenizer)]
    return [
        [Example(source + target, [False] * len(source) + [True] * len(target))]
        for source, target in zip(sources, targets, strict=True)
    ]
