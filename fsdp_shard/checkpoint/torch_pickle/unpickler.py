"""Reads a pickle without running it: a stack machine for the opcodes that data needs (PEP 307, PEP 3154, pickletools).

Not `pickle.Unpickler` with another `find_class`: that one still lets a file of a few bytes ask for a memo of 34 GB, end
the process by hashing deeply nested tuples, or hash for hours (all three tried on Python 3.11). Here every length is
checked against what is left of the data, keys are small and flat, nothing is looked up by name in a real module, and
only constructors of a given table are called. Knows nothing of torch: `pickles` has the table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdp_shard.errors import CheckpointError


class Machine:
    """Runs one pickle that begins at `start` of `data`; `end` is then the position behind it."""

    def __init__(self, data: bytes, start: int, names: Names, persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.end = data, start
        self._calls, self._persistent = Calls(names, len(data)), persistent
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The object. A CheckpointError gives the position; the file's name is the caller's to add."""
        try:
            self._run()
            if self._outer or len(self._stack) != 1:
                raise Malformed("ends with more or less than one object")
            return self._stack.pop()
        except IndexError:
            at_end = self.end >= len(self.data)
            raise self._error("is cut short" if at_end else "takes more from its stack than is there") from None
        except struct.error:
            raise self._error("is cut short") from None
        except Malformed as error:
            raise self._error(str(error)) from None
        except (UnicodeDecodeError, MemoryError, OverflowError, RecursionError) as error:
            raise self._error(f"cannot be decoded ({type(error).__name__})") from None

    def _run(self) -> None:
        """Step by step until the end. The steps that make up most of a pickle stand here: a call each is too slow."""
        data, memo = self.data, self._memo
        while True:
            at = self.end
            opcode = data[at]
            self.end = at + 1
            if opcode == 0x94:  # MEMOIZE
                memo[len(memo)] = self._stack[-1]
            elif opcode == 0x68 and data[at + 1] in memo:  # BINGET
                self._stack.append(memo[data[at + 1]])
                self.end = at + 2
            elif opcode == 0x6A and (key := int.from_bytes(data[at + 1 : at + 5], "little")) in memo:  # LONG_BINGET
                self._stack.append(memo[key])
                self.end = at + 5
            elif opcode == 0x71:  # BINPUT
                memo[data[at + 1]] = self._stack[-1]
                self.end = at + 2
            elif opcode == 0x4B:  # BININT1
                self._stack.append(data[at + 1])
                self.end = at + 2
            elif opcode == 0x28:  # MARK
                self._outer.append(self._stack)
                self._stack = []
            elif opcode == 0x29:  # EMPTY_TUPLE
                self._stack.append(())
            elif opcode == 0x85:  # TUPLE1
                self._stack[-1] = (self._stack[-1],)
            elif opcode == 0x86:  # TUPLE2
                last = self._stack.pop()
                self._stack[-1] = (self._stack[-1], last)
            elif opcode == 0x2E:  # STOP
                return
            else:
                step = _STEPS.get(opcode)
                if step is None:
                    raise Malformed(f"has the opcode {bytes([opcode])!r}, which no checkpoint needs")
                step(self)

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{problem}, at byte {self.end} of the pickle")

    # What the opcodes are made of.

    def _take(self, count: int) -> bytes:
        start = self.end
        self.end = start + count
        if self.end > len(self.data):
            self.end = len(self.data)
            raise Malformed("is cut short")
        return self.data[start : self.end]

    def _line(self) -> str:
        stop = self.data.find(b"\n", self.end, self.end + 1000)
        if stop < 0:
            raise Malformed("is cut short in a name")
        start, self.end = self.end, stop + 1
        return self.data[start:stop].decode()

    def _sized(self, width: int) -> bytes:
        return self._take(int.from_bytes(self._take(width), "little"))

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _set_items(self, target: Any, items: Sequence[Any]) -> None:
        if not isinstance(target, dict) or len(items) % 2:
            raise Malformed("adds keys to what is no dictionary")
        for position in range(0, len(items), 2):
            key = items[position]
            if type(key) is not str:
                check_key(key)
            target[key] = items[position + 1]

    def _append(self, items: Sequence[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise Malformed("appends to what is no list")
        target.extend(items)

    def _add(self) -> None:
        items, target = self._since_mark(), self._stack[-1]
        if not isinstance(target, set):
            raise Malformed("adds to what is no set")
        target.update(checked_keys(items))

    def _find_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Malformed("names a class by what is no text")
        self._push(self._calls.find(module, name))

    def _new_with_keywords(self) -> None:
        keywords, arguments, function = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if not isinstance(keywords, dict) or not all(isinstance(key, str) for key in keywords):
            raise Malformed("has keyword arguments that are none")
        self._push(self._calls.call(function, arguments, keywords))

    def _reduce(self) -> None:
        arguments = self._stack.pop()
        self._stack[-1] = self._calls.call(self._stack[-1], arguments)

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise Malformed("refers to a storage beside it, which a pickle of this kind does not have")
        try:
            self._stack[-1] = self._persistent(self._stack[-1])
        except (TypeError, ValueError, KeyError) as error:
            raise Malformed(f"refers to a storage in a way that torch does not ({short(error)})") from None

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> None:
        self._stack.pop()

    def _pop_mark(self) -> None:
        self._since_mark()

    def _skip_frame(self) -> None:
        """The length of a frame is for readers that read from a file in blocks."""
        self._take(8)

    def _tuple_of_three(self) -> None:
        third, second = self._stack.pop(), self._stack.pop()
        self._stack[-1] = (self._stack[-1], second, third)

    def _memoize(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def _get(self, key: int) -> None:
        found = self._memo.get(key, self)
        if found is self:
            raise Malformed(f"recalls object {key}, which it has not named")
        self._stack.append(found)

    def _refuse_protocol(self) -> None:
        protocol = self._take(1)[0]
        if not 2 <= protocol <= 5:
            raise Malformed(f"is of pickle protocol {protocol}; 2 to 5 are read")

    def _set_on_top(self, items: list[Any]) -> None:
        self._set_items(self._stack[-1], items)

    def _byte(self) -> int:
        value = self.data[self.end]
        self.end += 1
        return value

    def _number(self, kind: struct.Struct) -> Any:
        value = kind.unpack_from(self.data, self.end)[0]
        self.end += kind.size
        return value


_U2, _I4, _U4, _F8 = struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I"), struct.Struct(">d")
_STEPS: dict[int, Callable[[Machine], None]] = {
    ord(code): step
    for code, step in {
        "\x80": Machine._refuse_protocol,
        "\x95": Machine._skip_frame,
        "0": Machine._pop,
        "1": Machine._pop_mark,
        "N": lambda m: m._push(None),
        "\x88": lambda m: m._push(True),
        "\x89": lambda m: m._push(False),
        "M": lambda m: m._push(m._number(_U2)),
        "J": lambda m: m._push(m._number(_I4)),
        "\x8a": lambda m: m._push(int.from_bytes(m._sized(1), "little", signed=True)),
        "G": lambda m: m._push(m._number(_F8)),
        "U": lambda m: m._push(m._sized(1).decode("latin-1")),
        "T": lambda m: m._push(m._sized(4).decode("latin-1")),
        "X": lambda m: m._push(m._sized(4).decode()),
        "\x8c": lambda m: m._push(m._sized(1).decode()),
        "\x8d": lambda m: m._push(m._sized(8).decode()),
        "C": lambda m: m._push(m._sized(1)),
        "B": lambda m: m._push(m._sized(4)),
        "\x8e": lambda m: m._push(m._sized(8)),
        "\x96": lambda m: m._push(bytearray(m._sized(8))),
        "\x87": Machine._tuple_of_three,
        "t": lambda m: m._push(tuple(m._since_mark())),
        "]": lambda m: m._push([]),
        "a": lambda m: m._append([m._stack.pop()]),
        "e": lambda m: m._append(m._since_mark()),
        "}": lambda m: m._push({}),
        "s": lambda m: m._set_on_top([m._stack.pop(), m._stack.pop()][::-1]),
        "u": lambda m: m._set_on_top(m._since_mark()),
        "\x8f": lambda m: m._push(set()),
        "\x90": Machine._add,
        "\x91": lambda m: m._push(frozenset(checked_keys(m._since_mark()))),
        "r": lambda m: m._memoize(m._number(_U4)),
        "h": lambda m: m._get(m._byte()),
        "j": lambda m: m._get(m._number(_U4)),
        "c": lambda m: m._push(m._calls.find(m._line(), m._line())),
        "\x93": Machine._find_on_stack,
        "R": Machine._reduce,
        "\x81": Machine._reduce,  # NEWOBJ: a stand-in is made the same way, whoever asks
        "\x92": Machine._new_with_keywords,
        "b": lambda m: m._calls.build(m._stack[-2], m._stack.pop()),
        "Q": Machine._persistent_id,
    }.items()
}


# Constructors may copy so many times as many items as the pickle has bytes, however often it recalls one.
_COPIES = 16
_CONTAINERS = (tuple, dict, list, str, bytes, bytearray, set, frozenset)
_TWO_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # protocol 2 writes the names of Python 2

Names = Mapping[tuple[str, str], Any]
"""(module, name) -> a constructor of what stands in for a class or function, or (not callable) a constant."""


class Calls:
    """The calls of one pickle of `num_bytes`; all that is wrong with one is `Malformed`."""

    def __init__(self, names: Names, num_bytes: int) -> None:
        self._names = names
        self._globals: dict[tuple[str, str], Any] = {}
        self._budget = _COPIES * num_bytes

    def find(self, module: str, name: str) -> Any:
        """What stands for `module.name`: a `Global`, or a constant."""
        module = _TWO_NAMES.get(module, module)
        key = (module, name)
        if key not in self._globals:
            found = self._names.get(key)
            if found is None:
                asked = f"{module}.{name}"
                raise Malformed(
                    f"asks to run {asked[:200]!r}, which no state dict is made of, so nothing of it is read"
                )
            self._globals[key] = Global(f"{module}.{name}", found) if callable(found) else found
        return self._globals[key]

    def call(self, function: Any, arguments: Any, keywords: Any = None) -> Any:
        """What the constructor that stands for a class or function makes of the arguments."""
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise Malformed("calls what is no class or function")
        if function.name == "builtins.getattr":
            return self._attribute(*arguments)
        try:
            self._charge(arguments)
            return function.make(*arguments, **(keywords or {}))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise Malformed(f"gives {function.name} what it does not take ({short(error)})") from None

    def _charge(self, values: tuple[Any, ...]) -> None:
        """A list that is named once and handed to a million constructors must not take a million times its size."""
        cost = len(values)
        for value in values:
            if isinstance(value, _CONTAINERS):
                cost += len(value)
                if isinstance(value, dict):
                    for item in value.values():
                        if isinstance(item, _CONTAINERS):
                            cost += len(item)
        self._budget -= cost
        if self._budget < 0:
            raise Malformed("copies the same items over and over")

    def _attribute(self, owner: Any = None, name: Any = None, *rest: Any) -> Any:
        """Protocols below 4 have no dotted names: a nested class or a member of an enum is written as a getattr."""
        if rest or not isinstance(owner, Global) or not isinstance(name, str):
            raise Malformed("asks to run 'builtins.getattr' on what is no class that state dicts are made of")
        module, _, outer = owner.name.rpartition(".")
        return self.find(module, f"{outer}.{name}")

    def build(self, target: Any, state: Any) -> None:
        """Hand a stand-in what the class's own `__setstate__` would get."""
        if not isinstance(target, StandIn):
            raise Malformed(f"sets the state of a {type(target).__name__}")
        try:
            self._charge(state if isinstance(state, tuple) else (state,))
            target.set_state(state)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise Malformed(f"gives a {type(target).__name__} a state that it cannot have ({short(error)})") from None


def short(error: Exception) -> str:
    """One line of an error's own words."""
    return " ".join(str(error).split())[:200]


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
