"""Metrics of answers: equal to SQuAD's script, and to the packages' own on the same texts."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from fsdp_shard.errors import ConfigError
from fsdp_shard.evaluation.scored_rows.answer_metrics import exact_match, score_answers, word_f1
from fsdp_shard.evaluation.scored_rows.config import ScoringConfig, parse_metrics

ANSWERS = ["The cat sat on a mat.", "", "forty-two", "a dog ran", "Das Schloß über dem Fluß"]
REFERENCES = ["the cat sat on the mat", "something", "Forty two", "dogs ran away fast", "Das Schloß über dem Fluss"]


@pytest.mark.parametrize(
    ("answer", "reference", "is_match", "f1"),
    [
        ("The  Eiffel Tower!", "eiffel tower", 1.0, 1.0),
        ("a cat, the cat", "cat", 0.0, 2 / 3),  # words count as often as both have them
        ("forty-two", "forty two", 0.0, 0.0),  # SQuAD's script joins what punctuation divides
        ("", "yes", 0.0, 0.0),
        ("the", "The.", 1.0, 1.0),  # nothing is left of either
        ("another theme", "a theme", 0.0, 2 / 3),  # articles are words, not letters
        ("no", "yes", 0.0, 0.0),
    ],
)
def test_squad_metrics(answer: str, reference: str, is_match: float, f1: float) -> None:
    assert exact_match(answer, reference) == is_match
    assert word_f1(answer, reference) == pytest.approx(f1)


def test_rouge_is_that_of_the_package() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its dependencies' own
        scorers = pytest.importorskip("rouge_score.rouge_scorer")
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = scorers.RougeScorer(names)
    expected = [scorer.score(reference, answer) for answer, reference in zip(ANSWERS, REFERENCES, strict=True)]
    found, notes = score_answers(["rouge"], ANSWERS, REFERENCES)
    assert [metric.name for metric in found] == names
    for metric in found:
        assert metric.values.tolist() == [each[metric.name].fmeasure for each in expected]
        assert metric.figure == pytest.approx(np.mean(metric.values))
    assert not notes
    _, notes = score_answers(["rouge"], ["да", "yes"], ["да", "yes"])
    assert notes == [
        "ROUGE knows words of the letters a-z and of digits only: 1 reference without any, which count as 0"
    ]


def test_word_error_rate_is_that_of_the_package() -> None:
    jiwer = pytest.importorskip("jiwer")
    ((metric,), notes) = score_answers(["wer"], ANSWERS, REFERENCES)
    assert metric.figure == jiwer.wer(REFERENCES, ANSWERS)
    assert [metric.of(index) for index in range(len(ANSWERS))] == [
        jiwer.wer(reference, answer) for answer, reference in zip(ANSWERS, REFERENCES, strict=True)
    ]
    assert not notes
    ((lines,), _) = score_answers(["wer"], ["one two three  four"], ["one two\nthree\tfour"])
    assert lines.figure == 0, "words are those between any white space"


def test_metrics_are_parsed() -> None:
    assert parse_metrics("wer", "scoring.metrics") == ["wer"]
    assert parse_metrics(["wer", "f1", "wer"], "scoring.metrics") == ["f1", "wer"]
    assert ScoringConfig(["f1"]).chosen_metrics == ["f1"]
    assert set(ScoringConfig().chosen_metrics) | set(ScoringConfig().missing_metrics) == {
        "exact_match",
        "f1",
        "rouge",
        "wer",
    }
    for value, said in (("bleu", "no metric bleu"), ([], "names no metric"), ([{"f1": 1}], "no metric")):
        with pytest.raises(ConfigError, match=said):
            parse_metrics(value, "scoring.metrics")


def test_a_missing_package_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # As if neither were installed: nothing else is on the path.
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "jiwer", raising=False)
    with pytest.raises(ConfigError, match=r"scoring\.metrics=\[wer\] needs jiwer, which is not installed"):
        ScoringConfig(["wer"]).check_packages()
    ScoringConfig(["f1"]).check_packages()
