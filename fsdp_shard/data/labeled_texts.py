"""Labeled texts in the form on which a classifier is trained, with the origin of each, for evaluations."""

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
        where: File and line, or number, of the row.
        name: The value of its id or name column; None without one.
        text: Its text.
        sample: The number of its sample; None if it is skipped.
        skip_reason: Reason for skipping it; empty if it is not skipped.
    """

    where: str
    name: str | int | None
    text: str
    sample: int | None
    skip_reason: str


@dataclass(frozen=True)
class LabeledTexts:
    """The rows of some data as samples of a classifier.

    Attributes:
        samples: The rows with a text and a label.
        digest: Digest of the samples' tokens and labels.
        source: The rows.
        kind: The kind that reads them.
        sample_of: The number of each row's sample, or one of the negative numbers in `_LEFT_OUT` [num_rows].
    """

    samples: LabeledRows
    digest: str
    source: Source
    kind: Kind
    sample_of: Ints

    @property
    def lengths(self) -> Ints:
        """Number of tokens in each sample before truncation [num_samples]."""
        return np.asarray(self.samples.examples.lengths[self.samples.kept])

    @property
    def labels(self) -> Ints:
        """The model's class index for each sample [num_samples]."""
        numbers = np.asarray(self.samples.numbers, np.int64)
        return np.asarray(numbers[self.samples.examples.labels[self.samples.kept]])

    def rows(self) -> Iterator[LabeledText]:
        """Read the rows again, in order; raise DataError if they have changed since they were tokenized."""
        columns = self.kind.columns
        rows = rows_again(self.source, columns, len(self.sample_of))
        for row, sample in zip(rows, map(int, self.sample_of), strict=True):
            is_used = sample >= 0
            text = self.kind.text_in(row, "text")
            reason = "" if is_used else _LEFT_OUT[sample]
            yield LabeledText(row.where, name_of(row, columns), text, sample if is_used else None, reason)


_LEFT_OUT = {-1: "without text or label", -2: "without tokens"}


def open_labeled_texts(config: DataConfig, tokenizer: Tokenizer, task: Task, ranks: Communicator) -> LabeledTexts:
    """Tokenize `data.eval_path`, or else data.path, on rank 0 unless it is in the cache. A collective.

    Args:
        config: The data settings.
        tokenizer: The model's tokenizer.
        task: The classification task: the model's classes and its padding token.
        ranks: The ranks, which all receive the same samples.

    Raises:
        DataError: The data cannot be read, has no labeled text, or has a class that the model lacks.
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
    sample_of[counts > 0] = sample_of_example  # a row has at most one example
    return LabeledTexts(samples, file.digest, source, kind, sample_of)
