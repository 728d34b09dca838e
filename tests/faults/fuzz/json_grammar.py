"""Changes of JSON documents: values of other types and sizes, keys that are gone, twice, renamed or moved."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.faults.corpus.edits import DIGITS

_MARK = "\0RAW"
# What is no value of Python's parser, or none that it may make.
_RAW = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    DIGITS,
    f"-{DIGITS}",
    "[" * 2000 + "]" * 2000,
    '"\\ud800"',
    "01",
    "'a'",
]
NUMBERS = [-1, 0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**80, -(2**63), 10**30]
_TEXTS = [
    "",
    "a",
    "F32",
    "I64",
    "x" * 3000,
    "\0",
    "../secret",
    "/etc/hostname",
    "http://host/x",
    "\x1b[31m",
    "é",
    "1",
    "null",
]

values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from([0.0, -0.5, 1.5, 1e308, 5e-324]),
    st.sampled_from(_TEXTS),
    st.text(max_size=8),
    st.lists(st.sampled_from([0, 1, -1, "a", None, [1], {"a": 1}]), max_size=4),
    st.dictionaries(st.sampled_from(["a", "type", "0"]), st.sampled_from([0, "a", None, [1]]), max_size=2),
)


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """One to three changes, each (kind, which of the paths, value or another path)."""
    where = st.integers(0, 1 << 16)
    kind = st.one_of(
        st.tuples(st.just("set"), where, values),
        st.tuples(st.just("raw"), where, st.sampled_from(_RAW)),
        st.tuples(st.just("delete"), where),
        st.tuples(st.just("rename"), where, st.sampled_from(["", "a", "shape", "dtype", "__metadata__", "\0"])),
        st.tuples(st.just("copy"), where, where),
        st.tuples(st.just("swap"), where, where),
        st.tuples(st.just("wrap"), where, st.sampled_from(["list", "map"])),
        st.tuples(st.just("add"), where, values),
    )
    return draw(st.lists(kind, min_size=1, max_size=3))


def changed(text: str, ops: list[tuple[Any, ...]]) -> str:
    """The document after the changes."""
    document: Any = {"": json.loads(text)}  # so that the whole has an owner too
    raw: list[str] = []
    for name, where, *arguments in ops:
        paths = list(_paths(document))
        owner, key = _owner(document, paths[where % len(paths)])
        if name == "set":
            owner[key] = copy.deepcopy(arguments[0])  # the examples share theirs
        elif name == "raw":
            raw.append(arguments[0])
            owner[key] = f"{_MARK}{len(raw) - 1}"
        elif name == "delete" and key != "":
            del owner[key]
        elif name == "rename" and isinstance(owner, dict) and key != "":
            owner[arguments[0]] = owner.pop(key)
        elif name in ("copy", "swap"):
            other, other_key = _owner(document, paths[arguments[0] % len(paths)])
            kept = json.dumps(owner[key])
            owner[key] = json.loads(json.dumps(other[other_key]))
            if name == "swap" and _still_has(other, other_key):
                other[other_key] = json.loads(kept)
        elif name == "wrap":
            owner[key] = [owner[key]] if arguments[0] == "list" else {"a": owner[key]}
        elif name == "add":
            _add(owner[key], copy.deepcopy(arguments[0]))
    written = json.dumps(document[""])
    for number, literal in enumerate(raw):
        written = written.replace(f'"\\u0000RAW{number}"', literal)
    return written


def _paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path to a value; of long lists and maps, those of their beginning and end."""
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else []
    for key in keys if len(keys) < 40 else [*keys[:20], *keys[-20:]]:
        yield (*path, key)
        yield from _paths(document[key], (*path, key))


def _owner(document: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
    for key in path[:-1]:
        document = document[key]
    return document, path[-1]


def _still_has(owner: Any, key: Any) -> bool:
    return key in owner if isinstance(owner, dict) else key < len(owner)


def _add(to: Any, value: Any) -> None:
    if isinstance(to, dict):
        to["more"] = value
    elif isinstance(to, list):
        to.append(value)
