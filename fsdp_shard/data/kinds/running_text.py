"""Documents that continue from window to window: one stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_shard.data.config import DataConfig, is_running_text, kind_of
from fsdp_shard.data.kinds.kind import Example, Kind, Tokenizer, beginning_tokens, plain_ids
from fsdp_shard.data.kinds.plain_text import TextKind
from fsdp_shard.errors import DataError
from fsdp_shard.models import MASKED_LM


@dataclass(frozen=True)
class RunningText(TextKind):
    """Documents of one stream of tokens. Each starts with `separators`, which the first one lacks, and `begin`."""

    separators: tuple[int, ...]
    begin: tuple[int, ...]

    @classmethod
    def of(cls, column: str, tokenizer: Tokenizer, begins: bool = True) -> RunningText:
        """Return documents with their text in `column`, separated by the end-of-text token.

        If the tokenizer adds the beginning-of-text token to a text and `begins` is true, each document begins with it.
        """
        end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id  # [SEP], as in BERT
        begin = tuple(beginning_tokens(tokenizer)) if begins else ()
        return cls(column, None, () if end is None else (int(end),), begin)

    @property
    def stream_separators(self) -> tuple[int, ...]:
        return self.separators

    def examples(self, read: list[str], tokenizer: Tokenizer) -> list[list[Example]]:
        return [[Example([*self.separators, *self.begin, *ids], [])] for ids in plain_ids(read, tokenizer)]

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Every tokenizer is suitable for a single document."""

    def check_num_rows(self, num_rows: int | None, name: str) -> None:
        if num_rows != 1 and not self.separators:
            raise DataError(
                f"{name} has several documents, but the model's tokenizer has no end-of-text token to put between "
                f"them. Set eos_token in its tokenizer_config.json, or join the text into one document."
            )

    def fingerprint(self) -> Any:
        return ["stream", self.columns, self.separators, self.begin]


def encoded_kind(config: DataConfig, task: str, tokenizer: Tokenizer) -> Kind:
    """Return the kind by which rows are tokenized: running text, or examples by `data.kind`."""
    if not is_running_text(config, task):
        return kind_of(config, task)
    # Each window of a masked language model begins with special tokens, so documents do not.
    return RunningText.of(config.text_column, tokenizer, begins=task != MASKED_LM)
