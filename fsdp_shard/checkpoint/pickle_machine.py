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

from fsdp_shard.checkpoint.pickle_objects import Global, Malformed, StandIn, check_key, checked_keys
from fsdp_shard.errors import CheckpointError

_COPIES = (
    16  # constructors may copy this many times as many items as the pickle has bytes, however often it recalls one
)
_CONTAINERS = (tuple, list, dict, set, frozenset, bytes, bytearray, str)
_TWO_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # protocol 2 writes the names of Python 2


Names = Mapping[tuple[str, str], Any]
"""(module, name) -> a constructor of what stands in for a class or function, or (not callable) a constant."""


class Machine:
    """Runs one pickle that begins at `start` of `data`; `end` is then the position behind it."""

    def __init__(self, data: bytes, start: int, names: Names, persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.end = data, start
        self._names, self._persistent = names, persistent
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}
        self._globals: dict[tuple[str, str], Any] = {}
        self._budget = _COPIES * len(data)

    def run(self) -> Any:
        """The object. A CheckpointError gives the position; the file's name is the caller's to add."""
        steps, data = _STEPS, self.data
        try:
            while (opcode := data[self.end]) != _STOP:
                self.end += 1
                steps[opcode](self)
            self.end += 1
            if self._outer or len(self._stack) != 1:
                raise Malformed("ends with more or less than one object")
            return self._stack.pop()
        except KeyError:
            raise self._error(f"has the opcode {bytes([opcode])!r}, which no checkpoint needs") from None
        except IndexError:
            at_end = self.end >= len(data)
            raise self._error("is cut short" if at_end else "takes more from its stack than is there") from None
        except Malformed as error:
            raise self._error(str(error)) from None
        except (UnicodeDecodeError, MemoryError, OverflowError, RecursionError) as error:
            raise self._error(f"cannot be decoded ({type(error).__name__})") from None

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

    def _find(self, module: str, name: str) -> Any:
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

    def _call(self, function: Any, arguments: Any, keywords: Any = None) -> Any:
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise Malformed("calls what is no class or function")
        if function.name == "builtins.getattr":
            return self._attribute(*arguments)
        try:
            self._charge(arguments)
            return function.make(*arguments, **(keywords or {}))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise Malformed(f"gives {function.name} what it does not take ({_short(error)})") from None

    def _charge(self, values: tuple[Any, ...]) -> None:
        """A list that is named once and handed to a million constructors must not take a million times its size."""
        for value in values:
            if isinstance(value, _CONTAINERS):
                self._budget -= len(value)
            if isinstance(value, dict):
                self._budget -= sum(len(item) for item in value.values() if isinstance(item, _CONTAINERS))
        self._budget -= len(values)
        if self._budget < 0:
            raise Malformed("copies the same items over and over")

    def _attribute(self, owner: Any = None, name: Any = None, *rest: Any) -> Any:
        """Protocols below 4 have no dotted names: a nested class or a member of an enum is written as a getattr."""
        if rest or not isinstance(owner, Global) or not isinstance(name, str):
            raise Malformed("asks to run 'builtins.getattr' on what is no class that state dicts are made of")
        module, _, outer = owner.name.rpartition(".")
        return self._find(module, f"{outer}.{name}")

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, StandIn):
            raise Malformed(f"sets the state of a {type(target).__name__}")
        try:
            self._charge(state if isinstance(state, tuple) else (state,))
            target.set_state(state)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise Malformed(f"gives a {type(target).__name__} a state that it cannot have ({_short(error)})") from None

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
        self._push(self._find(module, name))

    def _new_with_keywords(self) -> None:
        keywords, arguments, function = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if not isinstance(keywords, dict) or not all(isinstance(key, str) for key in keywords):
            raise Malformed("has keyword arguments that are none")
        self._push(self._call(function, arguments, keywords))

    def _reduce(self) -> None:
        arguments = self._stack.pop()
        self._stack[-1] = self._call(self._stack[-1], arguments)

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise Malformed("refers to a storage beside it, which a pickle of this kind does not have")
        try:
            self._stack[-1] = self._persistent(self._stack[-1])
        except (TypeError, ValueError, KeyError) as error:
            raise Malformed(f"refers to a storage in a way that torch does not ({_short(error)})") from None

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _pop(self) -> None:
        self._stack.pop()

    def _pop_mark(self) -> None:
        self._since_mark()

    def _skip_frame(self) -> None:
        """The length of a frame is for readers that read from a file in blocks."""
        self._take(8)

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _memoize(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def _get(self, key: int) -> None:
        if key not in self._memo:
            raise Malformed(f"recalls object {key}, which it has not named")
        self._stack.append(self._memo[key])

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
        return kind.unpack(self._take(kind.size))[0]


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


_STOP = ord(".")
_U2, _I4, _U4, _F8 = struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I"), struct.Struct(">d")
_STEPS: dict[int, Callable[[Machine], None]] = {
    ord(code): step
    for code, step in {
        "\x80": Machine._refuse_protocol,
        "\x95": Machine._skip_frame,
        "(": Machine._mark,
        "0": Machine._pop,
        "1": Machine._pop_mark,
        "N": lambda m: m._push(None),
        "\x88": lambda m: m._push(True),
        "\x89": lambda m: m._push(False),
        "K": lambda m: m._push(m._byte()),
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
        ")": lambda m: m._push(()),
        "\x85": lambda m: m._tuple(1),
        "\x86": lambda m: m._tuple(2),
        "\x87": lambda m: m._tuple(3),
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
        "q": lambda m: m._memoize(m._byte()),
        "r": lambda m: m._memoize(m._number(_U4)),
        "\x94": lambda m: m._memoize(len(m._memo)),
        "h": lambda m: m._get(m._byte()),
        "j": lambda m: m._get(m._number(_U4)),
        "c": lambda m: m._push(m._find(m._line(), m._line())),
        "\x93": Machine._find_on_stack,
        "R": Machine._reduce,
        "\x81": Machine._reduce,  # NEWOBJ: a stand-in is made the same way, whoever asks
        "\x92": Machine._new_with_keywords,
        "b": Machine._build,
        "Q": Machine._persistent_id,
    }.items()
}
