"""Changes of pickles, opcode by opcode: arguments, order, what is called."""

from __future__ import annotations

import pickletools
import struct
from typing import Any

from hypothesis import strategies as st

from tests.faults.fuzz.json_grammar import NUMBERS

# What a file may ask for that nothing of ours must call, and what it may in the wrong place.
_GLOBALS = [
    "os system",
    "builtins eval",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch FloatStorage",
    "torch LongStorage",
    "torch BFloat16Storage",
    "torch float32",
    "torch Size",
    "torch device",
    "collections OrderedDict",
    "numpy.core.multiarray scalar",
    "torch.distributed.checkpoint.metadata Metadata",
    "torch.distributed.tensor DTensor",
]
# Opcodes with their arguments, to be put anywhere.
_OPCODES = [
    *(b"0", b"1", b"2", b"(", b")", b"]", b"}", b"t", b"a", b"e", b"s", b"u", b"R", b"b", b"Q", b"N", b"."),
    *(b"\x81", b"\x85", b"\x86", b"\x87", b"\x88", b"\x8f", b"\x90", b"\x93", b"\x94", b"q\x00", b"h\x00", b"h\xff"),
    *(
        b"K\x00",
        b"K\xff",
        b"J\xff\xff\xff\xff",
        b"\x8a\x02\xff\x7f",
        b"G\x7f\xf0\0\0\0\0\0\0",
        b"\x8c\x01a",
        b"cos\nsystem\n",
    ),
    *(
        b"X\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f",
        b"\x95" + b"\xff" * 8,
        b"\x80\x09",
        b"r\xff\xff\xff\xff",
        b"j\xff\xff\xff\xff",
    ),
]


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """One to three changes, each (kind, which opcode, argument)."""
    where = st.integers(0, 1 << 16)
    kind = st.one_of(
        st.tuples(st.just("number"), where, st.sampled_from(NUMBERS)),
        st.tuples(st.just("text"), where, st.sampled_from(["", "0", "a", "cpu", "storage", "\0", "x" * 300])),
        st.tuples(st.just("global"), where, st.sampled_from(_GLOBALS)),
        st.tuples(st.just("delete"), where),
        st.tuples(st.just("double"), where),
        st.tuples(st.just("swap"), where, where),
        st.tuples(st.just("copy"), where, where),
        st.tuples(st.just("insert"), where, st.sampled_from(_OPCODES)),
        st.tuples(st.just("cut"), where),
    )
    return draw(st.lists(kind, min_size=1, max_size=3))


def changed(data: bytes, ops: list[tuple[Any, ...]]) -> bytes:
    """The pickle after the changes."""
    found = [(opcode.name, position) for opcode, _, position in pickletools.genops(data)]
    ends = [position for _, position in found[1:]] + [len(data)]
    parts = [(name, data[start:end]) for (name, start), end in zip(found, ends, strict=True)]
    for kind, where, *arguments in ops:
        if kind in ("number", "text", "global"):
            fitting = [n for n, (name, _) in enumerate(parts) if _kind(name) == kind]
            if fitting:
                parts[fitting[where % len(fitting)]] = ("", _WRITERS[kind](arguments[0]))
            continue
        at = where % max(len(parts), 1)
        if kind == "delete":
            del parts[at : at + 1]
        elif kind == "double":
            parts[at:at] = parts[at : at + 1]
        elif kind == "insert":
            parts.insert(at, ("", arguments[0]))
        elif kind == "cut":
            del parts[at:]
        elif parts:
            other = arguments[0] % len(parts)
            parts[at], parts[other] = parts[other], parts[at] if kind == "swap" else parts[other]
    return b"".join(part for _, part in parts)


def _kind(name: str) -> str:
    if name in ("BININT", "BININT1", "BININT2", "LONG1"):
        return "number"
    if name in ("BINUNICODE", "SHORT_BINUNICODE"):
        return "text"
    return "global" if name == "GLOBAL" else ""


def _number(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _global(value: str) -> bytes:
    return b"c" + value.replace(" ", "\n").encode() + b"\n"


_WRITERS: dict[str, Any] = {"number": _number, "text": _text, "global": _global}
