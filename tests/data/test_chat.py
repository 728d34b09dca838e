"""Chats as people have them: every supervised token is the assistant's text or ends its turn, under any template."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.data.config import DataConfig, kind_of, sources_of
from fsdp_shard.data.kinds.chat import ChatKind
from fsdp_shard.data.sources.row import Row
from fsdp_shard.data.validate import check_data, check_tokenizer
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.utils import check
from tests.data.chat_templates import CHATML, FAMILIES, QWEN2, Family
from tests.data.chat_tokenizers import rendered, tokenizer_of
from tests.data.conftest import predicted_texts
from tests.data.conversations import (
    SYSTEM,
    TOOLS,
    assistant,
    call,
    calls,
    conversation,
    result,
    tool_conversation,
    user,
)
from tests.data.data_files import write
from tests.support.prepared_data import prepare_data


def learnt(tokenizer: Any, row: dict[str, Any], **settings: Any) -> tuple[str, list[str]]:
    """The whole text, and the stretches of it that are predicted."""
    kind = kind_of(DataConfig(kind="chat", **settings))
    assert kind.read(Row("row 0", row)) is not None
    ((example,),) = kind.encode([Row("row 0", row)], tokenizer)
    return tokenizer.decode(example.ids), predicted_texts(example, tokenizer)


def oracle(family: Family, messages: list[Any], tools: Any = None) -> list[str]:
    """The turns of the assistant: what each adds to the conversation before it, up to its end token.

    It holds for the last turn of each beginning of a conversation, whatever the template does to earlier ones.
    """
    turns = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = rendered(family, messages[:number], tools, prompt=True)
            if (
                "add_generation_prompt" not in family.template
            ):  # and Mistral's has the system prompt in the last question
                before = rendered(family, [*messages[:number], assistant("☃")], tools).partition(" ☃")[0]
            after = rendered(family, messages[: number + 1], tools)
            assert after.startswith(before)
            turns.append(after[len(before) :].strip().removesuffix("\n<|endoftext|>"))  # Phi ends conversations too
    return turns


def as_text(messages: list[Any]) -> list[Any]:
    """The same with arguments as JSON text."""
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for one in message.get("tool_calls", []):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
    return copied


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_conversations(name: str) -> None:
    family = FAMILIES[name]
    chat, tokenizer = conversation(family), tokenizer_of(family)
    text, turns = learnt(tokenizer, {"messages": chat})
    assert text == rendered(family, chat) == tokenizer.apply_chat_template(chat, tokenize=False)
    expected = oracle(family, chat)
    if family.thinks:
        expected = [
            turn.removeprefix("<think>\n\n</think>\n\n") for turn in expected
        ]  # as much the template's as a header
    assert turns == expected
    assert [turn[: len(words)] for turn, words in zip(turns, ("yes", "no, 3 < 4 👍"), strict=True)] == [
        "yes",
        "no, 3 < 4 👍",
    ]


@pytest.mark.parametrize("form", ["mappings", "text"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools and not family.thinks])
def test_tool_calls(name: str, form: str) -> None:
    family, chat = FAMILIES[name], tool_conversation(name)
    wanted = as_text(chat) if name == "deepseek" else chat
    if name != "deepseek":
        wanted = [{key: value for key, value in message.items() if value is not None} for message in wanted]
    row = {"messages": as_text(chat) if form == "text" else chat, "tools": TOOLS}
    text, turns = learnt(tokenizer_of(family), row)
    assert text == rendered(family, wanted, TOOLS)
    assert turns == oracle(family, wanted, TOOLS)
    assert [turn.endswith(family.tokens[1:]) for turn in turns] == [True] * 5


def test_text_before_a_call() -> None:
    chat = [
        user("weather?"),
        assistant("Let me see.", tool_calls=[call(city="Bonn")]),
        result("rain"),
        assistant("Rain."),
    ]
    assert learnt(tokenizer_of(FAMILIES["qwen2"]), {"messages": chat})[1] == oracle(FAMILIES["qwen2"], chat)
    for name in ("llama3", "mistral"):
        with pytest.raises(DataError, match=r"row 0: .* the template drops the assistant's text"):
            learnt(tokenizer_of(FAMILIES[name]), {"messages": chat})
    with pytest.raises(DataError, match="drops the assistant's tool call"):
        learnt(tokenizer_of(FAMILIES["chatml"]), {"messages": chat})


def test_thoughts_are_learnt_where_the_template_shows_them() -> None:
    """Qwen 3 drops those before the last question, and writes empty ones into a last turn that has none."""
    chat = [user("a?"), assistant("A", reasoning_content="hm"), user("b?"), calls(call(), thinking="so"), result("1")]
    family = FAMILIES["qwen3"]
    written = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>'
    last = ("<think>\nnow\n</think>\n\nB<|im_end|>", [assistant("B", reasoning_content="now")])
    inline = (last[0], [assistant("<think>\nnow\n</think>\n\nB")])
    plain = ("B<|im_end|>", [assistant("B")])
    for expected, end in (last, inline, plain):
        text, turns = learnt(tokenizer_of(family), {"messages": chat + end})
        assert turns == ["A<|im_end|>", "<think>\nso\n</think>\n\n" + written, expected]
        assert text.endswith(expected + "\n")
    qwen2, thinking = tokenizer_of(FAMILIES["qwen2"]), [user("a?"), assistant("<think>\nhm</think> A ")]
    assert learnt(qwen2, {"messages": thinking})[1] == ["<think>\nhm</think> A <|im_end|>"]
    with pytest.raises(DataError, match=r"drops the assistant's reasoning\. Set data\.chat_template"):
        learnt(qwen2, {"messages": chat + last[1]})
    with pytest.raises(DataError, match="drops the assistant's reasoning"):
        learnt(tokenizer_of(FAMILIES["deepseek"]), {"messages": thinking})


@pytest.mark.parametrize("thought", [{"reasoning_content": "so"}, {"content": "<think>\nso\n</think>\n\n"}])
def test_calls_of_earlier_turns_whose_thoughts_are_dropped(thought: dict[str, Any]) -> None:
    chat = [user("a?"), calls(call(), **thought), result("1"), assistant("B")]
    written = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>'
    _, turns = learnt(tokenizer_of(FAMILIES["qwen3"]), {"messages": [*chat, user("c?"), assistant("C")]})
    assert turns == [written, "B<|im_end|>", "C<|im_end|>"]
    _, turns = learnt(tokenizer_of(FAMILIES["qwen3"]), {"messages": chat})
    assert turns == ["<think>\nso\n</think>\n\n" + written, "B<|im_end|>"]
    if "content" in thought:
        _, turns = learnt(tokenizer_of(FAMILIES["qwen2"]), {"messages": chat})
        assert turns == ["<think>\nso\n</think>\n\n\n" + written, "B<|im_end|>"]


def test_calls_without_thoughts_where_the_last_turn_has_empty_ones() -> None:
    chat, empty = tool_conversation("qwen3"), "<think>\n\n</think>\n\n"
    expected = [turn.removeprefix(empty) for turn in oracle(FAMILIES["qwen3"], chat, TOOLS)]
    text, turns = learnt(tokenizer_of(FAMILIES["qwen3"]), {"messages": chat, "tools": TOOLS})
    assert turns == expected
    assert text == rendered(FAMILIES["qwen3"], chat, TOOLS)


MARKED = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}
{%- for c in m['tool_calls'] or [] %}<call>{{ c['function'] | tojson }}</call>{% endfor %}<|im_end|>{% endgeneration %}
{% else %}{{ m['content'] }}<|im_end|>{% endif %}
{% endfor %}"""


def test_a_template_that_marks_turns_decides() -> None:
    family = FAMILIES["chatml"]._replace(template=MARKED)
    _, turns = learnt(
        tokenizer_of(family), {"messages": as_text([user("?"), calls(call(a=1), content="So:"), result("r")])}
    )
    assert turns == ['So:<call>{"name": "weather", "arguments": {"a": 1}}</call><|im_end|>']


@pytest.mark.parametrize("template", ["chatml", "marked"])
@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}]
)
def test_a_turn_that_is_not_to_be_trained(mark: dict[str, Any], template: str) -> None:
    family = FAMILIES["chatml"]
    family = family._replace(template=MARKED) if template == "marked" else family
    others = {name: 1 - value for name, value in mark.items()}  # change nothing
    chat = [user("a?"), assistant("bad", **mark), user("b?") | mark, assistant("good", **others), user("c?")]
    plain = [{"role": message["role"], "content": message["content"]} for message in chat]
    text, turns = learnt(tokenizer_of(family), {"messages": [*chat, assistant("also good")]})
    whole, all_turns = learnt(tokenizer_of(family), {"messages": [*plain, assistant("also good")]})
    assert (text, turns) == (whole, all_turns[1:])
    assert turns == ["good<|im_end|>", "also good<|im_end|>"]
    kind = kind_of(DataConfig(kind="chat"))
    assert kind.read(Row("row 0", {"messages": chat[:3]})) is None
    (question,) = kind.questions([kind.read(Row("row 0", {"messages": [*chat, assistant("worse", **mark)]}))], None)  # type: ignore[arg-type]  # it is not rendered
    assert question is None, "the answer of the data is none to compare with"


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"train": "yes"}, {"loss": [0]}, {"training": 2}])
def test_a_mark_that_says_neither(mark: dict[str, Any]) -> None:
    chat = [user("a?") | mark, assistant("b")]
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    assert learnt(tokenizer, {"messages": chat})[1] == ["b<|im_end|>"], "a user's message is never trained"
    with pytest.raises(DataError, match=rf"^row 0: '{next(iter(mark))}' of the assistant's message is .*; expected"):
        learnt(tokenizer, {"messages": [chat[0], assistant("b", **mark)]})


def test_a_template_may_leave_out_turns_by_itself_but_not_divide_them() -> None:
    marks = MARKED.replace("{% generation %}", "{% if m.train %}{% generation %}")
    marks = marks.replace("{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}")
    chat = [user("a?"), assistant("bad", train=False), user("b?"), assistant("good", train=True)]
    tokenizer = tokenizer_of(FAMILIES["chatml"]._replace(template=marks))
    assert learnt(tokenizer, {"messages": chat})[1] == ["good<|im_end|>"]
    parts = MARKED.replace("<|im_end|>{% endgen", "{% endgeneration %}{% generation %}<|im_end|>{% endgen")
    tokenizer = tokenizer_of(FAMILIES["chatml"]._replace(template=parts))
    assert learnt(tokenizer, {"messages": chat[2:]})[1] == ["good<|im_end|>"]
    with pytest.raises(DataError, match=r"^row 0 has messages .* marks 4 parts of 2 messages of the assistant"):
        learnt(tokenizer, {"messages": chat})


@pytest.mark.parametrize("template", [FAMILIES["chatml"].template, MARKED])
def test_answers_without_text_are_not_trained(template: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(FAMILIES["chatml"]._replace(template=template))
    chat = [user("a?"), assistant(""), user("b?"), assistant(" \n"), user("c?"), assistant("c")]
    assert learnt(tokenizer, {"messages": chat})[1] == ["c<|im_end|>"]
    rows = [{"messages": chat}, {"messages": chat[:4]}, {"messages": [user("d?"), assistant("d", weight=0)]}]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=path, kind="chat", sequence_length=256, cache_dir=str(tmp_path / "cache"))
    samples = prepare_data(config, tokenizer)
    assert samples.train.num_samples == 1
    assert "3 rows, " in samples.notes[0]
    assert "2 rows dropped with nothing to learn" in samples.notes[0]


ASKED = [user("weather?"), calls(call(city="Köln")), result("rain"), assistant("Rain.")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps(ASKED), "tools": json.dumps(TOOLS)},
        {
            "messages": ASKED,
            "tools": [json.dumps(TOOLS[0])],
            "conversations": None,
            "instruction": None,
            "output": None,
        },
        {
            "conversations": [
                {"from": "human", "value": "weather?", "weight": None},
                {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Köln"}}'},
                {"from": "observation", "value": "rain"},
                {"from": "gpt", "value": "Rain."},
            ],
            "tools": [{**TOOLS[0], "strict": None}],
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "weather?", "image": None}]},
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "weather", "arguments": '{"city": "Köln"}'},
                },
                {"role": "function", "content": "rain"},
                {"role": "model", "content": "Rain.", "tool_calls": [], "name": None},
            ],
            "tools": TOOLS,
        },
        {
            "messages": [
                ASKED[0],
                {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": "Köln", "days": None}}]},
                {"role": "ipython", "content": "rain"},
                ASKED[3],
            ],
            "tools": TOOLS,
        },
    ],
    ids=["JSON text", "OpenAI", "ShareGPT", "functions", "bare calls"],
)
def test_one_conversation_in_many_forms(row: dict[str, Any]) -> None:
    text, turns = learnt(tokenizer_of(FAMILIES["qwen2"]), row)
    assert (text, turns) == learnt(tokenizer_of(FAMILIES["qwen2"]), {"messages": ASKED, "tools": TOOLS})
    assert text == rendered(FAMILIES["qwen2"], [{k: v for k, v in m.items() if v is not None} for m in ASKED], TOOLS)


def test_alpaca_and_a_column_with_the_system_prompt() -> None:
    row = {"instruction": "Add", "input": "1 2", "output": "3", "history": [["Hello", "Hi"]], "system": "Be brief."}
    chat = [SYSTEM, user("Hello"), assistant("Hi"), user("Add\n1 2"), assistant("3")]
    expected = rendered(FAMILIES["chatml"], chat), ["Hi<|im_end|>", "3<|im_end|>"]
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    assert learnt(tokenizer, row) == learnt(tokenizer, row | {"history": '[["Hello", "Hi"]]'}) == expected
    assert learnt(tokenizer, {"messages": chat[1:], "system": "Be brief."}) == expected
    assert learnt(tokenizer, {"messages": chat, "system": "Be brief."}) == expected
    bare = {"instruction": "Add", "input": None, "output": "3", "history": None, "system": None}
    assert learnt(tokenizer, bare)[0] == rendered(FAMILIES["chatml"], [user("Add"), assistant("3")])
    assert kind_of(DataConfig(kind="chat")).read(Row("row 0", bare | {"output": ""})) is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": ASKED, "conversations": ASKED}, r"messages and conversations; set data\.messages_column"),
        ({"messages": ASKED, "instruction": "a", "output": "b"}, "messages and instruction"),
        ({"messages": [SYSTEM, *ASKED], "system": "Be long."}, "'system' and another first message"),
        ({"messages": ASKED, "system": 1}, "'system' holds int"),
        ({"messages": ASKED, "tools": "search"}, "'tools' is not a list of tool definitions"),
        ({"messages": ASKED, "tools": 5}, "'tools' is not a list of tool definitions"),
        ({"messages": "not JSON"}, "'messages' is not a list of messages"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "'history' is not a list of pairs"),
        (
            {"messages": [calls({"function": {"name": "f", "arguments": "{"}})]},
            "a tool call is .* the JSON text of one",
        ),
        ({"messages": [calls({"name": 3})]}, "a tool call is"),
    ],
)
def test_what_is_no_conversation_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=f"row 0.*{words}"):
        learnt(tokenizer_of(FAMILIES["qwen2"]), row)


def test_a_template_without_tools_is_refused() -> None:
    with pytest.raises(DataError, match="row 0 has definitions of tools, which the chat template does not use"):
        learnt(tokenizer_of(FAMILIES["chatml"]), {"messages": ASKED, "tools": TOOLS})


PRINTS = """{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}
{{ c['function']['name'] }}({{ c['function']['arguments'] }}){% endfor %}<|im_end|>{% endfor %}"""


def test_arguments_are_never_written_as_python_writes_them() -> None:
    family = FAMILIES["chatml"]._replace(template=PRINTS)
    assert learnt(tokenizer_of(family), {"messages": ASKED})[1][0] == 'weather({"city": "Köln"})<|im_end|>'


def oasst(role: str = "prompter") -> list[dict[str, Any]]:
    return [{"role": role, "content": "a?"}, {"role": "assistant", "content": "b"}]


def test_roles_of_the_data(tmp_path: Path) -> None:
    tokenizer, text = tokenizer_of(FAMILIES["chatml"]), rendered(FAMILIES["chatml"], [user("a?"), assistant("b")])
    assert learnt(tokenizer, {"messages": oasst()}, roles={"prompter": "user"})[0] == text
    kept = learnt(tokenizer, {"messages": oasst("control")}, roles={"control": "control"})[0]
    assert kept == text.replace("user", "control")
    turned = learnt(tokenizer, {"messages": [*oasst("bot"), user("c")]}, roles={"bot": "user", "user": "assistant"})
    assert turned[1] == ["b<|im_end|>", "c<|im_end|>"], "settings come before what is well known"
    rows = [oasst("user")] * 2 + [oasst(), [*oasst(), *oasst("Bot")], oasst("user")]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = DataConfig(path=path, kind="chat", cache_dir=str(tmp_path / "cache"))
    words = (
        rf"Roles in 5 rows looked at are unknown: 'prompter' of 2 messages \(first: {path}, line 3\), 'Bot' of 1 "
        rf"message \(first: {path}, line 4\)\. Set data\.roles={{prompter: ROLE}} to one of system, developer, user"
    )
    with pytest.raises(DataError, match=words):
        check_data(config)
    with pytest.raises(DataError, match=words):
        prepare_data(config, tokenizer)
    check_data(dataclasses.replace(config, roles={"prompter": "user", "Bot": "user"}))


MIXED = {"chats": {"path": "a.jsonl", "kind": "chat"}, "books": {"path": "b.txt"}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"roles": {"bot": "assistant"}},
            "roles={'bot': 'assistant'} is for kind=chat or preference, not text; remove it",
        ),
        ({"chat_template": "rag"}, "chat_template=rag is for kind=chat or preference, not text"),
        ({"kind": "chat", "roles": ["bot"]}, r"roles=\['bot'\] is not a mapping"),
        ({"kind": "chat", "roles": {"bot": "asistant"}}, r"roles={bot: asistant} .* \(did you mean assistant\?\)"),
        ({"kind": "chat", "roles": {"bot": ["user"]}}, "does not map a name to a role"),
        ({"kind": "chat", "roles": {1: "user"}}, "roles={1: user} does not map a name"),
        (
            {"kind": "preference", "roles": {"bot": "asistant"}},
            r"roles={bot: asistant} .* \(did you mean assistant\?\)",
        ),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs={'a': 1} is for kind=chat or preference, not text"),
        ({"kind": "chat", "chat_template_kwargs": ["a"]}, r"chat_template_kwargs=\['a'\] is not a mapping"),
        ({"kind": "chat", "chat_template_kwargs": {"a b": 1}}, "has the name 'a b', which is not a var"),
        (
            {"kind": "chat", "chat_template_kwargs": {"messages": []}},
            "has the name 'messages', which is not a var",
        ),
        ({"kind": "chat", "chat_template_kwargs": {"a": [None]}}, r"chat_template_kwargs\.a=\[None\] must be a string"),
        (
            {"kind": "chat", "chat_template_kwargs": {"a": float("inf")}},
            r"kwargs\.a=inf must be a string",
        ),
        (
            {"kind": "chat", "chat_template": "no/such.jinja"},
            "chat_template=no/such.jinja cannot be read: .* No such file",
        ),
        (
            {"mixture": {**MIXED, "chats": {**MIXED["chats"], "roles": {"a": "b"}}}},
            r"mixture\.chats\.roles={a: b} does not",
        ),
        (
            {"mixture": {**MIXED, "chats": {**MIXED["chats"], "roles": "a"}}},
            r"mixture\.chats\.roles=a is not a mapping",
        ),
        (
            {"mixture": {"books": {"path": "b.txt", "roles": {}}}},
            r"mixture\.books\.roles is for kind=chat or preference, not text",
        ),
        (
            {"mixture": {"books": {"path": "b.txt"}}, "chat_template": "rag"},
            "chat_template=rag is for kind=chat or preference, not text",
        ),
        (
            {"mixture": {"a": {"path": "b", "kind": "chat", "chat_template": "rag"}}},
            "chat_template is not a setting of a",
        ),
    ],
)
def test_wrong_settings_of_chats(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(DataConfig(path="" if "mixture" in values else "x", **values))


def test_settings_of_chats_in_a_mixture() -> None:
    own = {**MIXED, "chats": {**MIXED["chats"], "roles": {"a": "user"}}}
    for config in (
        DataConfig(path="", mixture=own),
        DataConfig(path="", mixture=MIXED, roles={"a": "user"}, chat_template="rag"),
    ):
        check(config)
        kind = kind_of(sources_of(config)["chats"])
        assert isinstance(kind, ChatKind)
        assert kind.roles == {"a": "user"}


def test_a_chat_template_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jinja", QWEN2)
    rows = [{"messages": [user("a?"), assistant("b")]}] * 3
    data = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=data, kind="chat", sequence_length=256, cache_dir=str(tmp_path / "cache"))
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    own = prepare_data(config, tokenizer).train
    mine = prepare_data(dataclasses.replace(config, chat_template=path, packing=True), tokenizer).train
    named = tokenizer_of(FAMILIES["chatml"])
    named.chat_template = {"default": PRINTS, "rag": CHATML}
    by_name = prepare_data(dataclasses.replace(config, chat_template="rag"), named).train
    assert by_name.identity == own.identity
    assert mine.identity != own.identity
    assert tokenizer.chat_template == CHATML, "the caller's tokenizer stays as it is"
    write(tmp_path / "mine.jinja", CHATML.replace("assistant", "model"))
    streams = [
        prepare_data(dataclasses.replace(config, streaming=True, chat_template=template), tokenizer).train.identity
        for template in (None, path)
    ]
    assert streams[0] != streams[1]
    for tokenizer_, template, words in (
        (named, "tool", r"tool is no file, and the tokenizer has no template of that name; .* has default, rag"),
        (
            tokenizer_of(FAMILIES["chatml"]._replace(template="{% if %}")),
            None,
            r"The chat template of .* is not valid, line 1",
        ),
    ):
        with pytest.raises(DataError, match=words):
            check_tokenizer(dataclasses.replace(config, chat_template=template), tokenizer_)
    named.chat_template = {"a": PRINTS, "b": CHATML}
    with pytest.raises(DataError, match=r"multiple chat templates .* Set data\.chat_template to one of these names"):
        check_tokenizer(config, named)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if 'tool_calls' in messages[-1] %}!{% endif %}" + QWEN2, "changes earlier turns with a tool call"),
        (
            QWEN2.replace("tool_call>' }}", "tool_call>' + ('' if message == messages[-1] else ' ') }}"),
            "if others follow",
        ),
    ],
    ids=["beginning", "end"],
)
def test_templates_that_hide_where_a_call_is_are_refused(template: str, words: str) -> None:
    assert template != QWEN2
    chat = ASKED[:2] if words.startswith("changes") else ASKED
    with pytest.raises(
        DataError,
        match=f"row 0: the chat template of .* does not show which tokens are the assistant's: the template .*{words}",
    ):
        learnt(tokenizer_of(FAMILIES["qwen2"]._replace(template=template)), {"messages": chat})


BEHIND = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NEWLINE = MARKED.replace("{% endgeneration %}", "\n\n {% endgeneration %}")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("template", "ends"), [(BEHIND, False), (PLAIN, False), (NEWLINE, True), (MARKED, True)])
def test_a_template_whose_turns_do_not_end_is_told(tmp_path: Path, template: str, ends: bool, streaming: bool) -> None:
    row = json.dumps({"messages": [user("a?"), assistant("b"), user("c?"), assistant("d")]})
    path = write(tmp_path / "a.jsonl", f"{row}\n" * 3)
    given = {"streaming": True} if streaming else {"cache_dir": str(tmp_path / "cache")}
    config = DataConfig(path=path, kind="chat", sequence_length=64, **given)
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    tokenizer.chat_template, tokenizer.name_or_path = template, "models/mine"
    told = [note for note in prepare_data(config, tokenizer).notes if note.startswith("warning: ")]
    words = f"warning: data.path={path}: the chat template of models/mine ends no trained turn of the assistant with an"
    assert [note[: len(words)] for note in told] == ([] if ends else [words])
    own = write(tmp_path / "own.jinja", template)
    told = [*prepare_data(dataclasses.replace(config, chat_template=own), tokenizer).notes]
    assert any(f"data.chat_template={own} ends no trained turn" in note for note in told) is not ends


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_of_known_templates_end(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": [user("a?"), assistant("b")]}) + "\n")
    config = DataConfig(path=path, kind="chat", sequence_length=256, cache_dir=str(tmp_path / "cache"))
    assert not [note for note in prepare_data(config, tokenizer_of(FAMILIES[name])).notes if "warning" in note]
