"""`data.kind=text` with documents kept apart: each is an example of its own, predicted throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_shard.data.kinds.kind import Example, beginning, plain_ids, require_end
from fsdp_shard.data.sources.readers import Row, require_column, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextKind:
    """One document a row. One longer than `longest` tokens becomes several examples that share a token at each seam,
    so that none is predicted twice and none left out.
    """

    column: str
    longest: int

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def check_row(self, row: Row) -> bool:
        return bool(self._text(row).strip())

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        require_end(tokenizer, "text")

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[Example]]:
        begin, end = beginning(tokenizer), require_end(tokenizer, "text")
        return [self._pieces([*begin, *ids, end]) for ids in plain_ids([self._text(row) for row in rows], tokenizer)]

    def fingerprint(self) -> Any:
        return ["text", self.column, self.longest]

    def _text(self, row: Row) -> str:
        if row.is_text:
            return str(row.values["text"])
        require_column(self.column, list(row.values), row.where, "data.text_column")
        return text_of(row.values[self.column], self.column, row.where, "data.text_column")

    def _pieces(self, ids: list[int]) -> list[Example]:
        step = self.longest - 1
        pieces = [ids[at : at + self.longest] for at in range(0, max(1, len(ids) - 1), step)]
        return [Example(piece, [True] * len(piece)) for piece in pieces if len(piece) > 1]
