"""`data.kind=pairs`: a source and its target, such as a text and its translation or summary."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fsdp_shard.data.kinds import kind
from fsdp_shard.data.kinds.instruction import fill
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import setting


@dataclass(frozen=True)
class PairsKind(kind.Kind):
    """Columns of the rows, and the `format` of the prompt, which contains {source}."""

    source: str
    target: str
    format: str
    seq2seq: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.source, self.target)

    def check_row(self, row: Row) -> bool:
        kind.require_row(row, self.source, "data.source_column", "pairs")
        kind.require_row(row, self.target, "data.target_column", "pairs")
        return bool(self._source(row).strip()) and bool(self._target(row).strip())

    def check_tokenizer(self, tokenizer: kind.Tokenizer) -> None:
        if not self.seq2seq:
            kind.require_end(tokenizer, "pairs")

    def encode(self, rows: Sequence[Row], tokenizer: kind.Tokenizer) -> list[list[kind.Example]]:
        prompts = [fill(self.format, {"source": self._source(row)}) for row in rows]
        return kind.prompt_and_answer(prompts, [self._target(row) for row in rows], tokenizer, "pairs", self.seq2seq)

    def fingerprint(self) -> Any:
        return ["pairs", asdict(self)]

    def _source(self, row: Row) -> str:
        return kind.text_in(row, self.source, "data.source_column")

    def _target(self, row: Row) -> str:
        return kind.text_in(row, self.target, "data.target_column")


@dataclass
class PairsSettings(kind.RowSettings):
    """Settings of `data.kind=pairs`."""

    name = "pairs"
    help = "a source and its target"
    tasks: ClassVar[tuple[str, ...]] = (kind.CAUSAL, kind.SEQ2SEQ)

    source_column: str = setting("source", "kind=pairs: the column with the source.")
    target_column: str = setting("target", "kind=pairs: the column with the target.")
    source_format: str | None = setting(
        None,
        "kind=pairs: the prompt, such as 'summarize: {source}'. Default: the source, followed by a newline for causal "
        "models.",
    )

    def build_kind(self, task: str) -> kind.Kind:
        seq2seq = task == kind.SEQ2SEQ
        template = self.source_format or ("{source}" if seq2seq else "{source}\n")
        return PairsKind(self.source_column, self.target_column, template, seq2seq)

    def check_kind(self, prefix: str) -> None:
        if self.source_format is not None and "{source}" not in self.source_format:
            raise ConfigError(f"{prefix}source_format={self.source_format} does not contain {{source}}.")
