"""`data.kind=text` as separate examples: documents in their own windows, or texts with a class for classifiers.

Documents that continue from window to window, the default, are handled in running_text.py.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fsdp_shard.data.kinds import kind
from fsdp_shard.data.kinds.kind import Example, Kind, Tokenizer
from fsdp_shard.data.sources.row import Row, document_of
from fsdp_shard.errors import DataError
from fsdp_shard.models import CAUSAL, MASKED_LM, SEQUENCE_CLASSIFICATION
from fsdp_shard.utils import setting


@dataclass(frozen=True)
class TextKind(Kind):
    """One document per row.

    A document of more than `longest` tokens becomes several examples. Neighboring examples overlap by one token, so
    every token except the first is predicted exactly once. If `longest` is None, rows are only checked.
    """

    chosen_by, required = "data.kind=text", ("text",)

    text: str
    longest: int | None

    def read(self, row: Row) -> str | None:
        text = document_of(row, self.text)
        return text if text.strip() else None

    def examples(self, read: list[str], tokenizer: Tokenizer) -> list[list[Example]]:
        begin, end = kind.beginning_tokens(tokenizer), self.end(tokenizer)
        return [self._pieces([*begin, *ids, end]) for ids in kind.plain_ids(read, tokenizer)]

    def fingerprint(self) -> Any:
        return ["text", self.text, self.longest]

    def _pieces(self, ids: list[int]) -> list[Example]:
        assert self.longest is not None, "settle_length comes before tokenizing"
        step = self.longest - 1
        pieces = [ids[start : start + self.longest] for start in range(0, max(1, len(ids) - 1), step)]
        return [Example(piece, [True] * len(piece)) for piece in pieces if len(piece) > 1]


@dataclass(frozen=True)
class LabeledKind(Kind):
    """Texts with a label, an integer or text (a name or a number); rows without a label are dropped."""

    chosen_by, version, required = "model.task=sequence_classification", "labelled-2", ("text", "label")

    text: str
    label: str

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Every tokenizer is suitable."""

    def read(self, row: Row) -> tuple[str, str | int] | None:
        self.require(row)
        text, label = self.text_in(row, "text"), row.values[self.label]
        if not text.strip() or label is None or label == "":
            return None
        if isinstance(label, bool) or not isinstance(label, (int, str)):
            raise DataError(
                f"{row.where}: column {self.label!r} holds {type(label).__name__}, expected the number or name of one "
                f"class. Set data.label_column if another column has it; regression and several classes for one text "
                f"are not supported."
            )
        return text, label

    def examples(self, read: list[tuple[str, str | int]], tokenizer: Tokenizer) -> list[list[Example]]:
        texts, labels = zip(*read, strict=True)
        found = zip(kind.token_ids(texts, tokenizer), labels, strict=True)
        return [[Example(ids, [True] * len(ids), label)] for ids, label in found]


@dataclass
class TextSettings(kind.RowSettings):
    """Settings of `data.kind=text`."""

    name = "text"
    help = "plain text, concatenated and cut into windows"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL, MASKED_LM, SEQUENCE_CLASSIFICATION)

    text_column: str = setting("text", "The column with the text, in rows with columns.")
    sample_by: str = setting(
        "document",
        "One document of a plain text file: the whole file, a paragraph or a line. Documents are separated by the "
        "end-of-text token.",
        choices=("document", "paragraph", "line"),
    )

    label_column: str = setting(
        "label", "model.task=sequence_classification: the column with the index or name of the class."
    )

    def build_kind(self, task: str) -> Kind:
        if task == SEQUENCE_CLASSIFICATION:
            return LabeledKind(self.text_column, self.label_column)
        return TextKind(self.text_column, None if self.sequence_length is None else self.sequence_length + 1)
