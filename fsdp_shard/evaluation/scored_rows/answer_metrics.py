"""Metrics of generated answers against references: exact match and F1 as in SQuAD's script, ROUGE, and WER."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fsdp_shard.evaluation.scored_rows.config import EXACT_MATCH, F1, ROUGE, WER
from fsdp_shard.evaluation.significance import Floats
from fsdp_shard.utils import format_count

_ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Metric:
    """The scores of all answers by one measure.

    Attributes:
        name: The measure's name, as in result.json.
        values: One per answer [num_answers]; the figure is sum(values) / sum(sizes).
        sizes: The weight of each [num_answers]: 1, or for the word error rate the words of the reference.
    """

    name: str
    values: Floats
    sizes: Floats

    @property
    def figure(self) -> float:
        """The figure over all answers."""
        return float(self.values.sum() / self.sizes.sum())

    def of(self, index: int) -> float:
        """The score of one answer."""
        return float(self.values[index] / self.sizes[index])


def score_answers(
    names: Sequence[str], answers: Sequence[str], references: Sequence[str]
) -> tuple[list[Metric], list[str]]:
    """Score answers.

    Args:
        names: The metrics, as in `scoring.metrics`.
        answers: The answers.
        references: The data's answer to each, with at least one character that is not white space.

    Returns:
        The scores by each measure (ROUGE has three), and notes to print.
    """
    found, notes = list[Metric](), list[str]()
    for name in names:
        metrics, note = _SCORERS[name](answers, references)
        found += metrics
        notes += note
    return found, notes


def normalize(text: str) -> str:
    """The text in lower case, without ASCII punctuation, English articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> float:
    """1 if both normalized texts are equal, else 0."""
    return float(normalize(answer) == normalize(reference))


def word_f1(answer: str, reference: str) -> float:
    """The F1 of the words shared by both normalized texts, with multiplicity."""
    said, wanted = normalize(answer).split(), normalize(reference).split()
    if not said or not wanted:  # such as the reference "The"
        return float(said == wanted)
    return 2 * (Counter(said) & Counter(wanted)).total() / (len(said) + len(wanted))


_Scored = tuple[list[Metric], list[str]]


def _mean(name: str, values: Sequence[float]) -> Metric:
    return Metric(name, np.array(values, np.float64), np.ones(len(values)))


def _mean_of_pairs(
    name: str, score: Callable[[str, str], float], answers: Sequence[str], references: Sequence[str]
) -> _Scored:
    return [_mean(name, [score(*pair) for pair in zip(answers, references, strict=True)])], []


def _rouge(answers: Sequence[str], references: Sequence[str]) -> _Scored:
    """F-measures without stemming. The package supports only words of a-z and 0-9."""
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    tokenizer = DefaultTokenizer(use_stemmer=False)
    scorer: Any = RougeScorer(list(_ROUGE_TYPES), tokenizer=tokenizer)
    scores = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]
    unknown = sum(not tokenizer.tokenize(reference) for reference in references)
    note = (
        f"ROUGE knows words of the letters a-z and of digits only: {format_count(unknown, 'reference')} without any, "
        f"which count as 0"
    )
    return [_mean(name, [each[name].fmeasure for each in scores]) for name in _ROUGE_TYPES], [note] if unknown else []


def _word_error_rate(answers: Sequence[str], references: Sequence[str]) -> _Scored:
    """All errors divided by all reference words, as the rate is defined for a corpus.

    jiwer splits texts at spaces only, so other white space is replaced by a space.
    """
    import jiwer

    pairs = ((" ".join(one.split()), " ".join(other.split())) for one, other in zip(references, answers, strict=True))
    counts = [jiwer.process_words(reference, answer) for reference, answer in pairs]
    errors = [one.substitutions + one.deletions + one.insertions for one in counts]
    words = [one.hits + one.substitutions + one.deletions for one in counts]
    return [Metric(WER, np.array(errors, np.float64), np.array(words, np.float64))], []


_SCORERS: Mapping[str, Callable[[Sequence[str], Sequence[str]], _Scored]] = {
    EXACT_MATCH: partial(_mean_of_pairs, EXACT_MATCH, exact_match),
    F1: partial(_mean_of_pairs, F1, word_f1),
    ROUGE: _rouge,
    WER: _word_error_rate,
}
