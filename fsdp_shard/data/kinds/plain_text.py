"""`data.kind=text` as examples: documents in windows of their own, or texts with a class for classifiers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fsdp_shard.data.kinds import kind
from fsdp_shard.data.sources.readers import Row, document_of, require_column
from fsdp_shard.errors import DataError
from fsdp_shard.utils import setting


@dataclass(frozen=True)
class TextKind(kind.Kind):
    """One document per row. A document of more than `longest` tokens becomes several examples. Neighboring examples
    share one token, so that every token but the first is predicted exactly once.
    """

    column: str
    longest: int

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def check_row(self, row: Row) -> bool:
        return bool(document_of(row, self.column).strip())

    def check_tokenizer(self, tokenizer: kind.Tokenizer) -> None:
        kind.require_end(tokenizer, "text")

    def encode(self, rows: Sequence[Row], tokenizer: kind.Tokenizer) -> list[list[kind.Example]]:
        begin, end = kind.beginning(tokenizer), kind.require_end(tokenizer, "text")
        documents = kind.plain_ids([document_of(row, self.column) for row in rows], tokenizer)
        return [self._pieces([*begin, *ids, end]) for ids in documents]

    def fingerprint(self) -> Any:
        return ["text", self.column, self.longest]

    def _pieces(self, ids: list[int]) -> list[kind.Example]:
        step = self.longest - 1
        pieces = [ids[start : start + self.longest] for start in range(0, max(1, len(ids) - 1), step)]
        return [kind.Example(piece, [True] * len(piece)) for piece in pieces if len(piece) > 1]


@dataclass(frozen=True)
class LabeledKind(kind.Kind):
    """Columns of the rows. A label is an integer or a name; rows without a label are dropped."""

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
        require_column(row, self.text, "data.text_column")
        require_column(row, self.label, "data.label_column")
        return bool(kind.text_in(row, self.text, "data.text_column").strip()) and self._label(row) is not None

    def check_tokenizer(self, tokenizer: kind.Tokenizer) -> None:
        """Every tokenizer is suitable."""

    def encode(self, rows: Sequence[Row], tokenizer: kind.Tokenizer) -> list[list[kind.Example]]:
        texts = kind.token_ids([kind.text_in(row, self.text, "data.text_column") for row in rows], tokenizer)
        return [[kind.Example(ids, [True] * len(ids), self._label(row))] for ids, row in zip(texts, rows, strict=True)]

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


@dataclass
class TextSettings(kind.RowSettings):
    """Settings of `data.kind=text`."""

    name = "text"
    help = "plain text, concatenated and cut into windows"
    tasks: ClassVar[tuple[str, ...]] = (kind.CAUSAL, kind.MASKED_LM, kind.CLASSIFICATION)

    text_column: str = setting("text", "The column with the text, of rows with columns.")
    sample_by: str = setting(
        "document",
        "One document of a plain text file: the whole file, a paragraph or a line. Documents are separated by the "
        "end-of-text token.",
        choices=("document", "paragraph", "line"),
    )

    label_column: str = setting(
        "label", "model.task=sequence_classification: the column with the index or name of the class."
    )

    def build_kind(self, task: str) -> kind.Kind:
        if task == kind.CLASSIFICATION:
            return LabeledKind(self.text_column, self.label_column)
        return TextKind(self.text_column, self.sequence_length + 1)
