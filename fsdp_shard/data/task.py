"""The task of a model, as far as its samples depend on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_shard.data.config import DataConfig, all_sources, default_of
from fsdp_shard.data.kinds.kind import LABELED, ROWS, Tokenizer
from fsdp_shard.data.kinds.preference import PREFERENCE
from fsdp_shard.data.kinds.registry import KINDS
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import CAUSAL, MASKED_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION

_ONLY_FOR = {"target_length": SEQ2SEQ, "mask_fraction": MASKED_LM, "label_column": SEQUENCE_CLASSIFICATION}


@dataclass(frozen=True)
class Task:
    """The task of a model, with its requirements for samples.

    Attributes:
        name: The value of `model.task`.
        decoder_start: The first token of the decoder's input, for seq2seq models.
        num_labels: Number of classes of a classifier.
        label_numbers: Indices of the classes by name, if they have names.
        padding: The padding token of seq2seq models and classifiers, some of which read the last other token.
        samples: The items that the objective compares: rows (nothing), pairs of answers (DPO, reward models) or labeled
            answers (KTO).
        vocabulary: Number of tokens that the model embeds; None if unknown.
    """

    name: str = CAUSAL
    decoder_start: int = 0
    num_labels: int = 0
    label_numbers: Mapping[str, int] = field(default_factory=dict)
    padding: int = 0
    samples: str = ROWS
    vocabulary: int | None = None


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens in the windows of a masked language model; `begin` and `end` may be empty.

    Replacements are drawn from `vocabulary` tokens. The tokens in `all` are never masked.
    """

    mask: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    vocabulary: int
    all: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialTokens:
        """Return the special tokens of `tokenizer`; raise DataError if it has no mask token."""
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

    def within(self, vocabulary: int | None) -> SpecialTokens:
        """Adapt to a model that embeds `vocabulary` tokens, possibly fewer than the tokenizer has."""
        return self if vocabulary is None else replace(self, vocabulary=min(self.vocabulary, vocabulary))


def check_task(task: str, data: DataConfig, samples: str = ROWS) -> None:
    """Raise ConfigError for data that does not fit the task.

    Args:
        task: The value of `model.task`.
        data: The settings of the data.
        samples: The required shape of samples, as in `Task`.
    """
    _check_samples(task, data, samples)
    kinds = [name for name, kind in KINDS.items() if task in kind.tasks]
    for source in all_sources(data):
        if source.kind not in kinds:
            raise ConfigError(
                f"{source.section}.kind={source.kind} does not fit model.task={task}, which is trained on data.kind="
                f"{' or '.join(kinds)}."
            )
        if task == SEQUENCE_CLASSIFICATION and source.sample_by != "document":
            raise ConfigError(f"{source.section}.sample_by is for plain text files, which have no labels; remove it.")
        check_settings_of_task(task, {name: getattr(source, name) for name in _ONLY_FOR}, source.section)
    if data.packing:
        check_packed(task, samples)


def check_settings_of_task(task: str, settings: Mapping[str, object], section: str = "data") -> None:
    """Raise ConfigError for data settings of other tasks.

    Args:
        task: The value of `model.task`.
        settings: Values by name.
        section: The section of the settings in messages.
    """
    for name, value in settings.items():
        needs = _ONLY_FOR.get(name, task)
        if task != needs and value != default_of(name):
            raise ConfigError(f"{section}.{name}={value} is for model.task={needs}, not {task}; remove it.")


def check_packed(task: str, samples: str) -> None:
    """Raise ConfigError for samples that `data.packing=true` cannot pack; the arguments are as in `check_task`."""
    if samples == ROWS and task != CAUSAL:
        raise ConfigError(f"data.packing=true is for model.task={CAUSAL}; with model.task={task} remove it.")


def check_class_order(names: Sequence[str], task: Task, source: str) -> None:
    """Raise DataError if the data named `source` has the model's classes in another order."""
    known = sorted(task.label_numbers, key=lambda name: task.label_numbers[name])
    if sorted(names) == sorted(known) and list(names) != known:
        number = next(number for number, name in enumerate(names) if name != known[number])
        raise DataError(
            f"{source} has the classes of the model in another order: class {number} is {names[number]!r} in the data, "
            f"and {known[number]!r} in the model. Give the labels of the data as names, or the model's label2id and "
            f"id2label (model.labels) in the order of the data."
        )


def _check_samples(task: str, data: DataConfig, samples: str) -> None:
    """Raise ConfigError unless all data, or none, has answers to compare, as the objective requires."""
    for source in all_sources(data):
        given = f"{source.section}.kind={source.kind}"
        if samples == ROWS and source.kind == PREFERENCE:
            raise ConfigError(
                f"{given} has answers to compare, which only preference objectives of finetune do, and "
                f"evaluate task=reward. Choose one, such as objective=dpo, or another {source.section}.kind."
            )
        if samples != ROWS and source.kind != PREFERENCE:
            raise ConfigError(
                f"{given} has no answers to compare, as the objective of this run does; set {source.section}.kind="
                f"{PREFERENCE}, or another objective."
            )
        if source.margin_column is not None and (samples == LABELED or task != SEQUENCE_CLASSIFICATION):
            raise ConfigError(
                f"{source.section}.margin_column={source.margin_column} is for reward models, objective=reward with "
                f"model.task={SEQUENCE_CLASSIFICATION}; remove it."
            )
    if len({source.margin_column is None for source in all_sources(data)}) > 1:
        raise ConfigError(
            "data.margin_column is given for some sources of the data only; give it for all of them, or for none."
        )
    if samples == LABELED and task != CAUSAL:
        raise ConfigError(
            f"An objective that compares answers with a label is for model.task={CAUSAL}, not {task}; set another "
            f"objective."
        )
    if samples == LABELED and data.streaming and data.shuffle_buffer == 1:
        raise ConfigError(
            "data.shuffle_buffer=1 leaves no other answers to compare a streamed one with, as this objective does; "
            "increase it."
        )
