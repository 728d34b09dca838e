"""`data.kind=instruction` and `data.kind=pairs`: a prompt, and the answer to learn."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_shard.data.kinds import kind
from fsdp_shard.data.kinds.kind import CAUSAL, SEQ2SEQ, Example, Kind, RowSettings, Tokenizer
from fsdp_shard.data.sources.row import Row
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.utils import setting


@dataclass(frozen=True)
class PromptKind(Kind):
    """Rows that are read as a prompt and its answer, of which only the answer and the token that ends it are predicted.

    Prompt and answer are tokenized separately, as the prompt is alone at inference. For a seq2seq model the tokenizer
    adds the special tokens of a source and of a target.
    """

    seq2seq: bool

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if not self.seq2seq:
            super().check_tokenizer(tokenizer)

    def examples(self, read: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[list[Example]]:
        prompts, answers = map(list, zip(*read, strict=True))
        if self.seq2seq:
            sources, targets = (
                kind.token_ids(prompts, tokenizer),
                tokenizer(text_target=answers, verbose=False)["input_ids"],
            )
        else:
            begin, end = kind.beginning(tokenizer), self.end(tokenizer)
            sources = [[*begin, *ids] for ids in kind.plain_ids(prompts, tokenizer)]
            targets = [[*ids, end] for ids in kind.plain_ids(answers, tokenizer)]
        return [
            [Example([*source, *target], [False] * len(source) + [True] * len(target))]
            for source, target in zip(sources, targets, strict=True)
        ]


def fill(template: str, **values: str) -> str:
    """Replace each {name} in `template` by its value in one pass: braces in a value have no meaning."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)


@dataclass(frozen=True)
class InstructionKind(PromptKind):
    """Columns and prompts of the rows. `prompt` contains {instruction} and {input}; `prompt_no_input` is for rows
    without an input.
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


@dataclass
class InstructionSettings(RowSettings):
    """Settings of `data.kind=instruction`."""

    name = "instruction"
    help = "an instruction and its response"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL, SEQ2SEQ)

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

    def build_kind(self, task: str) -> Kind:
        columns = self.instruction_column, self.input_column, self.response_column
        return InstructionKind(task == SEQ2SEQ, *columns, self.prompt, self.prompt_no_input)

    def check_kind(self, prefix: str) -> None:
        for name, part in (("prompt", "{instruction}"), ("prompt", "{input}"), ("prompt_no_input", "{instruction}")):
            if part not in getattr(self, name):
                raise ConfigError(f"{prefix}{name} does not contain {part}, so that column would be ignored.")


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


@dataclass
class PairsSettings(RowSettings):
    """Settings of `data.kind=pairs`."""

    name = "pairs"
    help = "a source and its target"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL, SEQ2SEQ)

    source_column: str = setting("source", "kind=pairs: the column with the source.")
    target_column: str = setting("target", "kind=pairs: the column with the target.")
    source_format: str | None = setting(
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
