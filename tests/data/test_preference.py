"""data.kind=preference: each format of TRL's datasets as the tokens and labels that its documentation gives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdp_shard.data.config import DataConfig, kind_of
from fsdp_shard.data.sources.row import Header, Row
from fsdp_shard.data.validate import check_tokenizer, encode_prompts
from fsdp_shard.errors import DataError
from fsdp_shard.models import SEQUENCE_CLASSIFICATION
from tests.data.chat_templates import CHATML, QWEN3, TRIMS
from tests.data.chat_tokenizers import chat_tokenizer
from tests.data.conftest import END, byte_tokenizer

ASKED = [{"role": "user", "content": "2+2?"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("4", "5"))


def encoded(values: dict[str, Any], tokenizer: Any = None, task: str = "causal_lm", **settings: Any) -> list[Any]:
    config = DataConfig(kind="preference", **settings)
    (examples,) = kind_of(config, task).encode([Row("row 0", values)], tokenizer or byte_tokenizer())
    return examples


def split(values: dict[str, Any], tokenizer: Any = None, **settings: Any) -> list[tuple[Any, str, str]]:
    """The label, the text that is given and the text that is predicted of each example; the reason if it has none."""
    tokenizer, found = tokenizer or byte_tokenizer(), []
    for one in encoded(values, tokenizer, **settings):
        start = one.predicted.index(True) if one.ids else 0
        assert one.predicted == [False] * start + [True] * (len(one.ids) - start)
        found.append((one.label, tokenizer.decode(one.ids[:start]), tokenizer.decode(one.ids[start:])))
    return found


def test_an_explicit_prompt_token_by_token() -> None:
    chosen, rejected = encoded({"prompt": "Sky?", "chosen": " blue", "rejected": " red"})
    assert chosen.ids == [*b"Sky?", *b" blue", END]
    assert chosen.predicted == [False] * 4 + [True] * 6
    assert (rejected.ids, rejected.predicted) == ([*b"Sky?", *b" red", END], [False] * 4 + [True] * 5)
    assert [chosen.label, rejected.label, chosen.margin] == ["chosen", "rejected", None]


def test_a_prompt_begins_as_any_text_of_the_tokenizer() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|start|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 257)]
    )
    chosen, _ = encoded({"prompt": "a", "chosen": "b", "rejected": "c"}, tokenizer)
    assert (chosen.ids, chosen.predicted) == ([257, *b"ab", END], [False, False, True, True])


# The examples of TRL's pages "Dataset formats and types": standard and conversational, explicit and implicit prompts.
@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("The sky is blue.", "The sky is green.", ("The sky is", " blue.", " green.")),  # the space is the answers'
        ("same a", "same b", ("same", " a", " b")),
        ("abc", "xyz", ("", "abc", "xyz")),
        ("ends in space ", "x", ("", "ends in space ", "x")),
        ("the answer", "the answer is", ("the answe", "r", "r is")),  # always something is left
    ],
)
def test_a_common_beginning_of_texts_is_the_prompt(chosen: str, rejected: str, expected: tuple[str, str, str]) -> None:
    prompt, good, bad = expected
    found = split({"chosen": chosen, "rejected": rejected})
    assert found == [("chosen", prompt, f"{good}<|end|>"), ("rejected", prompt, f"{bad}<|end|>")]


def chat(answer: str) -> str:
    return f"{answer}<|im_end|>\n"


PROMPT = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "explicit": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "implicit": {"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
    "a null prompt": {"prompt": None, "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
    "a prompt that is text, and repeated": {"prompt": "2+2?", "chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
    "a prompt that is text": {"prompt": "2+2?", "chosen": GOOD, "rejected": BAD},
    "answers that are text": {"prompt": ASKED, "chosen": "4", "rejected": "5"},
    "JSON text": {name: json.dumps(value) for name, value in [("prompt", ASKED), ("chosen", GOOD), ("rejected", BAD)]},
    "ShareGPT's names": {
        "prompt": [{"from": "human", "value": "2+2?"}],
        "chosen": [{"from": "gpt", "value": "4"}],
        "rejected": [{"from": "gpt", "value": "5"}],
    },
}


@pytest.mark.parametrize("row", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations(row: dict[str, Any]) -> None:
    tokenizer = chat_tokenizer(CHATML)
    assert split(row, tokenizer) == [("chosen", PROMPT, chat("4")), ("rejected", PROMPT, chat("5"))]
    example = encoded(row, tokenizer)[0]
    # As TRL has them: the prompt with the generation prompt, and what the template adds to it.
    begin = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*ASKED, *GOOD], return_dict=False)
    assert (example.ids, example.predicted.index(True)) == (whole, len(begin))


def test_system_messages_and_roles_of_the_data() -> None:
    tokenizer = chat_tokenizer(CHATML)
    row = {"system": "Be brief.", "prompt": [{"role": "me", "content": "2+2?"}], "chosen": GOOD, "rejected": BAD}
    found = split(row, tokenizer, roles={"me": "user"})
    assert found[0] == ("chosen", f"<|im_start|>system\nBe brief.<|im_end|>\n{PROMPT}", chat("4"))
    with pytest.raises(DataError, match=r"unknown: 'me'.*Set data\.roles"):
        split(row, tokenizer)


def test_several_turns_and_tools() -> None:
    tokenizer = chat_tokenizer(QWEN3)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    row = {"prompt": ASKED, "chosen": [call], "rejected": BAD, "tools": [tool]}
    (_, prompt, chosen), (_, other, rejected) = split(row, tokenizer)
    assert prompt == other
    assert prompt.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "add", "parameters"' in prompt
    assert '{"name": "add", "arguments": {"a": 2}}' in chosen
    assert chosen.endswith("<|im_end|>\n")
    # The thought that this template adds where an answer is the last turn is the answer's.
    assert rejected == "<think>\n\n</think>\n\n5<|im_end|>\n"


def test_a_template_without_a_generation_prompt() -> None:
    tokenizer = chat_tokenizer(TRIMS)
    assert split(CONVERSATIONS["explicit"], tokenizer)[0] == ("chosen", "[INST] 2+2? [/INST]", " 4 <|end|>")


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    counts = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match=r"row 0: the chat template .* writes the prompt in another way"):
        split(CONVERSATIONS["explicit"], chat_tokenizer(counts))


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (True, "desirable"),
        (False, "undesirable"),
        (1, "desirable"),
        (0.0, "undesirable"),
        ("True", "desirable"),
        ("0", "undesirable"),
    ],
)
def test_one_answer_with_a_label(label: Any, expected: str) -> None:
    assert split({"prompt": "a", "completion": "b", "label": label}) == [(expected, "a", "b<|end|>")]
    row = {"prompt": ASKED, "completion": GOOD, "label": label}
    assert split(row, chat_tokenizer(CHATML)) == [(expected, PROMPT, chat("4"))]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ["chosen x", "rejected y", "rejected z"]),
        ({"ranks": [2, 1, 3]}, ["chosen y", "rejected x", "rejected z"]),
        ({"scores": [0.5, -1, 7]}, ["chosen z", "rejected x", "rejected y"]),
        ({"ranks": [1, 1, 2]}, ["chosen x", "rejected z", "tied"]),
        ({"ranks": [1, 1, 1]}, ["tied", "tied"]),
        ({"scores": [None, 1, 2]}, ["chosen z", "rejected y", "unscored"]),
        ({"ranks": "[3, 2, 1]"}, ["chosen z", "rejected x", "rejected y"]),
        ({"completions": ["x", "", None, "y"]}, ["chosen x", "rejected y", "empty answer", "empty answer"]),
        ({"completions": ["x", "x", "y"]}, ["chosen x", "equal", "rejected y"]),
        ({"completions": ["x"]}, ["single"]),
        ({"completions": []}, ["single"]),
        ({"completions": None}, ["single"]),
    ],
)
def test_ranked_lists(more: dict[str, Any], expected: list[str]) -> None:
    row = {"prompt": "p", "completions": ["x", "y", "z"], **more}
    found = [f"{label} {text.removesuffix('<|end|>')}".strip() for label, _, text in split(row)]
    assert found == expected


def test_marks_of_what_is_trained_may_be_in_a_prompt() -> None:
    """They change nothing: a prompt is never trained, and every answer is."""
    tokenizer, turns = chat_tokenizer(CHATML), [{"role": "assistant", "content": "b"}, *ASKED]
    row = {"prompt": [*ASKED, *turns], "chosen": GOOD, "rejected": BAD}
    marked = row | {"prompt": [*ASKED, turns[0] | {"weight": 0}, *ASKED], "chosen": [GOOD[0] | {"weight": 1}]}
    assert encoded(marked, tokenizer) == encoded(row, tokenizer)


def test_ranked_conversations() -> None:
    row = {"prompt": ASKED, "completions": [BAD, GOOD], "scores": [1, 2]}
    assert [one[::2] for one in split(row, chat_tokenizer(CHATML))] == [("chosen", chat("4")), ("rejected", chat("5"))]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "chosen": "", "rejected": "x"}, "empty"),
        ({"prompt": "p", "chosen": "x", "rejected": None}, "empty"),
        ({"prompt": "p", "chosen": None, "rejected": None}, "empty"),
        ({"prompt": "p", "chosen": " \n", "rejected": "x"}, "empty"),
        ({"prompt": ASKED, "chosen": [], "rejected": BAD}, "empty"),
        ({"prompt": ASKED, "chosen": [{"role": "assistant", "content": " "}], "rejected": BAD}, "empty"),
        ({"prompt": "p", "chosen": "x", "rejected": "x"}, "equal"),
        ({"chosen": "p x", "rejected": "p x"}, "equal"),
        ({"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *GOOD]}, "equal"),
        ({"prompt": "p", "completion": "x", "label": None}, "unlabeled"),
        ({"prompt": "p", "completion": "", "label": True}, "empty answer"),
        ({"prompt": ASKED, "completion": [], "label": True}, "empty answer"),
    ],
)
def test_what_is_left_out_says_why(row: dict[str, Any], reason: str) -> None:
    (example,) = encoded(row, chat_tokenizer(CHATML))
    assert (example.ids, example.predicted, example.label) == ([], [], reason)


def test_an_empty_prompt_is_none() -> None:
    assert split({"prompt": None, "chosen": "a", "rejected": "b"})[0] == ("chosen", "", "a<|end|>")


def test_columns_by_other_names_and_margins() -> None:
    row = {"question": "q", "good": "a", "bad": "b", "gap": "1.5", "prompt": "no", "chosen": "no", "rejected": "no"}
    names = {"prompt_column": "question", "chosen_column": "good", "rejected_column": "bad", "margin_column": "gap"}
    assert [(one.ids, one.margin) for one in encoded(row, **names)] == [([*b"qa", END], 1.5), ([*b"qb", END], 1.5)]
    left_out = encoded(row | {"bad": "a"}, **names)
    assert [(one.label, one.margin) for one in left_out] == [("equal", 1.5)], "one margin for each example"


def test_a_table_whose_rows_have_different_formats() -> None:
    row = {"prompt": "p", "chosen": None, "rejected": None, "completion": "x", "label": 1, "completions": None}
    assert split(row) == [("desirable", "p", "x<|end|>")]


def test_reward_models_read_prompt_and_answer_as_one_text() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(end=None)
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})  # 256 and 257
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 256), ("[SEP]", 257)]
    )
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert [one.ids for one in encoded(row, tokenizer, SEQUENCE_CLASSIFICATION)] == [
        [256, *b"pa", 257],
        [256, *b"pb", 257],
    ]
    assert encoded(row, byte_tokenizer(), SEQUENCE_CLASSIFICATION)[0].ids == [*b"pa", END]
    with pytest.raises(DataError, match=r"data\.kind=preference ends each answer with the end-of-text token"):
        encoded(row, tokenizer)


def test_tokenizers_that_suit_it() -> None:
    config = DataConfig(kind="preference")
    check_tokenizer(config, byte_tokenizer())
    check_tokenizer(config, chat_tokenizer(CHATML))
    with pytest.raises(DataError, match="eos_token"):
        check_tokenizer(config, byte_tokenizer(end=None))
    with pytest.raises(
        DataError, match=r"preference with conversations needs a chat template.*prompts and answers as t"
    ):
        encoded(CONVERSATIONS["explicit"])


def test_prompts_of_evaluations() -> None:
    config, tokenizer = DataConfig(kind="preference"), chat_tokenizer(CHATML)
    assert tokenizer.decode(encode_prompts(config, ["2+2?"], tokenizer)[0]) == PROMPT
    assert encode_prompts(config, ["2+2?"], byte_tokenizer()) == [[*b"2+2?"]]


NESTED: Any = "deep"
for _ in range(3000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "row 0 has no column 'chosen' and no 'rejected'; it has text"),
        ({"prompt": "p", "chosen": "x"}, "has no column 'rejected'; it has prompt, chosen"),
        ({"prompt": "p", "completion": "x"}, r"has no column 'label'.*Set data\.desirable_column"),
        ({"completion": "x", "label": 1}, "has no column 'prompt'"),
        ({"completions": ["x", "y"]}, "has no column 'prompt'"),
        (
            {"prompt": 3, "chosen": "x", "rejected": "y"},
            "column 'prompt' holds int, expected text or a list of messages",
        ),
        ({"prompt": "p", "chosen": {"a": 1}, "rejected": "y"}, r"'chosen' holds dict.*Set data\.chosen_column"),
        ({"prompt": "p", "chosen": ["a", "b"], "rejected": "y"}, "'chosen' holds list"),
        ({"prompt": "p", "chosen": "x", "rejected": 1.5}, "'rejected' holds float"),
        ({"prompt": "p", "chosen": GOOD, "rejected": "y"}, "one is text and the other a list of messages"),
        ({"prompt": ASKED, "chosen": [*ASKED, *GOOD], "rejected": BAD}, "an answer begins with a message that is not"),
        ({"prompt": ASKED, "chosen": [{"role": 3}], "rejected": BAD}, "a message has role; expected role and content"),
        ({"prompt": ASKED, "chosen": [{}], "rejected": BAD}, "a message has nothing; expected role and content"),
        ({"prompt": "p", "completion": "x", "label": 2}, "column 'label' holds '2', expected true or false"),
        ({"prompt": "p", "completion": "x", "label": "good"}, "'good'"),
        ({"prompt": "p", "completion": "x", "label": []}, r"'\[\]'"),
        ({"prompt": "p", "completions": "x"}, "column 'completions' holds str, expected a list of answers"),
        ({"prompt": "p", "completions": {"a": 1}}, "'completions' holds dict"),
        ({"prompt": "p", "completions": [1, 2]}, r"'completions' holds int.*Set data\.completions_column"),
        (
            {"prompt": "p", "completions": ["x", "y"], "ranks": [1]},
            "'ranks' holds 1 values, expected a list of 2 numbers",
        ),
        ({"prompt": "p", "completions": ["x", "y"], "scores": 3}, "'scores' holds int, expected a list of 2 numbers"),
        ({"prompt": "p", "completions": ["x", "y"], "scores": [1, "a"]}, "'scores' holds 'a', expected a number"),
        ({"prompt": "p", "completions": ["x", "y"], "scores": [1, float("nan")]}, "'nan', expected a number"),
        ({"prompt": "p", "completions": ["x", "y"], "ranks": [True, False]}, "'True', expected a number"),
        ({"system": "s", "prompt": "p", "chosen": "x", "rejected": "y"}, "which only conversations have"),
        (
            {"prompt": ASKED, "chosen": [GOOD[0] | {"weight": 0}], "rejected": BAD},
            r"row 0: a message of an answer is marked as not to be trained .* compared as a whole",
        ),
        ({"prompt": ASKED, "completion": [GOOD[0] | {"train": False}], "label": 1}, "marked as not to be trained"),
        ({"prompt": ASKED, "completions": [GOOD, [BAD[0] | {"loss": 3}]]}, "'loss' of the assistant's message is '3'"),
        ({"prompt": NESTED, "chosen": "x", "rejected": "y"}, "'prompt' holds list"),
        ({"prompt": "[" * 100_000, "chosen": [{"role": "user"}], "rejected": "y"}, "one is text and the other"),
        (
            {"prompt": ASKED, "chosen": [{"role": "assistant", "content": NESTED}], "rejected": BAD},
            "row 0 has lists or mappings in too many levels",
        ),
        (
            {"chosen": [{"role": "user", "content": NESTED}], "rejected": [{"role": "user", "content": [*NESTED]}]},
            "row 0 has lists or mappings in too many levels",
        ),
    ],
)
def test_rows_that_are_wrong(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        encoded(row, chat_tokenizer(CHATML))


@pytest.mark.parametrize("value", [None, "x", True, [1], float("inf"), 10**400])
def test_margins_that_are_no_numbers(value: Any) -> None:
    with pytest.raises(DataError, match=r"row 0: column 'm' holds .*, expected a number\. Set data\.margin_column"):
        encoded({"prompt": "p", "chosen": "x", "rejected": "y", "m": value}, margin_column="m")


@pytest.mark.parametrize(
    "name", ["prompt", "chosen", "rejected", "completion", "completions", "desirable", "ranks", "scores", "margin"]
)
def test_a_column_that_is_named_must_be_there(name: str) -> None:
    row = {"prompt": "p", "chosen": "x", "rejected": "y", "completion": "z", "completions": ["u", "v"], "label": 1}
    column: dict[str, Any] = {f"{name}_column": "mine"}
    with pytest.raises(DataError, match=rf"row 0 has no column 'mine'; .*Set data\.{name}_column"):
        encoded(row, **column)
    header = Header("file.parquet", list(row))
    kind = kind_of(DataConfig(kind="preference", **column))
    with pytest.raises(DataError, match=r"file\.parquet has no column 'mine'"):
        kind.read(Row("row 0", row, header=header))
