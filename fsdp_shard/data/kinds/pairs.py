"""`data.kind=pairs`: a source and its target, such as a text and its translation or summary."""

from dataclasses import dataclass
from typing import ClassVar

from fsdp_shard.data.kinds.kind import Kind, RowSettings, Tokenizer
from fsdp_shard.data.kinds.prompt_and_answer import PromptKind, fill
from fsdp_shard.data.sources.row import Row
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import CAUSAL, SEQ2SEQ
from fsdp_shard.utils import prose, setting


@dataclass(frozen=True)
class PairsKind(PromptKind):
    """Columns of the rows, and the `format` of the prompt, which contains {source}."""

    chosen_by, version, required = "data.kind=pairs", "pairs", ("source", "target")

    source: str
    target: str
    format: str

    def read(self, row: Row) -> tuple[str, str] | None:
        self.require(row)
        source = self.text_in(row, "source")
        target = self.text_in(row, "target") if source.strip() else ""
        return (fill(self.format, source=source), target) if target.strip() else None

    def encode_prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
        return super().encode_prompt(fill(self.format, source=text), tokenizer)


@dataclass
class PairsSettings(RowSettings):
    """Settings of `data.kind=pairs`."""

    name = "pairs"
    help = "a source and its target"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL, SEQ2SEQ)

    source_column: str = setting("source", "kind=pairs: the column with the source.")
    target_column: str = setting("target", "kind=pairs: the column with the target.")
    source_format: str | None = prose(
        None,
        "kind=pairs: the prompt, such as 'summarize: {source}'. Default: the source, followed by a newline for causal "
        "models.",
    )

    def build_kind(self, task: str) -> Kind:
        template = self.source_format or ("{source}" if task == SEQ2SEQ else "{source}\n")
        return PairsKind(task == SEQ2SEQ, self.source_column, self.target_column, template)

    def check_kind(self, prefix: str) -> None:
        if self.source_format is not None and "{source}" not in self.source_format:
            raise ConfigError(f"{prefix}source_format={self.source_format} does not contain {{source}}.")
