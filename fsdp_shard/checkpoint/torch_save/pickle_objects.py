"""What a pickle that is read without being run is made of, besides Python's own values: stand-ins and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_MAX_KEY_ITEMS = 64  # of a tuple that is a key: shapes and paths are shorter
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))


class StandIn:
    """What takes the place of an object of a library's class: it holds what the pickle says, and does nothing.

    `hashable` says whether one may be a dictionary key, which lets its own `__hash__` run.
    """

    hashable = False

    def set_state(self, state: Any) -> None:
        """Take over what the object's `__setstate__` would get; TypeError or ValueError if it cannot be that."""


class Global:
    """A class or function that a pickle names, and what stands in for it."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make


class Malformed(Exception):
    """What is wrong with the pickle, as the second half of a sentence."""


def checked_keys(items: Sequence[Any]) -> Sequence[Any]:
    for item in items:
        check_key(item)
    return items


def check_key(key: Any) -> None:
    """Hashing must end soon: keys are plain values, small flat tuples of them, or a stand-in that is made for it."""
    is_flat = type(key) is tuple and len(key) <= _MAX_KEY_ITEMS and all(isinstance(item, _PLAIN_KEYS) for item in key)
    if not isinstance(key, _PLAIN_KEYS) and not is_flat and not (isinstance(key, StandIn) and key.hashable):
        raise Malformed(f"has a {type(key).__name__} as a key")
