"""Messages of chats, and conversations of them: plain, and with calls of tools."""

from __future__ import annotations

from typing import Any

from tests.data.chat_templates import Family

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "Be brief."}


def call(name: str = "weather", number: int = 0, **arguments: Any) -> dict[str, Any]:
    """A call of a tool, as a message has it."""
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*given: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The assistant's message with these calls."""
    return {"role": "assistant", "content": None, "tool_calls": list(given)} | others


def result(content: str, number: int = 0) -> dict[str, Any]:
    """A tool's answer to the call of this number."""
    return {"role": "tool", "name": "weather", "tool_call_id": f"call{number:05}", "content": content}


def user(content: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str, **others: Any) -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": content, **others}


def conversation(family: Family) -> list[Any]:
    """Two questions with their answers, after a system prompt where the family has one."""
    chat = [user("a? yes"), assistant("yes"), user("b?\n"), assistant("no, 3 < 4 👍")]
    return [SYSTEM, *chat] if family.system else chat


def tool_conversation(name: str) -> list[Any]:
    """Questions that are answered through calls: one at a time, two at once where the family has that."""
    two = [call(number=1, city="Bonn"), call("time", 2)][: 1 if name == "llama3" else 2]
    results = [result('{"a": 1}', 1), result("[weather]", 2)][: len(two)]
    chat = [user("weather?"), calls(call(city="Köln", days=[1, 2], near={"km": 3})), result("rain"), assistant("Rain.")]
    return [
        SYSTEM,
        *chat,
        user("and there?"),
        calls(*two),
        *results,
        calls(call(number=3)),
        result("?", 3),
        assistant("?"),
    ]
