"""Writes the pickles in torch's own formats without importing torch (protocol 2, see `pickletools` for the opcodes).

torch objects are only named: a `Global` is a name, a `Call` a function with its arguments, an `Instance` a class with
its state.
"""

import pickle
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, which the reader looks up by this name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The result of `function(*arguments)` in the reader."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of `cls` whose `__setstate__`, or else `__dict__`, receives `state`."""

    cls: Global
    state: Any


@dataclass(frozen=True, slots=True)
class Persistent:
    """An id that the reader looks up in its container: a storage of a torch file."""

    id: Any


@dataclass(frozen=True, slots=True)
class Items:
    """A dict whose keys the reader builds, as (key, value) pairs."""

    pairs: tuple[tuple[Any, Any], ...]


def dumps(value: Any) -> bytes:
    """Pickle nested None, booleans, integers, strings, tuples, lists, dicts and the classes above."""
    out = bytearray(pickle.PROTO + b"\2")
    _put(out, value)
    return bytes(out + pickle.STOP)


def _put(out: bytearray, value: Any) -> None:
    match value:
        case None:
            out += pickle.NONE
        case bool():
            out += pickle.NEWTRUE if value else pickle.NEWFALSE
        case int() if -(2**31) <= value < 2**31:
            out += pickle.BININT + struct.pack("<i", value)
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            out += pickle.LONG1 + bytes([len(data)]) + data
        case str():
            text = value.encode("utf-8")
            out += pickle.BINUNICODE + struct.pack("<I", len(text)) + text
        case tuple():
            _put_all(out, pickle.MARK, value, pickle.TUPLE)
        case list():
            _put_all(out, pickle.EMPTY_LIST + pickle.MARK, value, pickle.APPENDS)
        case dict():
            _put(out, Items(tuple(value.items())))
        case Items(pairs):
            items = [part for pair in pairs for part in pair]
            _put_all(out, pickle.EMPTY_DICT + pickle.MARK, items, pickle.SETITEMS)
        case Global(module, name):
            out += pickle.GLOBAL + f"{module}\n{name}\n".encode("ascii")
        case Call(function, arguments):
            _put_all(out, b"", (function, arguments), pickle.REDUCE)
        case Instance(cls, state):
            _put_all(out, b"", (cls, ()), pickle.NEWOBJ)
            _put_all(out, b"", (state,), pickle.BUILD)
        case Persistent(id):
            _put_all(out, b"", (id,), pickle.BINPERSID)
        case _:
            raise AssertionError(f"{type(value).__name__} is not written")


def _put_all(out: bytearray, before: bytes, values: Any, after: bytes) -> None:
    out += before
    for value in values:
        _put(out, value)
    out += after
