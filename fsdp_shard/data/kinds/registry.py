"""The kinds of rows by name. A new kind is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.kinds.chat import ChatKind
from fsdp_shard.data.kinds.instruction import InstructionKind
from fsdp_shard.data.kinds.kind import Kind
from fsdp_shard.data.kinds.labeled import LabeledKind
from fsdp_shard.data.kinds.pairs import PairsKind
from fsdp_shard.data.kinds.text import TextKind

# Name -> its kind, from the settings and whether source and target go to a model apart.
_KINDS: dict[str, Callable[[DataConfig, bool], Kind]] = {
    "text": lambda c, _: TextKind(c.text_column, c.sequence_length + 1),
    "chat": lambda c, _: ChatKind(c.messages_column),
    "instruction": lambda c, seq2seq: InstructionKind(
        c.instruction_column, c.input_column, c.response_column, c.prompt, c.prompt_no_input, seq2seq
    ),
    "pairs": lambda c, seq2seq: PairsKind(
        c.source_column, c.target_column, c.source_format or ("{source}" if seq2seq else "{source}\n"), seq2seq
    ),
}


def kind_of(config: DataConfig, task: str = "causal_lm") -> Kind:
    """What `data.kind` names for a model of `task`, with its settings."""
    if task == "sequence_classification":
        return LabeledKind(config.text_column, config.label_column)
    return _KINDS[config.kind](config, task == "seq2seq")
