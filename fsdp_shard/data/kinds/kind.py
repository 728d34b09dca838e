"""The interface of a kind of row: its settings, its examples, and helpers that tokenize them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from fsdp_shard.data.sources.data_files import KNOWN
from fsdp_shard.data.sources.row import Row, require_columns, text_of
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import is_plain_fast_tokenizer
from fsdp_shard.utils import REQUIRED, set_environment, setting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"

# Shapes of samples: plain examples, pairs of answers to one prompt, and labeled answers.
ROWS, PAIRS, LABELED = "rows", "pairs", "labeled"


class Example(NamedTuple):
    """Token ids of one row, and whether each is predicted (for seq2seq models, whether it is part of the target).

    `label` is the class of a row, if it has one. With data.kind=preference, `label` is the role of the answer or the
    reason why it is skipped, and `margin` is the difference in quality given in the data.
    """

    ids: list[int]
    predicted: list[bool]
    label: str | int | None = None
    margin: float | None = None


class Question(NamedTuple):
    """A prompt: its text, its token ids in the form that a trained model expects, and the answer in the data."""

    prompt: str
    ids: list[int]
    reference: str


@dataclass(frozen=True)
class Kind(ABC):
    """Converts rows to examples. Plain data, so it can be sent to other processes.

    A subclass reads rows, and creates examples from the result.

    Attributes:
        chosen_by: The setting that selects this kind, for messages.
        version: Version of the examples; change it if the same rows result in other examples.
        required: The fields that name columns required in every row. `data.<field>_column` sets such a field.
    """

    chosen_by: ClassVar[str]
    version: ClassVar[str]
    required: ClassVar[tuple[str, ...]] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that this kind reads."""
        return tuple(getattr(self, field) for field in self.required)

    @property
    def stream_separators(self) -> tuple[int, ...] | None:
        """The tokens before each example of a stream except the first; None if examples are separate."""
        return None

    @abstractmethod
    def read(self, row: Row) -> Any:
        """Read the training content of `row`, None if empty; raise DataError if a column is missing or wrong."""

    @abstractmethod
    def examples(self, read: list[Any], tokenizer: Tokenizer) -> list[list[Example]]:
        """Return the examples of each result of `read`."""

    def questions(self, read: list[Any], tokenizer: Tokenizer) -> list[Question | None]:
        """Return the question of each result of `read`, None for one without a prompt or an answer.

        Raises:
            DataError: The tokenizer's chat template rejects a conversation.
        """
        return [None] * len(read)  # running text has no questions

    def encode_prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of a prompt as a trained model expects it, such as an instruction without its response.

        Raises:
            DataError: The tokenizer's chat template rejects it.
        """
        return [*beginning_tokens(tokenizer), *plain_ids([text], tokenizer)[0]]

    def check_rows(self, rows: Sequence[Row], samples: str = ROWS) -> bool:
        """Return whether any of the first rows has training content; `samples` is as in `Task`.

        Raises:
            DataError: A column is missing or has a wrong type, or the rows have no such samples.
        """
        return any(self.read(row) is not None for row in rows)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise DataError if `tokenizer` lacks a feature that this kind needs, by default the end-of-text token."""
        self.end(tokenizer)

    def check_num_rows(self, num_rows: int | None, name: str) -> None:  # noqa: B027  # most kinds take any number
        """Raise DataError if the source `name` has too many rows; None stands for an unknown number."""

    def encode(self, rows: Sequence[Row], tokenizer: Tokenizer) -> list[list[Example]]:
        """Return the examples of each row; none for a row with nothing to predict."""
        read = [self.read(row) for row in rows]
        usable = [one for one in read if one is not None]
        examples = iter(self.examples(usable, tokenizer) if usable else [])
        return [[] if one is None else next(examples) for one in read]

    def fingerprint(self) -> Any:
        """Return, as JSON, everything that determines the examples except rows and tokenizer."""
        return [self.version, asdict(self)]

    def require(self, row: Row) -> None:
        """Raise DataError unless `row` has the required columns; rows of plain text files have no columns."""
        if row.is_text:
            raise DataError(
                f"{row.where} is plain text, but {self.chosen_by} needs rows with columns; give .jsonl, .csv, .parquet "
                f"or a hub data set, or choose another {self.chosen_by.partition('=')[0]}."
            )
        require_columns(row, {f"data.{field}_column": getattr(self, field) for field in self.required})

    def text_in(self, row: Row, field: str) -> str:
        """Return the text in the column named by `field`, empty if it is missing; raise DataError if it is not text."""
        column = getattr(self, field)
        return text_of(row.values.get(column), column, row.where, f"data.{field}_column")

    def end(self, tokenizer: Tokenizer) -> int:
        """Return the end-of-text token, from which a model learns to stop; raise DataError if there is none."""
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"{self.chosen_by} ends each answer with the end-of-text token, but the model's tokenizer has none. "
                f"Set eos_token in its tokenizer_config.json."
            )
        return int(tokenizer.eos_token_id)


@dataclass
class RowSettings(ABC):
    """Base of each kind's settings, all of which are settings of `data.*`.

    A subclass defines the name of its kind, one sentence of help, the tasks that it supports, and its own settings.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]

    path: str = setting(
        REQUIRED,
        "The data to train on or evaluate: a file, a directory, a pattern such as data/*.jsonl, or a dataset on "
        f"the hub. Files may be {KNOWN}, and have any address that fsspec opens (s3://, https://, ...); a directory "
        "may be one that save_to_disk wrote.",
    )
    sequence_length: int | None = setting(
        None,
        "Tokens in each window. Longer rows are truncated; the run reports how many. Default: the smaller of the "
        "model's context and 2,048; a run that is resumed keeps its own. More than the context is an error under "
        "learned positions, and a warning under rotary ones, unless the model's config has rope scaling.",
        minimum=1,
    )

    @property
    def window_length(self) -> int:
        """The `sequence_length`; raises ConfigError if it is not known yet."""
        if self.sequence_length is None:
            raise ConfigError("data.sequence_length is not set, and without a model there is no default; set it.")
        return self.sequence_length

    @abstractmethod
    def build_kind(self, task: str) -> Kind:
        """Build the kind from these settings, for a value of `model.task`."""

    def check_kind(self, prefix: str) -> None:  # noqa: B027  # not all have something to check
        """Raise ConfigError if the settings of this kind are wrong; `prefix` precedes their names."""


def token_ids(texts: Sequence[str], tokenizer: Tokenizer, **options: Any) -> list[list[int]]:
    """Tokenize each text, by default with the special tokens that the tokenizer adds ([CLS] ... [SEP], ... </s>)."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), return_attention_mask=False, verbose=False, **options)
    return [list(ids) for ids in encoded["input_ids"]]


def plain_ids(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenize each text without special tokens."""
    if not is_plain_fast_tokenizer(tokenizer):
        return token_ids(texts, tokenizer, add_special_tokens=False)
    # A third faster than calling the tokenizer, as no offsets are computed.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def letter_ids(tokenizer: Tokenizer, *, is_target: bool = False) -> list[int]:
    """Tokenize one letter, as a target of a seq2seq model if `is_target`, with the special tokens around it.

    This avoids the tokenizer's threads: a process forked later, to tokenize the data, would not have them.
    """
    with set_environment({"TOKENIZERS_PARALLELISM": "false"}):
        encoded = tokenizer(text_target="a") if is_target else tokenizer("a")
    return list(encoded["input_ids"])


def beginning_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return [beginning-of-text] if the tokenizer adds that token to every text, else an empty list."""
    first = letter_ids(tokenizer)[:1]
    return first if first == [tokenizer.bos_token_id] else []


def ends_in_special(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer ends a text with a special token, such as </s> or [SEP]."""
    last = letter_ids(tokenizer)[-1:]  # empty if the tokenizer has neither this letter nor an unknown token
    return not set(tokenizer.all_special_ids).isdisjoint(last)
