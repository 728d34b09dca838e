"""`data.kind=instruction`: an instruction, perhaps with an input, and the response that is to be learnt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fsdp_shard.data.kinds.kind import Example, prompt_and_answer, require_end, require_row, text_in
from fsdp_shard.data.sources.readers import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class InstructionKind:
    """Columns and prompt of the rows. The prompt has {instruction} and {input}; the other one serves without input."""

    instruction: str
    input: str | None
    response: str
    prompt: str
    prompt_no_input: str
    seq2seq: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.instruction, self.response, *([self.input] if self.input else []))

    def check_row(self, row: Row) -> bool:
        require_row(row, self.instruction, "data.instruction_column", "instruction")
        require_row(row, self.response, "data.response_column", "instruction")
        self._prompt(row)
        return bool(self._response(row).strip())

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        require_end(tokenizer, "instruction")

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[list[Example]]:
        prompts = [self._prompt(row) for row in rows]
        answers = [self._response(row) for row in rows]
        return prompt_and_answer(prompts, answers, tokenizer, "instruction", self.seq2seq)

    def fingerprint(self) -> Any:
        return ["instruction", asdict(self)]

    def _response(self, row: Row) -> str:
        return text_in(row, self.response, "data.response_column")

    def _prompt(self, row: Row) -> str:
        instruction = text_in(row, self.instruction, "data.instruction_column")
        given = text_in(row, self.input, "data.input_column") if self.input in row.values else ""
        template = self.prompt if given.strip() else self.prompt_no_input
        return fill(template, {"instruction": instruction, "input": given})


def fill(template: str, values: dict[str, str]) -> str:
    """`template` with each {name} of `values` replaced, once: braces in a value stay what they are."""
    return re.sub("|".join(f"{{{name}}}" for name in values), lambda found: values[found.group()[1:-1]], template)
