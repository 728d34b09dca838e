"""Packed pairs: every pair whole in one window, its prompt once, and values, notes and slices that go with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_shard.data.kinds.kind import LABELED, PAIRS
from fsdp_shard.data.samples.batch import IGNORE_INDEX, NO_WINDOW
from fsdp_shard.data.samples.packed_pairs import PackedCompared, PackedPairs, fitting_pairs
from fsdp_shard.data.samples.preferences import RewardRows, with_extras
from fsdp_shard.data.samples.rows import Cut
from fsdp_shard.data.tokenized.token_file import Examples
from fsdp_shard.errors import DataError
from fsdp_shard.models import SEQUENCE_CLASSIFICATION
from tests.data.conftest import END
from tests.data.preference_rows import opened, random_rows, source

X = IGNORE_INDEX


def packed(tmp_path: Path, rows: Any, **settings: Any) -> PackedPairs:
    found = source(tmp_path, rows, packing=True, **settings)
    assert isinstance(found, PackedPairs)
    return found


def test_a_pair_is_its_prompt_and_both_answers(tmp_path: Path) -> None:
    sample = packed(tmp_path, [{"prompt": "abc", "chosen": "d", "rejected": "efg"}], sequence_length=12).sample(0)
    # The last token of the prompt predicts the first one of either answer.
    assert sample.inputs["input_ids"].tolist() == [*b"ab", *b"cd", *b"cefg", 0, 0, 0, 0]
    assert sample.labels.tolist() == [X, X, *b"d", END, *b"efg", END, X, X, X, X]
    assert sample.inputs["position_ids"].tolist() == [0, 1, 2, 3, 2, 3, 4, 5, 0, 1, 2, 3]
    assert sample.segments is not None
    assert sample.segments.tolist() == [1, 1, 2, 2, 3, 3, 3, 3, 0, 0, 0, 0]


def test_a_reward_model_reads_the_last_token_of_each_answer(tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "chosen": "d", "rejected": "efg", "gap": 2}]
    sample = packed(tmp_path, rows, task=SEQUENCE_CLASSIFICATION, margin_column="gap", sequence_length=12).sample(0)
    assert sample.inputs["input_ids"].tolist() == [*b"ab", *b"cd", END, *b"cefg", END, 7, 7]
    assert sample.labels.tolist() == [X, X, X, X, 0, X, X, X, X, 0, X, X]
    assert sample.inputs.keys() == {"input_ids", "position_ids"}
    assert sample.extras["margin"].tolist() == [2.0]


def test_a_reward_model_does_not_read_padding() -> None:
    """A model may have the token that ends a text as its padding, and an answer may have no other."""
    tokens = np.asarray([1, 2, 9, 1, 2, 3, 9])
    examples = Examples(tokens, tokens * 0, np.asarray([3, 7]), np.asarray([2, 2]), np.zeros(2, np.int64))
    cut = fitting_pairs(Cut(np.asarray([[0, 1]]), 0, 0), examples, 6, padding=9)
    assert cut.shared is not None
    rows = RewardRows(examples, cut.kept, 6, padding=9)
    sample = PackedPairs.pack(rows, cut.shared, padding=9).sample(0)
    assert sample.inputs["input_ids"].tolist() == [1, 2, 9, 2, 3, 9]
    assert sample.labels.tolist() == [X, 0, X, X, 0, X], "the model's own rule: the last token that is no padding"


def test_every_pair_is_whole_in_one_window_or_left_out(tmp_path: Path) -> None:
    rows = random_rows()
    found = opened(tmp_path, rows, packing=True, sequence_length=40)
    (pairs,) = found.train.sources
    assert isinstance(pairs, PackedPairs)
    seen = []
    for index in range(len(pairs)):
        sample = pairs.sample(index)
        ids, segments = sample.inputs["input_ids"], sample.segments
        assert segments is not None
        for pair in range(segments.max() // 3):
            texts = []
            for part in (2, 3):
                of_text = np.isin(segments, [3 * pair + 1, 3 * pair + part])
                assert sample.inputs["position_ids"][of_text].tolist() == list(range(of_text.sum()))
                answer = sample.labels[segments == 3 * pair + part]
                assert answer[-1] == END
                answer = answer[answer != X]
                assert ids[of_text][-len(answer) + 1 :].tolist() == answer[:-1].tolist(), "a label is the next token"
                texts.append(bytes([*ids[of_text].tolist()]).decode())
            seen.append(texts)
    whole = [[row["prompt"] + row[name] for name in ("chosen", "rejected")] for row in rows]
    shared = [max(0, len(row["prompt"]) - 1) for row in rows]
    fits = [len(a) + len(b) - once <= 40 for (a, b), once in zip(whole, shared, strict=True)]
    assert sorted(seen) == sorted(texts for texts, fit in zip(whole, fits, strict=True) if fit)
    assert 0 < (num_long := fits.count(False)) < 30
    assert found.train.sources
    (note,) = found.notes
    assert f"{num_long} pairs longer than a window of 40 left out" in note
    num_tokens = sum(len(a) + len(b) for (a, b), fit in zip(whole, fits, strict=True) if fit)
    once = num_tokens - sum(each for each, fit in zip(shared, fits, strict=True) if fit)
    assert f"of {once:,} tokens with one prompt a pair instead of {num_tokens:,}" in note
    assert f"{len(seen)} pairs packed into {len(pairs)} windows of 40 ({once / 40 / len(pairs):.1%} full)" in note
    with pytest.raises(DataError, match="60 pairs longer than a window of 2 left out, nothing is left to train on"):
        opened(tmp_path, [{"prompt": "a", "chosen": "bcd", "rejected": "efg"}] * 60, packing=True, sequence_length=2)


def test_values_go_with_their_pairs(tmp_path: Path) -> None:
    rows = [row | {"gap": number} for number, row in enumerate(random_rows())]
    given = {"task": SEQUENCE_CLASSIFICATION, "margin_column": "gap", "sequence_length": 60}
    pairs = with_extras(packed(tmp_path, rows, **given), "twice", np.arange(120).reshape(60, 2))
    assert isinstance(pairs, PackedPairs)
    batch = pairs.batch([4, NO_WINDOW, 2])
    numbers = [*pairs.pairs_of(4), *pairs.pairs_of(2)]
    assert batch.extras["twice"][:, 0].tolist() == [2 * number for number in numbers]
    assert batch.extras["margin"].tolist() == [pairs.kept[number, 0] // 2 for number in numbers]
    assert batch.answer_sizes.tolist() == [[1, 1]] * len(numbers)
    assert (batch.labels[1] == X).all()
    part = pairs.slice(3, 7)
    assert part.identity != pairs.identity
    assert part.num_pairs == sum(len(pairs.pairs_of(index)) for index in range(3, 7))
    again = part.batch([1])
    assert again.input_ids.tolist() == pairs.batch([4]).input_ids.tolist()
    assert again.extras["twice"].tolist() == batch.extras["twice"][: len(pairs.pairs_of(4))].tolist()


def test_streamed_pairs_are_packed_with_those_of_their_block(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"packing": True, "sequence_length": 40, "streaming": True, "shuffle_buffer": 20}
    stream = opened(tmp_path, random_rows(), **settings).train
    whole = packed(tmp_path, random_rows(), sequence_length=40)
    num_pairs = num_windows = 0
    while num_pairs < whole.num_pairs:
        num_pairs += len(stream.batch([num_windows]).answer_sizes)
        num_windows += 1
    figures = stream.figures(num_windows)["stream"]
    assert (num_pairs, figures["used"], figures["dropped"]) == (whole.num_pairs, whole.num_pairs, 60 - num_pairs)
    assert figures["epochs"] == 0


@pytest.mark.parametrize(("samples", "expected"), [(PAIRS, 40), (LABELED, 50)])
def test_no_prompt_is_both_trained_and_held_out(tmp_path: Path, samples: str, expected: int) -> None:
    """The answers of a ranked list have one prompt, and are several pairs."""
    rows = [{"prompt": f"{n:02}?", "completions": [f"{n}{c}" for c in "abcde"]} for n in range(10)]
    found = opened(tmp_path, rows, samples, packing=True, eval_fraction=0.2)
    assert found.held_out is not None
    (train,), (held_out,) = found.train.sources, found.held_out.sources
    assert isinstance(train, PackedCompared)
    assert isinstance(held_out, PackedCompared)
    trained, held = (
        {bytes(data.examples.tokens_of(int(example))[0][:2].tolist()) for example in data.kept[:, 0]}
        for data in (train, held_out)
    )
    assert (len(trained), held) == (8, {b"08", b"09"})
    assert not trained & held
    assert len(train.kept) + len(held_out.kept) == expected
    assert found.notes[1].startswith("held out: the last 2 rows, ")


def test_one_row_cannot_be_divided(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completions": list("abcde")}]
    with pytest.raises(DataError, match=r"a single row to train on, which data\.packing=true does not divide"):
        opened(tmp_path, rows, packing=True, eval_fraction=0.2)
