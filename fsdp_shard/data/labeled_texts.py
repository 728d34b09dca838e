"""Texts with their classes, as a classifier is trained on them, and where each comes from: for evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fsdp_shard.data.config import DataConfig, cache_directory, kind_of
from fsdp_shard.data.documents import name_of, open_evaluated, rows_again
from fsdp_shard.data.kinds.kind import Kind, Tokenizer
from fsdp_shard.data.samples.batch import Ints
from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.samples.rows import LabeledRows
from fsdp_shard.data.sources.source import Source
from fsdp_shard.data.task import Task, check_class_order
from fsdp_shard.data.tokenized.token_cache import tokenize
from fsdp_shard.data.tokenized.token_file import TokenFile
from fsdp_shard.distributed import Communicator, run_on_main
from fsdp_shard.models import SEQUENCE_CLASSIFICATION


class LabeledText(NamedTuple):
    """A row of the data.

    Attributes:
        where: File and line or number of the row.
        name: What the data calls it, in a column id or name; None without one.
        text: Its text.
        sample: The number of its sample; None if it is left out.
        left_out: Why it is left out; empty if it is not.
    """

    where: str
    name: str | int | None
    text: str
    sample: int | None
    left_out: str


@dataclass(frozen=True)
class LabeledTexts:
    """The rows of some data as samples of a classifier.

    Attributes:
        samples: Those with a text and a label.
        digest: Of their tokens and labels.
        source: The rows.
        kind: How they are read.
        sample_of: For each row the number of its sample, or one of the negative numbers of `_LEFT_OUT` [num_rows].
    """

    samples: LabeledRows
    digest: str
    source: Source
    kind: Kind
    sample_of: Ints

    @property
    def lengths(self) -> Ints:
        """Tokens of each sample before it is truncated [num_samples]."""
        return np.asarray(self.samples.examples.lengths[self.samples.kept])

    @property
    def labels(self) -> Ints:
        """The model's index of the class of each sample [num_samples]."""
        numbers = np.asarray(self.samples.numbers, np.int64)
        return np.asarray(numbers[self.samples.examples.labels[self.samples.kept]])

    def rows(self) -> Iterator[LabeledText]:
        """Read the rows again, in their order; raises DataError if there are others than when they were tokenized."""
        columns = self.kind.columns
        rows = rows_again(self.source, columns, len(self.sample_of))
        for row, sample in zip(rows, map(int, self.sample_of), strict=True):
            is_used = sample >= 0
            text = self.kind.text_in(row, "text")
            reason = "" if is_used else _LEFT_OUT[sample]
            yield LabeledText(row.where, name_of(row, columns), text, sample if is_used else None, reason)


_LEFT_OUT = {-1: "without text or label", -2: "without tokens"}


def open_labeled_texts(config: DataConfig, tokenizer: Tokenizer, task: Task, ranks: Communicator) -> LabeledTexts:
    """Tokenize `data.eval_path`, or data.path without it, on rank 0 unless it is in the cache. A collective.

    Args:
        config: The settings of the data.
        tokenizer: The model's tokenizer.
        task: The classification: the classes of the model, and its padding token.
        ranks: The ranks, which all get the same samples.

    Raises:
        DataError: The data cannot be read, has no text with a label, or has a class that the model does not have.
    """
    source, kind = open_evaluated(config), kind_of(config, SEQUENCE_CLASSIFICATION)

    def tokenized() -> TokenFile:
        check_class_order(source.class_names(config.label_column), task, source.name)
        return tokenize(source, kind, tokenizer, cache_directory(config), config.workers)

    file: TokenFile = run_on_main(ranks, tokenized)
    samples, _ = SampleFactory(config, task, None, 0).open(file)
    assert isinstance(samples, LabeledRows)
    counts = file.examples_per_row()
    sample_of_example = np.full(file.num_examples, -2, np.int64)
    sample_of_example[samples.kept] = np.arange(len(samples))
    sample_of = np.full(len(counts), -1, np.int64)
    sample_of[counts > 0] = sample_of_example  # a row has one example at most
    return LabeledTexts(samples, file.digest, source, kind, sample_of)
