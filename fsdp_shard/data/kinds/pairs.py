"""`data.kind=pairs`: a source and its target (a text and its translation, summary, title)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fsdp_shard.data.kinds.instruction import fill
from fsdp_shard.data.kinds.kind import Example, prompt_and_answer, require_end, require_row, text_in
from fsdp_shard.data.sources.readers import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PairsKind:
    """Columns of the rows, and how a source is put to the model: `format` has {source}."""

    source: str
    target: str
    format: str
    seq2seq: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.source, self.target)

    def check_row(self, row: Row) -> bool:
        require_row(row, self.source, "data.source_column", "pairs")
        require_row(row, self.target, "data.target_column", "pairs")
        return bool(self._source(row).strip()) and bool(self._target(row).strip())

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not self.seq2seq:
            require_end(tokenizer, "pairs")

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[Example]]:
        prompts = [fill(self.format, {"source": self._source(row)}) for row in rows]
        return prompt_and_answer(prompts, [self._target(row) for row in rows], tokenizer, "pairs", self.seq2seq)

    def fingerprint(self) -> Any:
        return ["pairs", asdict(self)]

    def _source(self, row: Row) -> str:
        return text_in(row, self.source, "data.source_column")

    def _target(self, row: Row) -> str:
        return text_in(row, self.target, "data.target_column")
