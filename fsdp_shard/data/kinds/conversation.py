"""Reads conversations stored in the common formats (columns of OpenAI, ShareGPT or Alpaca) as chat template messages.

Lists and tool calls may be JSON text, as in CSV and Parquet exports. Nulls in mappings are dropped: Arrow adds them
where rows have different keys.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_shard.data.sources.row import Row, require_columns, text_of
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.utils import format_count, nearest

Message = dict[str, Any]

_LISTS = ("messages", "conversations")
_OTHER_KIND = ", or data.kind=instruction if a row has a question and an answer in columns of their own"
_ALPACA = ("instruction", "input", "output")
COLUMNS = (*_LISTS, *_ALPACA, "history", "system", "tools")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_ROLES = ("function", "ipython", "observation")
_KNOWN = {
    **{role: role for role in _ROLES},
    **dict.fromkeys(_TOOL_ROLES, "tool"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    "human": "user",
}
_MARKS = ("weight", "train", "training", "loss")  # keys of OpenAI, axolotl and others for whether a turn is trained
_REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers uses the first


class Conversation(NamedTuple):
    """The messages of a row, the definitions of its tools, the roles that are neither known nor mapped, and the numbers
    of the assistant's messages that the data says not to train.
    """

    where: object
    messages: list[Message]
    tools: list[Any] | None
    unknown: list[str]
    excluded: tuple[int, ...] = ()

    @property
    def trained_messages(self) -> list[int]:
        """The numbers of the trained messages: those of the assistant with text or tool calls that are not excluded."""
        turns = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [number for number in turns if number not in self.excluded and not is_empty(self.messages[number])]


def check_role_names(roles: Any, name: str) -> None:
    """Raise ConfigError unless the setting `name` maps role names to roles or to themselves."""
    if not isinstance(roles, Mapping):
        raise ConfigError(f"{name}={roles} is not a mapping; give role names of the data, such as {{bot: assistant}}.")
    for given, role in roles.items():
        if not isinstance(given, str) or role not in (*_ROLES, *_TOOL_ROLES, given):
            raise ConfigError(
                f"{name}={{{given}: {role}}} does not map a name to a role{nearest(str(role), _ROLES)}; expected one "
                f"of {', '.join(_ROLES)}, or {given} itself if the chat template has that role."
            )


def read_conversation(row: Row, column: str | None, roles: Mapping[str, str]) -> Conversation:
    """Read the conversation of a row.

    The conversation is in `column`; if that is None, it is found by the column names. `roles` maps the data's roles to
    those of the chat template. Raises DataError if there is no conversation, more than one, or one that cannot be read.
    """
    try:
        messages = [_message(given, row.where) for given in _given(row, column)]
    except RecursionError as error:
        raise DataError(f"{row.where} has lists or mappings in too many levels; correct or remove it.") from error
    known = {**_KNOWN, **roles}
    unknown = [message["role"] for message in messages if message["role"] not in known]
    for message in messages:
        message["role"] = known.get(message["role"], message["role"])
    system = text_of(row.values.get("system"), "system", row.where, "data.kind, or rename the column")
    own = messages[0] if messages and messages[0]["role"] == "system" else {"content": system}
    if system.strip() and own.get("content") != system:
        raise DataError(f"{row.where} has a column 'system' and another first message of that role; remove one.")
    if system.strip() and "role" not in own:
        messages.insert(0, {"role": "system", "content": system})
    excluded = tuple(number for number, message in enumerate(messages) if _is_excluded(message, row.where))
    return Conversation(row.where, messages, _tools(row), unknown, excluded)


def is_empty(message: Message) -> bool:
    """Return whether a message has neither text nor tool calls."""
    content = message.get("content")
    return not ((content.strip() if isinstance(content, str) else content) or message.get("tool_calls"))


def _is_excluded(message: Message, where: object) -> bool:
    """Return whether the data excludes an assistant message from training; other messages are never trained."""
    marks = {name: message[name] for name in _MARKS if name in message and message["role"] == "assistant"}
    for name, value in marks.items():
        if not isinstance(value, (int, float)) or value not in (0, 1):
            raise DataError(
                f"{where}: {name!r} of the assistant's message is {str(value)[:80]!r}; expected whether the message is "
                f"trained, 0 or 1, or false or true. Correct, rename or remove it."
            )
    return not all(marks.values())


def check_roles(conversations: Sequence[Conversation]) -> None:
    """Raise DataError if any conversation has a role that is neither known nor mapped."""
    counts = Counter(role for conversation in conversations for role in conversation.unknown)
    if not counts:
        return
    first = {role: one.where for one in reversed(conversations) for role in one.unknown}
    listed = ", ".join(
        f"{role!r} of {format_count(number, 'message')} (first: {first[role]})" for role, number in counts.most_common()
    )
    role = counts.most_common(1)[0][0]
    raise DataError(
        f"Roles in {format_count(len(conversations), 'row')} looked at are unknown: {listed}. Set data.roles={{{role}: "
        f"ROLE}} to one of {', '.join(_ROLES)}, or to {role} if the chat template has that role."
    )


def _given(row: Row, column: str | None) -> Iterable[Any]:
    """Return the messages of a row in their original form, with the reader of the first column that has any."""
    alpaca = {_ALPACA[0]: _alpaca} if "output" in row.values else {}
    readers = {column: _listed} if column is not None else {**dict.fromkeys(_LISTS, _listed), **alpaca}
    found = [name for name in readers if row.values.get(name) is not None]
    if len(found) > 1:
        raise DataError(
            f"{row.where} has a conversation in each of the columns {' and '.join(found)}; set data.messages_column to "
            f"the one to train on."
        )
    name = next((name for name in (*found, *readers) if name in row.values), next(iter(readers)))
    require_columns(row, {"data.messages_column": name}, _OTHER_KIND)
    return readers[name](row, name)


def _listed(row: Row, name: str) -> list[Any]:
    messages = decode_json(row.values[name])
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(
            f"{row.where}: column {name!r} is not a list of messages. Set data.messages_column{_OTHER_KIND}."
        )
    return messages


def _alpaca(row: Row, _: str) -> list[Message]:
    """Return the questions and answers of `history`, followed by those of the row itself."""
    instruction, given, output = (
        text_of(row.values.get(name), name, row.where, "data.messages_column") for name in _ALPACA
    )
    history = decode_json(row.values.get("history")) or []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise DataError(f"{row.where}: column 'history' is not a list of pairs [question, answer].")
    pairs = [*history, ("\n".join(filter(str.strip, (instruction, given))), output)]
    turns = [turn for pair in pairs for turn in zip(("user", "assistant"), pair, strict=True)]
    return [{"role": role, "content": text} for role, text in turns if text]


def _tools(row: Row) -> list[Any] | None:
    tools = decode_json(row.values.get("tools")) or []
    found = [_without_nulls(decode_json(tool)) for tool in tools] if isinstance(tools, list) else [None]
    if not all(isinstance(tool, dict) for tool in found):
        raise DataError(f"{row.where}: column 'tools' is not a list of tool definitions; correct, rename or remove it.")
    return found or None


def _message(given: Mapping[str, Any], where: object) -> Message:
    """Convert a message with {role, content} or {from, value}: without nulls, tool calls in OpenAI's form."""
    message: Message = {name: value for name, value in _without_nulls(given).items() if value != []}

    def take(*names: str) -> Any:
        found = [message.pop(name) for name in names if name in message]
        return next(filter(None, found), found[0] if found else None)

    role, content, reasoning = take("role", "from"), take("content", "value"), take(*_REASONING)
    calls = decode_json(take("tool_calls", "function_call")) or []
    if role == "function_call":
        calls, content = decode_json(content) or {}, None
    if not isinstance(role, str) or not (calls or given.keys() & {"content", "value"}):
        raise DataError(f"{where}: a message has {', '.join(given) or 'nothing'}; expected role and content.")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if calls:
        message["tool_calls"] = [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
    optional = {"content": content, "reasoning_content": reasoning or None}
    return message | {"role": role} | {name: value for name, value in optional.items() if value is not None}


def _call(given: Any, where: object) -> dict[str, Any]:
    call = decode_json(given)
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        arguments = decode_json(function.get("arguments") or {})
        if isinstance(arguments, dict):
            others = {name: value for name, value in call.items() if name not in ("function", "name", "arguments")}
            return {"type": "function"} | others | {"function": {"name": function["name"], "arguments": arguments}}
    raise DataError(
        f"{where}: a tool call is {str(given)[:80]!r}; expected a function with its name, and arguments that are a "
        f"mapping or the JSON text of one."
    )


def decode_json(value: Any) -> Any:
    """Decode `value` if it is JSON text; otherwise return `value` itself."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):  # of thousands of levels
        return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, (list, tuple)) else value
