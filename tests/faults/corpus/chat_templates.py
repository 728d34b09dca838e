"""Chat templates: programs that fail, ask for what they may not have, or write what is no text."""

from __future__ import annotations

import json

from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import Damage

_ALL = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


def _template(text: str | bytes) -> Damage:
    return edits.content(_FILE, text)


def _named(templates: object) -> Damage:
    return edits.both(edits.gone(_FILE), edits.fields(_CONFIG, chat_template=templates))


_REFUSED: dict[str, Damage] = {
    "an unfinished tag": _template("{% for message in messages %}"),
    "an unknown tag": _template("{% magic %}"),
    "an unknown filter": _template("{{ messages | magic }}"),
    "an unknown function": _template("{{ magic() }}"),
    "a division by zero": _template("{{ 1 // 0 }}"),
    "a refusal": _template("{{ raise_exception('no system messages') }}"),
    "an index beyond": _template("{{ messages[7]['content'] + 'x' }}"),
    "a sum of texts and numbers": _template("{{ 'a' + 1 }}"),
    "an escape by __class__": _template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "an escape by a function's globals": _template("{{ raise_exception.__globals__['os'].system('touch canary') }}"),
    "an escape by format": _template("{{ '{0.__class__.__init__.__globals__}'.format(messages) | length + 'x' }}"),
    "an escape by attr": _template("{{ (messages | attr('__class__'))() + 1 }}"),
    "a file that is included": _template("{% include '/etc/passwd' %}"),
    "a file that is imported": _template("{% import 'other.jinja' as other %}"),
    "a parent": _template("{% extends 'secret' %}"),
    "a macro that calls itself": _template("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"),
    "nested a thousand times": _template("{{ " + "(" * 1000 + "1" + ")" * 1000 + " }}"),
    "a change of the messages": _template("{{ messages.append(1) }}"),
    "no UTF-8": _template(b"{{ messages }}\xff"),
    "half a surrogate": _template('{{ "\\ud800" }}'),
    "nothing": _template("{% if false %}x{% endif %}"),
    "a number of 5,000 digits": _template("{{ " + "1" * 5000 + " + 'x' }}"),
    "a number": _named(7),
    "a list of numbers": _named([7]),
    "a list of nothing": _named([{"name": "a"}]),
    "a map": _named({"default": 5}),
    "an unfinished tag in tokenizer_config.json": _named("{% if"),
    "none": edits.gone(_FILE),
    "a directory": edits.directory(_FILE),
}
_ACCEPTED: dict[str, Damage] = {
    "one of several": _named([{"name": "default", "template": _ALL}]),
    "terminal codes": _template(f"\x1b[31m{_ALL}"),
}
_EITHER: dict[str, Damage] = {
    "a FIFO": edits.fifo(_FILE),
    "a NUL": _template("a\0{{ messages[0]['content'] }}"),
    "two defaults": _named([{"name": "default", "template": t} for t in ("a", "b")]),
    "no default": _named([{"name": "tools", "template": "{{ messages }}"}]),
    "another directory of templates": edits.both(
        lambda root: (root / "additional_chat_templates").mkdir(),
        edits.content("additional_chat_templates/tools.jinja", "{% if"),
    ),
    "chat_template.json": edits.content("chat_template.json", json.dumps({"chat_template": 5})),
    "time": _template("{{ strftime_now('%s' * 100) }}"),
    "a date of nonsense": _template("{{ strftime_now(5) }}"),
}

CASES = [
    *(Case(name, damaged("model", damage), damages="chat") for name, damage in _REFUSED.items()),
    *(Case(name, damaged("model", damage), expect="accepted") for name, damage in _ACCEPTED.items()),
    *(Case(name, damaged("model", damage), expect="any", damages="chat") for name, damage in _EITHER.items()),
]
