"""What a model is trained to do, as far as its samples depend on it. Plain data; knows no model and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_shard.data.config import DataConfig, all_sources
from fsdp_shard.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CAUSAL, SEQ2SEQ, MASKED_LM, CLASSIFICATION = "causal_lm", "seq2seq", "masked_lm", "sequence_classification"

_KINDS = {
    CAUSAL: ("text", "chat", "instruction", "pairs"),
    SEQ2SEQ: ("pairs", "instruction"),
    MASKED_LM: ("text",),
    CLASSIFICATION: ("text",),
}
_ONLY_FOR = {"target_length": SEQ2SEQ, "mask_fraction": MASKED_LM, "label_column": CLASSIFICATION}


@dataclass(frozen=True)
class Task:
    """`name` is that of `model.task`. A seq2seq model's targets begin with `decoder_start`; a classifier has
    `num_labels` classes, and may have names for them. Rows of these two are padded with `padding`: some classifiers
    take the last token that is another one.
    """

    name: str = CAUSAL
    decoder_start: int = 0
    num_labels: int = 0
    label_numbers: Mapping[str, int] = field(default_factory=dict)
    padding: int = 0


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens that a masked language model's windows are made with; begin and end are empty where it has none. Those
    of `all` are never hidden.
    """

    mask: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    vocabulary: int
    all: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
        """Those of `tokenizer`; raises DataError when it has no mask token."""
        if tokenizer.mask_token_id is None:
            raise DataError(
                "model.task=masked_lm needs a mask token, but the model's tokenizer has none. Set mask_token in its "
                "tokenizer_config.json, or choose another task."
            )
        begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
        return cls(
            int(tokenizer.mask_token_id),
            () if begin is None else (int(begin),),
            () if end is None else (int(end),),
            len(tokenizer),
            tuple(sorted(map(int, tokenizer.all_special_ids))),
        )


def check_task(task: str, data: DataConfig) -> None:
    """Raise ConfigError for data that the task has no use for."""
    for source in all_sources(data):
        if source.kind not in _KINDS[task]:
            raise ConfigError(
                f"{source.where}.kind={source.kind} does not fit model.task={task}, which is trained on data.kind="
                f"{' or '.join(_KINDS[task])}."
            )
        if task == CLASSIFICATION and source.sample_by != "document":
            raise ConfigError(f"{source.where}.sample_by is for plain text files, which have no labels; leave it out.")
        for name, needs in _ONLY_FOR.items():
            value = getattr(source, name)
            if task != needs and value != DataConfig.__dataclass_fields__[name].default:
                raise ConfigError(f"{source.where}.{name}={value} is for model.task={needs}, not {task}; leave it out.")
    if data.packing and task != CAUSAL:
        raise ConfigError(f"data.packing=true is for model.task={CAUSAL}; with model.task={task} leave it out.")
