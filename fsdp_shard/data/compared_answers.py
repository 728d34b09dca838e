"""Answer pairs in the form on which a reward model is trained, with the origin of each, for evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.config import DataConfig, cache_directory, kind_of
from fsdp_shard.data.documents import name_of, open_evaluated, rows_again, was_changed
from fsdp_shard.data.kinds.chat_template import with_chat_template
from fsdp_shard.data.kinds.conversation import Conversation
from fsdp_shard.data.kinds.kind import PAIRS, Tokenizer
from fsdp_shard.data.kinds.preference import PreferenceKind
from fsdp_shard.data.kinds.preference_formats import CHOSEN, REJECTED, SKIP_REASONS, Answer
from fsdp_shard.data.samples.batch import Floats, Ints
from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.samples.preferences import (
    EQUAL_WHEN_CUT,
    MARGIN,
    PROMPT_FILLS,
    RewardRows,
    chosen_before,
    fits,
)
from fsdp_shard.data.sources.source import Source
from fsdp_shard.data.task import Task
from fsdp_shard.data.tokenized.token_cache import tokenize
from fsdp_shard.data.tokenized.token_file import TokenFile
from fsdp_shard.distributed import Communicator, run_on_main
from fsdp_shard.models import SEQUENCE_CLASSIFICATION


class ComparedPair(NamedTuple):
    """A pair of the data, or a pair, answer or row that is skipped.

    Attributes:
        where: File and line, or number, of its row.
        name: The value of the row's id or name column; None without one.
        texts: `prompt`, `chosen` and `rejected`, each a text or a list of messages; empty if it is not a pair.
        sample: The number of its sample; None if it is skipped.
        what: The kind of skipped item, a pair, an answer or a row; empty if nothing is skipped.
        skip_reason: Reason for skipping it; may be empty.
    """

    where: str
    name: str | int | None
    texts: dict[str, Any]
    sample: int | None
    what: str
    skip_reason: str


@dataclass(frozen=True)
class ComparedPairs:
    """The rows of some data as samples of a reward model.

    Attributes:
        samples: The pairs.
        digest: Digest of the samples' tokens and margins.
        source: The rows.
        kind: The kind that reads them.
        counts: Number of examples in each row [num_rows].
        reasons: For each example, its role, CHOSEN or REJECTED, or the reason why an item is skipped.
        sample_of: For each rejected answer of a sample, the number of the sample; -1 for other examples [num_examples].
        in_window: For each example, whether a part of its answer and of the chosen one is in the window [num_examples].
    """

    samples: RewardRows
    digest: str
    source: Source
    kind: PreferenceKind
    counts: Ints
    reasons: list[str]
    sample_of: Ints
    in_window: npt.NDArray[np.bool_]

    @property
    def lengths(self) -> Ints:
        """Number of tokens in both texts of each sample before truncation [num_samples, 2], the chosen one first."""
        return np.asarray(self.samples.examples.lengths[self.samples.kept])

    @property
    def margins(self) -> Floats | None:
        """The margin of each sample as given in the data [num_samples]; None if the data has none."""
        return self.samples.extras.get(MARGIN)

    def pairs(self) -> Iterator[ComparedPair]:
        """Read the rows again, in order; raise DataError if they have changed since they were tokenized."""
        first, columns = 0, self.kind.columns
        rows = rows_again(self.source, columns, len(self.counts))
        for row, count in zip(rows, map(int, self.counts), strict=True):
            answers, skip_reasons, _ = self.kind.read(row)
            end = first + count
            first += self.reasons[first:end].count(CHOSEN)
            rejected = answers[1:]
            if first + len(rejected) + len(skip_reasons) != end:
                raise was_changed(self.source)
            texts = [_texts(answers[0], one) for one in rejected] + [{}] * len(skip_reasons)
            for example, found in zip(range(first, end), texts, strict=True):
                what, reason = self._skipped_item(example)
                sample = None if what else int(self.sample_of[example])
                yield ComparedPair(row.where, name_of(row, columns), found, sample, what, reason)
            first = end

    def _skipped_item(self, example: int) -> tuple[str, str]:
        """Return the kind of a skipped example and the reason why it is skipped; empty strings for others."""
        if self.reasons[example] != REJECTED:
            what, words = SKIP_REASONS[self.reasons[example]]
            return what, words.strip()
        if self.sample_of[example] < 0:
            words = EQUAL_WHEN_CUT if self.in_window[example] else PROMPT_FILLS
            return "pair", words.format(self.samples.sequence_length).strip()
        return "", ""


def open_compared_pairs(config: DataConfig, tokenizer: Tokenizer, task: Task, ranks: Communicator) -> ComparedPairs:
    """Tokenize `data.eval_path`, or else data.path, on rank 0 unless it is in the cache. A collective.

    Args:
        config: The settings of the data, with data.kind=preference.
        tokenizer: The model's tokenizer.
        task: The classification task, with the model's padding token.
        ranks: The ranks, which all receive the same samples.

    Raises:
        DataError: The data cannot be read, has labeled answers, or has no pairs.
    """
    source, kind = open_evaluated(config), kind_of(config, SEQUENCE_CLASSIFICATION)
    assert isinstance(kind, PreferenceKind)
    tokenizer = with_chat_template(tokenizer, config)
    file: TokenFile = run_on_main(
        ranks, lambda: tokenize(source, kind, tokenizer, cache_directory(config), config.workers)
    )
    task = replace(task, samples=PAIRS)
    samples, _ = SampleFactory(config, task, None, 0).open(file)
    assert isinstance(samples, RewardRows)
    reasons = [str(file.classes[label]) for label in samples.examples.labels]
    sample_of = np.full(len(reasons), -1, np.int64)
    sample_of[samples.kept[:, 1]] = np.arange(len(samples))
    usable, _ = fits(samples.examples, task, samples.sequence_length)
    in_window = usable & usable[chosen_before(np.asarray([reason == CHOSEN for reason in reasons]))]
    return ComparedPairs(
        samples=samples,
        digest=file.digest,
        source=source,
        kind=kind,
        counts=file.examples_per_row(),
        reasons=reasons,
        sample_of=sample_of,
        in_window=in_window,
    )


def _texts(chosen: Answer, rejected: Answer) -> dict[str, Any]:
    prompt = chosen.prompt
    shown = prompt.messages if isinstance(prompt, Conversation) else prompt
    return {"prompt": shown, "chosen": _own(chosen), "rejected": _own(rejected)}


def _own(answer: Answer) -> Any:
    """The answer without its prompt."""
    if isinstance(answer.prompt, Conversation) and isinstance(answer.whole, Conversation):
        return answer.whole.messages[len(answer.prompt.messages) :]
    return answer.whole
