"""Pairs and labeled answers as samples and batches: labels, padding, truncation, what is left out, and other values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.kinds.kind import LABELED, PAIRS
from fsdp_shard.data.pipeline import tokenize_all
from fsdp_shard.data.samples.batch import IGNORE_INDEX, NO_WINDOW
from fsdp_shard.data.samples.preferences import cut_answers, with_extras
from fsdp_shard.data.task import Task, check_task
from fsdp_shard.data.tokenized.token_file import Examples
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.models import SEQUENCE_CLASSIFICATION
from fsdp_shard.utils import check
from tests.data.conftest import END, byte_tokenizer, positions_of_rank
from tests.data.data_files import write
from tests.data.preference_rows import ROWS, opened, rows_file, source

X = IGNORE_INDEX


def row_texts(batch: Any) -> list[tuple[bytes, bytes]]:
    """Prompt and answer of each row of a batch."""
    rows = []
    for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
        start = int(np.flatnonzero(labels != IGNORE_INDEX)[0]) + 1
        answer = labels[labels != IGNORE_INDEX].tolist()
        assert ids[start : start + len(answer) - 1].tolist() == answer[:-1], "a label is the next token"
        rows.append((bytes(ids[:start].tolist()), bytes(answer[:-1])))
    return rows


def test_a_pair_is_two_rows_of_one_width(tmp_path: Path) -> None:
    pairs = source(tmp_path, [{"prompt": "ab", "chosen": "c", "rejected": "defghij"}])
    sample = pairs.sample(0)
    assert sample.inputs["input_ids"].tolist() == [
        [*b"abc"] + [0] * 13,
        [*b"abdefghij"] + [0] * 7,
    ]
    assert sample.labels.tolist() == [[X, *b"c", END] + [X] * 13, [X, *b"defghij", END] + [X] * 7]
    assert (sample.labels.dtype, dict(sample.extras)) == (np.dtype(np.int64), {})
    nothing = pairs.sample(NO_WINDOW)
    assert nothing.inputs["input_ids"].shape == nothing.labels.shape == (2, 8)
    assert (nothing.labels == IGNORE_INDEX).all()


def test_rows_of_a_batch_alternate(tmp_path: Path) -> None:
    pairs = source(tmp_path, ROWS)
    batch = pairs.batch([2, NO_WINDOW, 0])
    assert batch.input_ids.shape == batch.labels.shape == (6, 8)
    assert (batch.labels[2:4] == IGNORE_INDEX).all()
    batch = pairs.batch([2, 0])
    assert row_texts(batch) == [(b"c?", b"yes c"), (b"c?", b"nc"), (b"a?", b"yes a"), (b"a?", b"na")]
    assert batch.num_predictions == 6 + 3 + 6 + 3
    wide = source(tmp_path, [*ROWS[:1], {"prompt": "p", "chosen": "x" * 20, "rejected": "y"}]).batch([0, 1])
    assert wide.input_ids.shape == (4, 24)


def test_reward_models_get_both_texts_with_a_mask(tmp_path: Path) -> None:
    rows = [
        {"prompt": "ab", "chosen": "c", "rejected": "defghij", "gap": 2},
        {"prompt": "p", "chosen": "x" * 99, "rejected": "y", "gap": -0.5},
    ]
    pairs = source(tmp_path, rows, task=SEQUENCE_CLASSIFICATION, margin_column="gap")
    sample = pairs.sample(0)
    assert sample.inputs["input_ids"].tolist() == [[*b"abc", END] + [7] * 12, [*b"abdefghij", END] + [7] * 6]
    assert sample.inputs["attention_mask"].tolist() == [[1] * 4 + [0] * 12, [1] * 10 + [0] * 6]
    assert sample.labels.tolist() == [0, 0]
    batch = pairs.batch([0, 1, NO_WINDOW])
    assert batch.input_ids.shape == batch.inputs["attention_mask"].shape == (6, 32)
    assert batch.labels.tolist() == [0, 0, 0, 0, X, X]
    assert batch.num_predictions == 4
    assert batch.extras["margin"].tolist() == [2.0, -0.5, 0.0]
    assert batch.extras["margin"].dtype == np.float32
    assert (batch.input_ids[0, 4:] == 7).all(), "padded with the padding token"


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows = [
        *ROWS[:2],
        *[{"prompt": "p", "chosen": "same", "rejected": "same"}] * 2,
        {"prompt": "p", "chosen": None, "rejected": "x"},
        {"prompt": "x" * 40, "chosen": "y", "rejected": "z"},
        {"prompt": "x" * 32, "chosen": "y", "rejected": "z"},  # the last of the window is predicted
        {"prompt": "p", "chosen": "x" * 60, "rejected": "y"},
        {"prompt": "p", "completions": ["u", "v", "w"], "ranks": [1, 1, 2]},
        {"prompt": "p", "completions": ["u"]},
    ]
    samples = opened(tmp_path, rows)
    (pairs,) = samples.train.sources
    (note,) = samples.notes
    assert note.partition(" tokens, ")[2] == (
        "2 pairs with equal answers left out, 1 pair with an empty answer left out, 1 pair with equal ranks left out, "
        "1 row with fewer than two answers left out, 1 pair whose prompt fills the first 32 tokens left out, "
        "2 cut to 32 tokens, 5 pairs of up to 32 tokens each"
    )
    assert note.startswith("train: 10 rows, ")
    texts = row_texts(pairs.batch([2, 4]))
    assert texts[0][0] == b"x" * 32
    assert texts[2:] == [(b"p", b"u"), (b"p", b"w")]
    assert pairs.sample(2).labels[:, 31].tolist() == [ord("y"), ord("z")]
    cut = pairs.sample(3)
    assert cut.inputs["input_ids"].shape == (2, 32)
    assert cut.labels[0].tolist() == [*b"x" * 32]


@pytest.mark.parametrize("samples", [PAIRS, LABELED])
def test_nothing_left_is_an_error(tmp_path: Path, samples: str) -> None:
    with pytest.raises(DataError, match=r"nothing is left to train on|is empty: it has 1 row"):
        opened(tmp_path, [{"prompt": "p", "chosen": "x", "rejected": ""}], samples)
    with pytest.raises(DataError, match=r"2 pairs with equal answers left out, nothing is left to train on"):
        opened(tmp_path, [{"prompt": "p", "chosen": "x", "rejected": "x"}] * 2, samples)


LONG = "y" * 40
EQUAL_WHEN_CUT = [
    *ROWS[:2],
    {"prompt": "p", "chosen": f"{LONG} good", "rejected": f"{LONG} bad"},
    {"prompt": "p", "chosen": "y" * 31 + "z", "rejected": LONG},  # the last label differs
    {"prompt": "q", "completions": [f"{LONG}1", f"{LONG}2", "worse", f"{LONG}3"]},
]


@pytest.mark.parametrize("streaming", [False, True])
def test_pairs_whose_answers_are_equal_in_the_window_are_left_out(tmp_path: Path, streaming: bool) -> None:
    """Their loss is a constant, and what rounding leaves of its gradient would be trained."""
    samples = opened(tmp_path, EQUAL_WHEN_CUT, streaming=streaming)
    pairs = row_texts(samples.train.batch(range(4)))
    assert sorted(pairs) == sorted(
        [
            *[(b"a?", b"yes a"), (b"a?", b"na"), (b"b?", b"yes b"), (b"b?", b"nb")],
            *[(b"p", b"y" * 31), (b"p", b"y" * 31), (b"q", b"y" * 31), (b"q", b"worse")],
        ]
    )
    if streaming:
        assert samples.train.figures(4)["stream"]["dropped"] == 3
        left_out = samples.train.figures(4)["stream"]["left_out"]
        assert left_out == {"pairs whose answers are equal in the first 32 tokens": 3}
    else:
        assert "3 pairs whose answers are equal in the first 32 tokens left out, 2 cut to 32 tokens" in samples.notes[0]
    with pytest.raises(
        DataError, match=r"nothing is left to train on. Increase data\.sequence_length|nothing to train"
    ):
        opened(tmp_path, EQUAL_WHEN_CUT[2:3], streaming=streaming).train.batch([0])


def test_labeled_answers_of_pairs_that_are_equal_in_the_window_are_left_out(tmp_path: Path) -> None:
    samples = opened(tmp_path, EQUAL_WHEN_CUT, LABELED)
    (answers,) = samples.train.sources
    own = row_texts(answers.batch(range(len(answers))))[::2]
    assert own[4:] == [(b"p", b"y" * 31), (b"p", b"y" * 31), (b"q", b"y" * 31), (b"q", b"worse")]
    assert "3 pairs whose answers are equal in the first 32 tokens left out" in samples.notes[0]
    with pytest.raises(DataError, match=r"1 pair whose .* left out, nothing is left to train on"):
        opened(tmp_path, EQUAL_WHEN_CUT[2:3], LABELED)


@pytest.mark.parametrize(("keeps_last", "expected"), [(False, [True, True]), (True, [True, False])])
def test_a_reward_model_that_reads_the_last_token_compares_it(keeps_last: bool, expected: list[bool]) -> None:
    tokens = np.asarray([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 9, 1, 2, 3, 9, 8])
    examples = Examples(
        tokens, tokens * 0, np.arange(5, 25, 5), np.ones(4, int), np.asarray([0, 1] * 2), keeps_last=keeps_last
    )
    cut = cut_answers(
        examples, ["chosen", "rejected"], Task(SEQUENCE_CLASSIFICATION, samples=PAIRS), 3, "data", keeps_whole=False
    )
    left = [(0, 1), (2, 3)]
    assert cut.kept.tolist() == [list(pair) for pair, is_equal in zip(left, expected, strict=True) if not is_equal]
    assert (cut.num_dropped, cut.num_beyond) == (sum(expected),) * 2


def labeled(prompt: str, completion: str, label: bool) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


def test_the_answers_of_one_row_have_no_other_to_compare_with(tmp_path: Path) -> None:
    """Each would be its own, or that of the same prompt."""
    for rows in ([labeled("a", "1", True)], [{"prompt": "p", "chosen": "good", "rejected": "bad"}]):
        with pytest.raises(
            DataError, match=r"without another prompt's answer .* nothing is left to train on\. Give other rows"
        ):
            opened(tmp_path, rows, LABELED)


def test_labeled_answers_come_with_the_answer_before(tmp_path: Path) -> None:
    rows = [labeled("a", "1", True), labeled("bb", "22", False), labeled("b", "", True), labeled("ccc", "333", True)]
    samples = opened(tmp_path, rows, LABELED)
    (answers,) = samples.train.sources
    assert "1 empty answer left out, 3 answers of up to 32 tokens" in samples.notes[0]
    batch = answers.batch(range(3))
    assert row_texts(batch) == [
        (b"a", b"1"),
        (b"a", b"333"),  # of the last one
        (b"bb", b"22"),
        (b"bb", b"1"),
        (b"ccc", b"333"),
        (b"ccc", b"22"),
    ]
    assert batch.extras["desirable"].tolist() == [1.0, 0.0, 1.0]
    assert batch.extras["desirable"].dtype == np.float32
    # Parts keep the pairing of the whole.
    assert row_texts(answers.slice(1, 3).batch([0])) == row_texts(answers.batch([1]))
    assert answers.slice(1, 3).batch([0, NO_WINDOW]).extras["desirable"].tolist() == [0.0, 0.0]


def test_pairs_as_labeled_answers(tmp_path: Path) -> None:
    rows = [*ROWS[:2], {"prompt": "r", "completions": ["1", "2", "3"]}]
    answers = source(tmp_path, rows, LABELED)
    own = row_texts(answers.batch(range(7)))[::2]
    assert own == [
        (b"a?", b"yes a"),
        (b"a?", b"na"),
        (b"b?", b"yes b"),
        (b"b?", b"nb"),
        (b"r", b"1"),
        (b"r", b"2"),
        (b"r", b"3"),
    ]
    batch = answers.batch(range(7))
    assert batch.extras["desirable"].tolist() == [1, 0, 1, 0, 1, 0, 0]
    # Of the row before, never of the same one.
    others = [answer for _, answer in row_texts(batch)[1::2]]
    assert others == [b"1", b"2", b"yes a", b"na", b"yes b", b"nb", b"nb"]


def test_a_prompt_that_fills_the_window_takes_its_answers_alone(tmp_path: Path) -> None:
    rows = [labeled("x" * 40, "1", True), labeled("p", "2", False), labeled("q", "z" * 60, True)]
    samples = opened(tmp_path, rows, LABELED)
    assert "1 answer whose prompt fills the first 32 tokens left out, 1 cut to 32 tokens" in samples.notes[0]
    (answers,) = samples.train.sources
    assert answers.sample(0).labels[1].tolist() == [*b"z" * 32], "the other answer is cut, too"


def test_values_that_are_computed_later(tmp_path: Path) -> None:
    pairs = source(tmp_path, [row | {"m": 1} for row in ROWS], task=SEQUENCE_CLASSIFICATION, margin_column="m")
    values = np.arange(2 * len(pairs), dtype=np.float64).reshape(-1, 2) / 3
    known = with_extras(pairs, "reference", values)
    assert known.identity == pairs.identity
    batch = known.batch([4, NO_WINDOW, 1])
    assert batch.extras["reference"].dtype == np.float32
    assert batch.extras["reference"].tolist() == np.array([values[4], [0, 0], values[1]], np.float32).tolist()
    assert batch.extras["margin"].tolist() == [1, 0, 1]
    assert np.array_equal(known.slice(3, 6).sample(1).extras["reference"], np.float32(values[4]))
    assert np.array_equal(known.head(2).sample(1).extras["reference"], np.float32(values[1]))
    assert not pairs.sample(0).extras.keys() - {"margin"}, "the dataset itself is unchanged"
    for wrong in (values[1:], values[:, 0], values[:, :1]):
        with pytest.raises(ValueError, match="samples of RewardRows"):
            with_extras(pairs, "reference", wrong)


def numbered(dataset: Any) -> Any:
    """The dataset with sources whose samples know their number."""
    return dataset.with_sources(
        [
            with_extras(one, "number", np.stack([np.arange(len(one)), np.full(len(one), at)], axis=1))
            for at, one in enumerate(dataset.sources)
        ]
    )


def test_values_in_any_order_of_training(tmp_path: Path) -> None:
    files = {
        name: {"path": rows_file(tmp_path / f"{name}.jsonl", some)} for name, some in (("x", ROWS[:4]), ("y", ROWS[4:]))
    }
    samples = opened(tmp_path, None, mixture={"x": {**files["x"], "weight": 2}, "y": files["y"]}, eval_sets=files)
    train, held_out = numbered(samples.train), numbered(samples.held_out)
    assert train.identity == samples.train.identity
    texts = [row_texts(one.batch(range(len(one)))) for one in samples.train.sources]
    for position in range(40):
        number, part = train.sample(position).extras["number"].astype(int)
        assert row_texts(train.batch([position])) == texts[part][2 * number : 2 * number + 2]
        assert row_texts(train.batch([position])) == row_texts(samples.train.batch([position]))
        assert part == train.sources_of(np.asarray([position]))[0]
    assert samples.held_out is not None
    assert row_texts(held_out.batch(range(11))) == row_texts(samples.held_out.batch(range(11)))
    assert held_out.batch(range(11)).extras["number"].tolist() == [[n, 0] for n in range(4)] + [
        [n, 1] for n in range(7)
    ]
    assert (held_out.sample(NO_WINDOW).labels == IGNORE_INDEX).all()
    assert held_out.head(4).batch(range(4)).extras["number"][:, 1].tolist() == [0, 1, 1, 1]


def test_what_is_held_out(tmp_path: Path) -> None:
    samples = opened(tmp_path, ROWS, eval_fraction=0.25)
    assert samples.held_out is not None
    assert [len(one) for one in (*samples.train.sources, *samples.held_out.sources)] == [8, 3]
    assert row_texts(samples.held_out.batch([0]))[0] == (b"i?", b"yes i")
    other = rows_file(tmp_path / "other.jsonl", ROWS[:2])
    samples = opened(tmp_path, ROWS, eval_path=other)
    assert samples.held_out is not None
    assert row_texts(samples.held_out.batch([1]))[1] == (b"b?", b"nb")


def test_what_tells_one_from_another(tmp_path: Path) -> None:
    margins = [row | {"m": number} for number, row in enumerate(ROWS)]
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS]
    made: list[tuple[Any, dict[str, Any]]] = [
        (ROWS, {}),
        (ROWS, {"samples": LABELED}),
        (ROWS, {"task": SEQUENCE_CLASSIFICATION}),
        (ROWS, {"sequence_length": 16}),
        (turned, {}),
        (ROWS[:-1], {}),
        (margins, {"margin_column": "m", "task": SEQUENCE_CLASSIFICATION}),
        ([row | {"m": 0} for row in ROWS], {"margin_column": "m", "task": SEQUENCE_CLASSIFICATION}),
    ]
    identities = [opened(tmp_path, rows, **more).train.identity for rows, more in made]
    assert len(set(identities)) == len(made)
    again = [opened(tmp_path / "again", rows, **more).train.identity for rows, more in made]
    assert again == identities, "the same anywhere"


def test_the_cache_serves_pairs_and_labeled_answers(tmp_path: Path) -> None:
    opened(tmp_path, ROWS)
    opened(tmp_path, ROWS, LABELED)
    assert len([*(tmp_path / "cache").iterdir()]) == 1


STREAMED: list[tuple[str, str, dict[str, Any]]] = [
    (PAIRS, "causal_lm", {}),
    (PAIRS, SEQUENCE_CLASSIFICATION, {"margin_column": "m"}),
    (LABELED, "causal_lm", {}),
]


@pytest.mark.parametrize(("samples", "task", "more"), STREAMED)
def test_streams(tmp_path: Path, samples: str, task: str, more: dict[str, Any]) -> None:
    rows = [row | {"m": number} for number, row in enumerate(ROWS)]
    rows.insert(5, {"prompt": "p", "chosen": "x", "rejected": "x", "m": 0})

    def stream() -> Any:
        return opened(tmp_path, rows, samples, task, streaming=True, shuffle_buffer=4, **more).train

    def values(dataset: Any, position: int) -> list[Any]:
        batch = dataset.batch([position])
        return [array.tolist() for array in (*batch.inputs.values(), batch.labels, *batch.extras.values())]

    whole = stream()
    assert whole.sources == []
    assert whole.with_sources([]) is whole
    expected, states = [], []
    for position in range(30):
        expected.append(values(whole, position))
        states.append(json.loads(json.dumps(whole.state_dict(position + 1))))
    assert whole.figures(30)["stream"]["dropped"] >= 1
    for position in (0, 3, 9, 17):
        again = stream()
        assert again.identity == whole.identity
        again.load_state_dict(states[position])
        assert [values(again, after) for after in range(position + 1, 30)] == expected[position + 1 :]
    ranks = [stream() for _ in range(2)]
    for first in range(0, 30, 2):
        for rank, dataset in enumerate(ranks):
            dataset.prepare(first, 2)
            for position in positions_of_rank(first, 2, rank, 2):
                assert values(dataset, position) == expected[position]
    # The samples of an epoch are those of a file.
    (file,) = opened(tmp_path, rows, samples, task, **more).train.sources
    own = [json.dumps([row[0] for row in values(file, index)]) for index in range(len(file))]
    assert sorted(json.dumps([row[0] for row in one]) for one in expected[: len(file)]) == sorted(own)


def test_streams_are_told_apart_by_what_is_compared(tmp_path: Path) -> None:
    made = [opened(tmp_path, ROWS, samples, streaming=True).train.identity for samples in (PAIRS, LABELED)]
    assert len(set(made)) == 2


def test_streams_in_a_mixture(tmp_path: Path) -> None:
    mixture = {name: {"path": rows_file(tmp_path / f"{name}.jsonl", ROWS[at : at + 5])} for at, name in enumerate("xy")}
    train = opened(tmp_path, None, mixture=mixture, streaming=True, shuffle_buffer=1).train
    assert row_texts(train.batch(range(3)))[::2] == [(b"a?", b"yes a"), (b"b?", b"yes b"), (b"b?", b"yes b")]


def test_labels_cannot_be_compared_as_pairs(tmp_path: Path) -> None:
    words = r"2 answers of the data have a label.*Give such pairs, or choose an objective for labeled.*objective=kto"
    rows = [labeled("a", "1", True), labeled("b", "2", False)]
    with pytest.raises(DataError, match=rf"line 1: {words}"):
        opened(tmp_path, rows)
    later = [*ROWS * 30, *rows]  # after those that are looked at first
    with pytest.raises(DataError, match=rf"data: {words}"):
        opened(tmp_path, later)


@pytest.mark.parametrize(
    ("samples", "settings", "task", "words"),
    [
        ("rows", {}, "causal_lm", r"data\.kind=preference has answers to compare.*Choose one, such as objective=dpo"),
        (
            "pairs",
            {"kind": "chat"},
            "causal_lm",
            r"data\.kind=chat has no answers .* objective .*data\.kind=preference",
        ),
        ("labeled", {"kind": "text"}, "causal_lm", r"data\.kind=text has no answers to compare"),
        (
            "pairs",
            {"mixture": {"a": {"path": "x", "kind": "text"}}},
            "causal_lm",
            r"data\.mixture\.a\.kind=text has no",
        ),
        ("pairs", {"eval_sets": {"a": {"path": "x", "kind": "text"}}}, "causal_lm", r"data\.eval_sets\.a\.kind=text"),
        ("labeled", {"margin_column": "m"}, "causal_lm", r"data\.margin_column=m is for reward models"),
        ("labeled", {}, SEQUENCE_CLASSIFICATION, "An objective that compares answers with a label is for"),
        ("pairs", {}, "seq2seq", r"data\.kind=preference does not fit model\.task=seq2seq"),
        ("labeled", {"streaming": True, "shuffle_buffer": 1}, "causal_lm", r"data\.shuffle_buffer=1 leaves no other"),
        (
            "pairs",
            {"mixture": {"a": {"path": "x"}, "b": {"path": "y", "margin_column": "m"}}},
            SEQUENCE_CLASSIFICATION,
            r"data\.margin_column is given for some sources",
        ),
    ],
)
def test_settings_that_do_not_fit(samples: str, settings: dict[str, Any], task: str, words: str) -> None:
    path = {} if "mixture" in settings else {"path": "x"}
    with pytest.raises(ConfigError, match=words):
        check_task(task, DataConfig(**{"kind": "preference", **path, **settings}), samples)


def test_settings_of_other_kinds() -> None:
    with pytest.raises(ConfigError, match=r"chosen_column=x is for .*kind=preference, not text; remove it"):
        check(DataConfig(path="x", chosen_column="x"))
    with pytest.raises(ConfigError, match=r"label_column=x is for .*kind=text, not preference"):
        check(DataConfig(path="x", kind="preference", label_column="x"))
    check(DataConfig(path="x", kind="preference", roles={"bot": "assistant"}, chat_template="rag"))


@pytest.mark.parametrize("kind", ["chat", "preference"])
@pytest.mark.parametrize("levels", [300, 700, 980, 20_000])
def test_rows_of_many_levels(tmp_path: Path, kind: str, levels: int) -> None:
    message = '{"role": "assistant", "content": ' + "[" * levels + "]" * levels + "}"
    line = f'{{"messages": [{message}], "prompt": [{message}], "chosen": [{message}], "rejected": "y"}}\n'
    config = DataConfig(path=write(tmp_path / "a.jsonl", line), kind=kind, sequence_length=8, cache_dir=str(tmp_path))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(DataError, match=r"a\.jsonl, line 1"):
        tokenize_all(config, tokenizer)
