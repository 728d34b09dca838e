"""Packed labeled answers: each answer and its prompt with another one, as without packing, and what goes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fsdp_shard.data.kinds.kind import LABELED
from fsdp_shard.data.samples.batch import IGNORE_INDEX, NO_WINDOW, Batch
from fsdp_shard.data.samples.packed_labeled_answers import PackedLabeledAnswers
from fsdp_shard.data.samples.preferences import with_extras
from tests.data.preference_rows import opened, random_rows, source

LENGTH = 32  # of which some texts are longer


def packed(tmp_path: Path, **settings: Any) -> PackedLabeledAnswers:
    found = source(tmp_path, random_rows(), LABELED, packing=True, sequence_length=LENGTH, **settings)
    assert isinstance(found, PackedLabeledAnswers)
    return found


def documents(batch: Batch, row: int) -> list[tuple[list[int], list[int]]]:
    """Inputs and labels of each document in row 0 or 1 of the samples of a batch, without padding."""
    found = []
    assert batch.segments is not None
    for number in range(row, len(batch.labels), 2):
        segments, ids, labels = batch.segments[number], batch.input_ids[number], batch.labels[number]
        for segment in sorted({*segments.tolist()} - {0}):
            span = segments == segment
            assert (segment - 1) % 3 == row + 1, "the part of a pair"
            assert batch.inputs["position_ids"][number][span].tolist() == list(range(span.sum()))
            found.append((ids[span].tolist(), labels[span].tolist()))
    return found


def test_documents_are_those_without_packing(tmp_path: Path) -> None:
    answers, rows = packed(tmp_path), source(tmp_path, random_rows(), LABELED, sequence_length=LENGTH)
    batch, apart = answers.batch(range(len(answers))), rows.batch(range(len(rows)))
    assert (batch.rows_per_sample, batch.labels.shape) == (2, (2 * len(answers), LENGTH))
    found = [*zip(documents(batch, 0), documents(batch, 1), batch.extras["desirable"].tolist(), strict=True)]
    expected = []
    for number, desirable in enumerate(apart.extras["desirable"].tolist()):
        texts = []
        for ids, labels in zip(apart.input_ids[2 * number :][:2], apart.labels[2 * number :][:2], strict=True):
            end = int(np.flatnonzero(labels != IGNORE_INDEX)[-1]) + 1
            texts.append((ids[:end].tolist(), labels[:end].tolist()))
        expected.append((*texts, desirable))
    assert sorted(found) == sorted(expected)
    assert len(answers) < len(rows), "windows have several answers"
    sizes = [[sum(label != IGNORE_INDEX for label in labels) for _, labels in pair[:2]] for pair in found]
    assert batch.answer_sizes.tolist() == sizes


def test_values_go_with_their_answers(tmp_path: Path) -> None:
    answers = packed(tmp_path)
    answers = with_extras(answers, "twice", np.arange(2 * answers.num_pairs).reshape(-1, 2))  # type: ignore[assignment]  # the same class
    batch = answers.batch([4, NO_WINDOW, 2])
    numbers = [*answers.pairs_of(4), *answers.pairs_of(2)]
    assert batch.extras["twice"].tolist() == [[2 * number, 2 * number + 1] for number in numbers]
    assert (batch.labels[2:4] == IGNORE_INDEX).all()
    assert batch.answer_sizes.shape == (len(numbers), 2)
    part = answers.slice(3, 7)
    assert part.identity != answers.identity
    again = part.batch([1])
    assert again.input_ids.tolist() == batch.input_ids[:2].tolist()
    assert again.extras["twice"].tolist() == batch.extras["twice"][: len(again.answer_sizes)].tolist()


def test_streamed_answers_are_packed_with_those_of_their_block(tmp_path: Path) -> None:
    given: dict[str, Any] = {"packing": True, "sequence_length": LENGTH, "streaming": True, "shuffle_buffer": 20}
    stream = opened(tmp_path, random_rows(), LABELED, **given).train
    total, position = packed(tmp_path).num_pairs, 0
    num_answers = 0
    while num_answers < total:
        num_answers += len(stream.batch([position]).answer_sizes)
        position += 1
    assert num_answers == total
    assert stream.figures(position)["stream"]["epochs"] == 0
