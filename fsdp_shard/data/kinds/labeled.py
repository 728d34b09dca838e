"""Texts with a class each, for `model.task=sequence_classification`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fsdp_shard.data.kinds.kind import Example, text_in, with_special_ids
from fsdp_shard.data.sources.readers import Row, require_column
from fsdp_shard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LabeledKind:
    """Columns of the rows. A label is a whole number or a name; rows without one are dropped."""

    text: str
    label: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text, self.label)

    def check_row(self, row: Row) -> bool:
        if row.is_text:
            raise DataError(
                f"{row.where} is plain text, but model.task=sequence_classification needs rows with a text and a "
                f"class; give .jsonl, .csv, .parquet or a hub data set."
            )
        require_column(self.text, list(row.values), row.where, "data.text_column")
        require_column(self.label, list(row.values), row.where, "data.label_column")
        return bool(text_in(row, self.text, "data.text_column").strip()) and self._label(row) is not None

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Any tokenizer will do."""

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[Example]]:
        texts = with_special_ids([text_in(row, self.text, "data.text_column") for row in rows], tokenizer)
        return [[Example(ids, [True] * len(ids), self._label(row))] for ids, row in zip(texts, rows, strict=True)]

    def fingerprint(self) -> Any:
        return ["labelled", asdict(self)]

    def _label(self, row: Row) -> str | int | None:
        value = row.values[self.label]
        if isinstance(value, str) and value.strip().isdecimal():  # as a CSV file has it
            return int(value)
        if value is None or value == "":
            return None
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise DataError(
                f"{row.where}: column {self.label!r} holds {type(value).__name__}, expected the number or name of a "
                f"class. Set data.label_column."
            )
        return value
