"""`data.kind=instruction`: an instruction, an optional input, and the response to learn."""

from dataclasses import dataclass
from typing import ClassVar

from fsdp_shard.data.kinds.kind import Kind, RowSettings, Tokenizer
from fsdp_shard.data.kinds.prompt_and_answer import PromptKind, fill
from fsdp_shard.data.sources.row import Row
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import CAUSAL, SEQ2SEQ
from fsdp_shard.utils import prose, setting


@dataclass(frozen=True)
class InstructionKind(PromptKind):
    """Columns and prompt templates of the rows.

    `prompt` contains {instruction} and {input}; `prompt_no_input` is for rows without an input.
    """

    chosen_by, version, required = "data.kind=instruction", "instruction", ("instruction", "response")

    instruction: str
    input: str | None
    response: str
    prompt: str
    prompt_no_input: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (*super().columns, *filter(None, [self.input]), "history")

    def read(self, row: Row) -> tuple[str, str] | None:
        self.require(row)
        instruction, given, response = (self.text_in(row, field) for field in ("instruction", "input", "response"))
        if row.values.get("history"):
            raise DataError(f"{row.where} has a history, which data.kind=instruction would ignore; set data.kind=chat.")
        template = self.prompt if given.strip() else self.prompt_no_input
        return (fill(template, instruction=instruction, input=given), response) if response.strip() else None

    def encode_prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
        return super().encode_prompt(fill(self.prompt_no_input, instruction=text), tokenizer)


@dataclass
class InstructionSettings(RowSettings):
    """Settings of `data.kind=instruction`."""

    name = "instruction"
    help = "an instruction and its response"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL, SEQ2SEQ)

    instruction_column: str = setting("instruction", "kind=instruction: the column with the instruction.")
    input_column: str = setting("input", "kind=instruction: the column with the input; rows may lack it.")
    response_column: str = setting("output", "kind=instruction: the column with the response.")
    prompt: str = prose(
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "kind=instruction: the text before the response of a row with an input.",
    )
    prompt_no_input: str = prose(
        "### Instruction:\n{instruction}\n\n### Response:\n",
        "kind=instruction: the text before the response of a row without an input.",
    )

    def build_kind(self, task: str) -> Kind:
        columns = self.instruction_column, self.input_column, self.response_column
        return InstructionKind(task == SEQ2SEQ, *columns, self.prompt, self.prompt_no_input)

    def check_kind(self, prefix: str) -> None:
        for name, part in (("prompt", "{instruction}"), ("prompt", "{input}"), ("prompt_no_input", "{instruction}")):
            if part not in getattr(self, name):
                raise ConfigError(f"{prefix}{name} does not contain {part}, so that column would be ignored.")
