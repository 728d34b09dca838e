"""`data.kind=instruction`: an instruction, an optional input, and the response to learn."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fsdp_shard.data.kinds import kind
from fsdp_shard.data.sources.readers import Row
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.utils import setting


@dataclass(frozen=True)
class InstructionKind(kind.Kind):
    """Columns and prompts of the rows. `prompt` contains {instruction} and {input}; `prompt_no_input` is for rows
    without an input.
    """

    instruction: str
    input: str | None
    response: str
    prompt: str
    prompt_no_input: str
    seq2seq: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.instruction, self.response, *([self.input] if self.input else []), "history")

    def check_row(self, row: Row) -> bool:
        kind.require_row(row, self.instruction, "data.instruction_column", "instruction")
        kind.require_row(row, self.response, "data.response_column", "instruction")
        self._prompt(row)
        if row.values.get("history"):
            raise DataError(f"{row.where} has a history, which data.kind=instruction would ignore; set data.kind=chat.")
        return bool(self._response(row).strip())

    def check_tokenizer(self, tokenizer: kind.Tokenizer) -> None:
        kind.require_end(tokenizer, "instruction")

    def encode(self, rows: Sequence[Row], tokenizer: kind.Tokenizer) -> list[list[kind.Example]]:
        prompts = [self._prompt(row) for row in rows]
        answers = [self._response(row) for row in rows]
        return kind.prompt_and_answer(prompts, answers, tokenizer, "instruction", self.seq2seq)

    def fingerprint(self) -> Any:
        return ["instruction", asdict(self)]

    def _response(self, row: Row) -> str:
        return kind.text_in(row, self.response, "data.response_column")

    def _prompt(self, row: Row) -> str:
        instruction = kind.text_in(row, self.instruction, "data.instruction_column")
        given = kind.text_in(row, self.input, "data.input_column") if self.input in row.values else ""
        template = self.prompt if given.strip() else self.prompt_no_input
        return fill(template, {"instruction": instruction, "input": given})


def fill(template: str, values: dict[str, str]) -> str:
    """Replace each {name} in `template` by its value in one pass: braces in a value have no meaning."""
    return re.sub("|".join(f"{{{name}}}" for name in values), lambda found: values[found.group()[1:-1]], template)


@dataclass
class InstructionSettings(kind.RowSettings):
    """Settings of `data.kind=instruction`."""

    name = "instruction"
    help = "an instruction and its response"
    tasks: ClassVar[tuple[str, ...]] = (kind.CAUSAL, kind.SEQ2SEQ)

    instruction_column: str = setting("instruction", "kind=instruction: the column with the instruction.")
    input_column: str = setting("input", "kind=instruction: the column with the input; rows may lack it.")
    response_column: str = setting("output", "kind=instruction: the column with the response.")
    prompt: str = setting(
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "kind=instruction: the text before the response of a row with an input.",
    )
    prompt_no_input: str = setting(
        "### Instruction:\n{instruction}\n\n### Response:\n",
        "kind=instruction: the text before the response of a row without an input.",
    )

    def build_kind(self, task: str) -> kind.Kind:
        columns = self.instruction_column, self.input_column, self.response_column
        return InstructionKind(*columns, self.prompt, self.prompt_no_input, task == kind.SEQ2SEQ)

    def check_kind(self, prefix: str) -> None:
        for name, part in (("prompt", "{instruction}"), ("prompt", "{input}"), ("prompt_no_input", "{instruction}")):
            if part not in getattr(self, name):
                raise ConfigError(f"{prefix}{name} does not contain {part}, so that column would be ignored.")
