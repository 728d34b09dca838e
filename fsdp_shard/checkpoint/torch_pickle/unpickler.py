"""A stack machine that reads a pickle without running it (opcodes: PEP 307, PEP 3154, pickletools).

`pickle.Unpickler` with another `find_class` is not enough: a file of a few bytes can still request a memo of 34 GB, end
the process by hashing deeply nested tuples, or hash for hours (all three tried on Python 3.11). Here, every length is
checked against the remaining data, keys are small and flat, no name is looked up in a real module, and only
constructors in a given table (`allow_list`) are called.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import exceeded, format_size, limits

# Memory of a pickle's objects: any object, one in the memo, and larger ones. The limit for a file is a base plus an
# amount per byte; a real .metadata needs 28.
_OBJECT_BYTES, _MEMO_BYTES = 64, 128
_BYTES_OF = {ord("\x8f"): 216, ord("\x91"): 216, ord("r"): _MEMO_BYTES}
_MEMORY_BYTES, _MEMORY_PER_BYTE = 32 << 20, 24  # tensor descriptions need 15 per byte


class CutShort(CheckpointError):
    """A pickle that continues beyond the end of its data."""


class Machine:
    """Reads one pickle that begins at byte `start` of `data`; afterwards, `end` is the byte after it.

    `shortcuts` read many opcodes at once, beginning with one that recalls the class with that name.
    """

    def __init__(
        self,
        data: bytes,
        start: int,
        names: Names,
        persistent: Callable[[Any], Any] | None,
        shortcuts: Mapping[str, Shortcut],
    ) -> None:
        self.data, self.end = data, start
        self._shortcuts = shortcuts
        self._calls, self._persistent = Calls(names, len(data)), persistent
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the object. A CheckpointError contains the position; the caller adds the file name."""
        try:
            self._run()
            if self._outer or len(self._stack) != 1:
                raise Malformed("ends with more or less than one object")
            return self._stack.pop()
        except IndexError:
            if self.end < len(self.data):
                raise self._error("takes more from its stack than it holds") from None
            raise CutShort(f"is cut short, at byte {self.end} of the pickle") from None
        except Malformed as error:
            raise self._error(str(error)) from None
        except (UnicodeDecodeError, MemoryError, OverflowError, RecursionError) as error:
            raise self._error(f"cannot be decoded ({type(error).__name__})") from None

    def _run(self) -> None:
        """Read opcodes until STOP. The most frequent ones are inlined, since a call for each is too slow."""
        data, memo = self.data, self._memo
        left = _MEMORY_BYTES + _MEMORY_PER_BYTE * len(data)
        while left > 0:
            at = self.end
            opcode = data[at]
            self.end = at + 1
            if opcode == 0x94:  # MEMOIZE
                memo[len(memo)] = self._stack[-1]
                left -= _MEMO_BYTES
            elif opcode == 0x68 and data[at + 1] in memo:  # BINGET
                self.end = at + 2
                if type(value := memo[data[at + 1]]) is Global:
                    left -= self._push_class(value, at)
                else:
                    self._stack.append(value)
            elif opcode == 0x6A and (key := int.from_bytes(data[at + 1 : at + 5], "little")) in memo:  # LONG_BINGET
                self.end = at + 5
                if type(value := memo[key]) is Global:
                    left -= self._push_class(value, at)
                else:
                    self._stack.append(value)
            elif opcode == 0x71:  # BINPUT
                self._memoize(data[at + 1])
                self.end = at + 2
            elif opcode == 0x4B:  # BININT1
                self._stack.append(data[at + 1])
                self.end = at + 2
            elif opcode == 0x28:  # MARK
                self._outer.append(self._stack)
                self._stack = []
                left -= _OBJECT_BYTES
            elif opcode == 0x29:  # EMPTY_TUPLE
                self._stack.append(())
            elif opcode == 0x85:  # TUPLE1
                self._stack[-1] = (self._stack[-1],)
                left -= _OBJECT_BYTES
            elif opcode == 0x86:  # TUPLE2
                last = self._stack.pop()
                self._stack[-1] = (self._stack[-1], last)
                left -= _OBJECT_BYTES
            elif opcode == 0x2E:  # STOP
                return
            else:
                step = _STEPS.get(opcode)
                if step is None:
                    raise Malformed(f"has the opcode {bytes([opcode])!r}, which no checkpoint needs")
                step(self)
                left -= _BYTES_OF.get(opcode, _OBJECT_BYTES)
        raise Malformed("consists of more tiny objects than any checkpoint of its size")

    def _push_class(self, cls: Global, at: int) -> int:
        """Push a class recalled at byte `at`, or a shortcut's result from there; return the memory used."""
        shortcut, before = self._shortcuts.get(cls.name), len(self._memo)
        if shortcut is None or (end := shortcut(self.data, at, self._memo, self._stack)) == at:
            self._stack.append(cls)
            return 0
        self.end = end
        return (_MEMO_BYTES + _OBJECT_BYTES) * (len(self._memo) - before)

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{problem}, at byte {self.end} of the pickle")

    # The building blocks of opcodes.

    def _take(self, count: int) -> bytes:
        start = self.end
        self.end = start + count
        if self.end > len(self.data):
            self.end = len(self.data)
            raise IndexError
        return self.data[start : self.end]

    def _line(self) -> str:
        stop = self.data.find(b"\n", self.end, self.end + 1000)
        if stop < 0:
            if self.end + 1000 < len(self.data):
                raise Malformed("is cut short in a name")
            raise IndexError
        start, self.end = self.end, stop + 1
        return self.data[start:stop].decode()

    def _sized(self, width: int) -> bytes:
        count = self._int(width)
        if count > limits().config_bytes:
            raise Malformed(f"is cut short, or has a text of {format_size(count)} ({exceeded('config_bytes')})")
        return self._take(count)

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _pops(self, count: int) -> list[Any]:
        """The last `count` items of the stack, in order."""
        return [self._stack.pop() for _ in range(count)][::-1]

    def _set_items(self, items: Sequence[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise Malformed("adds keys to something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key if type(key) is str else checked_key(key)] = value

    def _append(self, items: Sequence[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise Malformed("appends to something that is not a list")
        target.extend(items)

    def _add(self) -> None:
        items, target = self._since_mark(), self._stack[-1]
        if not isinstance(target, set):
            raise Malformed("adds to something that is not a set")
        target.update(map(checked_key, items))

    def _find_on_stack(self) -> None:
        module, name = self._pops(2)
        if not isinstance(name, str) or not isinstance(module, str):
            raise Malformed("names a class by something that is not a string")
        self._push(self._calls.find(module, name))

    def _new_with_keywords(self) -> None:
        function, arguments, keywords = self._pops(3)
        if not isinstance(keywords, dict) or not all(isinstance(key, str) for key in keywords):
            raise Malformed("has keyword arguments that are none")
        self._push(self._calls.call(function, arguments, keywords))

    def _reduce(self) -> None:
        arguments = self._stack.pop()
        self._stack[-1] = self._calls.call(self._stack[-1], arguments)

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise Malformed("refers to a storage outside of it, which a pickle of this kind does not have")
        try:
            self._stack[-1] = self._persistent(self._stack[-1])
        except (TypeError, ValueError, KeyError) as error:
            raise Malformed(f"refers to a storage in a way that torch does not ({short(error)})") from None

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _memoize(self, key: int) -> None:
        self._memo[key] = self._stack[-1]
        self._shortcuts = {}  # they rely on a memo that only grows

    def _get(self, key: int) -> None:
        if key not in self._memo:
            raise Malformed(f"recalls object {key}, which is not in its memo")
        self._stack.append(self._memo[key])

    def _refuse_protocol(self) -> None:
        protocol = self._take(1)[0]
        if not 2 <= protocol <= 5:
            raise Malformed(f"is of pickle protocol {protocol}; 2 to 5 are read")

    def _int(self, width: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(width), "little", signed=signed)


_STEPS: dict[int, Callable[[Machine], object]] = {
    ord(code): step
    for code, step in {
        "\x80": Machine._refuse_protocol,
        "\x95": lambda m: m._take(8),  # the length of a frame, for block-wise readers
        "0": lambda m: m._stack.pop(),
        "1": Machine._since_mark,
        "N": lambda m: m._push(None),
        "\x88": lambda m: m._push(True),
        "\x89": lambda m: m._push(False),
        "M": lambda m: m._push(m._int(2)),
        "J": lambda m: m._push(m._int(4, signed=True)),
        "\x8a": lambda m: m._push(int.from_bytes(m._sized(1), "little", signed=True)),
        "G": lambda m: m._push(struct.unpack(">d", m._take(8))[0]),
        "U": lambda m: m._push(m._sized(1).decode("latin-1")),
        "T": lambda m: m._push(m._sized(4).decode("latin-1")),
        "X": lambda m: m._push(m._sized(4).decode()),
        "\x8c": lambda m: m._push(m._sized(1).decode()),
        "\x8d": lambda m: m._push(m._sized(8).decode()),
        "C": lambda m: m._push(m._sized(1)),
        "B": lambda m: m._push(m._sized(4)),
        "\x8e": lambda m: m._push(m._sized(8)),
        "\x96": lambda m: m._push(bytearray(m._sized(8))),
        "\x87": lambda m: m._push(tuple(m._pops(3))),
        "t": lambda m: m._push(tuple(m._since_mark())),
        "]": lambda m: m._push([]),
        "a": lambda m: m._append([m._stack.pop()]),
        "e": lambda m: m._append(m._since_mark()),
        "}": lambda m: m._push({}),
        "s": lambda m: m._set_items(m._pops(2)),
        "u": lambda m: m._set_items(m._since_mark()),
        "\x8f": lambda m: m._push(set()),
        "\x90": Machine._add,
        "\x91": lambda m: m._push(frozenset(map(checked_key, m._since_mark()))),
        "r": lambda m: m._memoize(m._int(4)),
        "h": lambda m: m._get(m._int(1)),
        "j": lambda m: m._get(m._int(4)),
        "c": lambda m: m._push(m._calls.find(m._line(), m._line())),
        "\x93": Machine._find_on_stack,
        "R": Machine._reduce,
        "\x81": Machine._reduce,  # NEWOBJ: stand-ins are created as by REDUCE
        "\x92": Machine._new_with_keywords,
        "b": lambda m: m._calls.build(m._stack[-2], m._stack.pop()),
        "Q": Machine._persistent_id,
    }.items()
}


# Constructors may copy at most this many items per byte of the pickle, no matter how often it recalls one.
_COPIES = 16
_WRONG_ARGUMENTS = (TypeError, ValueError, KeyError, AttributeError, IndexError)
_CONTAINERS = (tuple, dict, list, str, bytes, bytearray, set, frozenset)
_TWO_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # protocol 2 writes Python 2 names

Shortcut = Callable[[bytes, int, dict[int, Any], list[Any]], int]
"""(data, position, memo, stack) -> the position after what it read, and added to both; the same if it cannot."""

Names = Mapping[tuple[str, str], Any]
"""(module, name) -> the constructor of the stand-in for a class or function, or (not callable) a constant."""


class Calls:
    """Looks up and calls the names in one pickle of `num_bytes`; every error in it is `Malformed`."""

    def __init__(self, names: Names, num_bytes: int) -> None:
        self._names = names
        self._globals: dict[tuple[str, str], Any] = {}
        self._budget = _COPIES * num_bytes

    def find(self, module: str, name: str) -> Any:
        """Return the stand-in for `module.name`: a `Global` or a constant."""
        module = _TWO_NAMES.get(module, module)
        key = (module, name)
        if key not in self._globals:
            found = self._names.get(key)
            if found is None:
                asked = f"{module}.{name}"[:200]
                raise Malformed(f"asks to run {asked!r}, which no state dict consists of, so nothing of it is read")
            self._globals[key] = Global(f"{module}.{name}", found) if callable(found) else found
        return self._globals[key]

    def call(self, function: Any, arguments: Any, keywords: Any = None) -> Any:
        """Call the constructor of the stand-in for a class or function."""
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise Malformed("calls something that is not a class or function")
        if function.name == "builtins.getattr":
            return self._attribute(*arguments)
        try:
            self._charge(arguments)
            return function.make(*arguments, **(keywords or {}))
        except _WRONG_ARGUMENTS as error:
            raise Malformed(f"gives {function.name} what it does not take ({short(error)})") from None

    def _charge(self, values: tuple[Any, ...]) -> None:
        """Limit copies: a list passed to a million constructors must not use a million times its size."""
        cost = len(values)
        for value in values:
            if isinstance(value, _CONTAINERS):
                cost += len(value)
            if isinstance(value, dict):
                cost += sum(len(item) for item in value.values() if isinstance(item, _CONTAINERS))
        self._budget -= cost
        if self._budget < 0:
            raise Malformed("copies the same items over and over")

    def _attribute(self, owner: Any = None, name: Any = None, *rest: Any) -> Any:
        """`getattr`, with which protocols below 4 name a nested class or an enum member."""
        if rest or not isinstance(owner, Global) or not isinstance(name, str):
            raise Malformed("asks to run 'builtins.getattr' on something else than a class on the allow-list")
        module, _, outer = owner.name.rpartition(".")
        return self.find(module, f"{outer}.{name}")

    def build(self, target: Any, state: Any) -> None:
        """Pass a stand-in the state that the class's own `__setstate__` would receive."""
        if not isinstance(target, StandIn):
            raise Malformed(f"sets the state of a {type(target).__name__}")
        try:
            self._charge(state if isinstance(state, tuple) else (state,))
            target.set_state(state)
        except _WRONG_ARGUMENTS as error:
            raise Malformed(f"gives a {type(target).__name__} a state that it cannot have ({short(error)})") from None


def short(error: Exception) -> str:
    """The message of an error in one line."""
    return " ".join(str(error).split())[:200]


_MAX_KEY_ITEMS = 64  # in a tuple used as a key; shapes and paths are shorter
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))


class StandIn:
    """Replaces an object of a library class: it holds the pickle's content, and does nothing.

    `hashable` states whether it may be a dictionary key, for which its own `__hash__` runs.
    """

    hashable = False

    def set_state(self, state: Any) -> None:
        """Store the argument of the object's `__setstate__`; raise TypeError or ValueError if it is invalid."""


class Global:
    """A class or function that a pickle names, and the constructor of its stand-in."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make


class Malformed(Exception):
    """An error in the pickle; the message is the second half of a sentence."""


def checked_key(key: Any) -> Any:
    """Return the key if hashing it is cheap: a plain value, a small flat tuple of them, or a `hashable` stand-in."""
    if isinstance(key, StandIn) and key.hashable:
        return key
    is_flat = type(key) is tuple and len(key) <= _MAX_KEY_ITEMS and all(isinstance(item, _PLAIN_KEYS) for item in key)
    if not isinstance(key, _PLAIN_KEYS) and not is_flat:
        raise Malformed(f"has a {type(key).__name__} as a key")
    return key
