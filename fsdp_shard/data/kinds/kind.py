"""What every kind of row gives: examples, and the rules of its columns. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fsdp_shard.data.sources.readers import Row, require_column, text_of
from fsdp_shard.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


class Example(NamedTuple):
    """Tokens of one row and, for each, whether it is to be predicted (for seq2seq: whether it is of the target).

    `label` is the class of a row that has one.
    """

    ids: list[int]
    predicted: list[bool]
    label: str | int | None = None


class Kind(Protocol):
    """How rows become examples. Plain data, so that it can be sent to other processes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it looks at."""

    def check_row(self, row: Row) -> bool:
        """Raise DataError when `row` has not the columns; whether there is anything in it to train on."""

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise DataError when `tokenizer` lacks what this kind needs."""

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[Example]]:
        """The examples of each row; none for a row that has nothing to predict."""

    def fingerprint(self) -> Any:
        """All that decides about the examples beside rows and tokenizer, as JSON."""


def require_row(row: Row, column: str, setting: str, kind: str) -> None:
    """Raise DataError unless `row` has `column`; a plain text file has no columns at all."""
    if row.is_text:
        raise DataError(
            f"{row.where} is plain text, but data.kind={kind} needs rows with columns; give .jsonl, .csv, .parquet "
            f"or a hub data set, or set data.kind=text."
        )
    require_column(column, list(row.values), row.where, setting)


def text_in(row: Row, column: str, setting: str) -> str:
    """The text in `column`; numbers are not text."""
    return text_of(row.values[column], column, row.where, setting)


def plain_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each text, without any special token."""
    if not texts:
        return []
    if (backend := _plain_backend(tokenizer)) is not None:
        # Without where in the text each token is, which nobody asks here: a third less time.
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The tokenizer of the `tokenizers` library inside of this one, set as for a call of this one with nothing asked;
    None where such a call does more than to pass the texts on.
    """
    from transformers import PreTrainedTokenizerFast

    if type(tokenizer).__call__ is not PreTrainedTokenizerFast.__call__:
        return None
    if getattr(type(tokenizer), "_encode_plus", None) is not PreTrainedTokenizerFast._encode_plus:
        return None
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def ends_in_special(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer ends a text in a token of its own, as with </s> or [SEP]."""
    ids = tokenizer("a")["input_ids"]  # none at all where it has neither this letter nor a token for what is unknown
    return any(number in tokenizer.all_special_ids for number in ids[-1:])


def with_special_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each text as the tokenizer frames a whole one ([CLS] ... [SEP], ... </s>)."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """[beginning-of-text] when this tokenizer puts it before every text by itself, else nothing."""
    first = tokenizer("a")["input_ids"][:1]
    return [int(first[0])] if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []


def require_end(tokenizer: PreTrainedTokenizerBase, kind: str) -> int:
    """The end-of-text token, which a model must learn to stop with."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"data.kind={kind} ends each answer with the end-of-text token, but the model's tokenizer has none. Set "
            f"eos_token in its tokenizer_config.json."
        )
    return int(tokenizer.eos_token_id)


def prompt_and_answer(
    prompts: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, kind: str, seq2seq: bool
) -> list[list[Example]]:
    """Examples in which the answer alone is predicted, with the token that ends it.

    The two are tokenized apart, as a prompt is on its own when the model is used. A seq2seq model gets each framed as
    its tokenizer frames a source and a target.
    """
    if seq2seq:
        sources = with_special_ids(prompts, tokenizer)
        targets = [list(ids) for ids in tokenizer(text_target=list(answers), verbose=False)["input_ids"]]
    else:
        begin, end = beginning(tokenizer), require_end(tokenizer, kind)
        sources = [[*begin, *ids] for ids in plain_ids(prompts, tokenizer)]
        targets = [[*ids, end] for ids in plain_ids(answers, tokenizer)]
    return [
        [Example(source + target, [False] * len(source) + [True] * len(target))]
        for source, target in zip(sources, targets, strict=True)
    ]
