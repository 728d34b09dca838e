"""Changes of binary headers at the fields that they have: zip archives, GGUF files, and bytes anywhere."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.faults.fuzz.json_grammar import NUMBERS

_GGUF_SIZES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
# Fields of zip's local headers, central directory and end records: (offset, code) behind each signature.
_ZIP = {
    b"PK\x03\x04": [(4, "<H"), (6, "<H"), (8, "<H"), (14, "<I"), (18, "<I"), (22, "<I"), (26, "<H"), (28, "<H")],
    b"PK\x01\x02": [
        (8, "<H"),
        (10, "<H"),
        (16, "<I"),
        (20, "<I"),
        (24, "<I"),
        (28, "<H"),
        (30, "<H"),
        (32, "<H"),
        (42, "<I"),
    ],
    b"PK\x05\x06": [(4, "<H"), (8, "<H"), (10, "<H"), (12, "<I"), (16, "<I"), (20, "<H")],
    b"PK\x06\x06": [(4, "<Q"), (24, "<Q"), (32, "<Q"), (40, "<Q"), (48, "<Q")],
    b"PK\x06\x07": [(8, "<Q")],
}


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """One to three changes, each (kind, where, argument)."""
    where = st.integers(0, 1 << 16)
    kind = st.one_of(
        st.tuples(st.just("field"), where, st.sampled_from(NUMBERS)),
        st.tuples(st.just("add"), where, st.sampled_from([-64, -8, -1, 1, 8, 64])),
        st.tuples(st.just("swap"), where, where),
        st.tuples(st.just("byte"), where, st.integers(0, 255)),
        st.tuples(st.just("insert"), where, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("remove"), where, st.integers(1, 64)),
        st.tuples(st.just("cut"), where),
        st.tuples(st.just("append"), where, st.binary(min_size=1, max_size=8)),
    )
    return draw(st.lists(kind, min_size=1, max_size=3))


def changed(data: bytes, ops: list[tuple[Any, ...]]) -> bytes:
    """The file after the changes: `where` counts fields, or bytes of the part that has fields."""
    fields = list(_fields(data))
    out, end = bytearray(data), max(position for position, _ in fields) + 8
    for kind, where, *arguments in ops:
        position, code = fields[where % len(fields)]
        size = struct.calcsize(code)
        if position + size > len(out):
            continue
        if kind == "field":
            out[position : position + size] = _packed(code, arguments[0])
        elif kind == "add":
            (value,) = struct.unpack_from(code, out, position)
            out[position : position + size] = _packed(code, int(value) + arguments[0] if value == value else 0)
        elif kind == "swap":
            other, _ = fields[arguments[0] % len(fields)]
            out[position : position + size], out[other : other + size] = (
                out[other : other + size],
                out[position : position + size],
            )
        elif kind == "byte":
            out[where % end % len(out)] = arguments[0]
        elif kind == "insert":
            out[where % end : where % end] = arguments[0]
        elif kind == "remove":
            del out[where % end : where % end + arguments[0]]
        elif kind == "cut":
            del out[where % len(out) :]
        else:
            out += arguments[0]
        if not out:
            break
    return bytes(out)


def _packed(code: str, value: int) -> bytes:
    if code in ("<f", "<d"):
        return struct.pack(code, float(value))
    size = struct.calcsize(code)
    return (value % (1 << 8 * size)).to_bytes(size, "little")


def _fields(data: bytes) -> Iterator[tuple[int, str]]:
    """(position, code) of every field of the header."""
    if data[:4] == b"GGUF":
        yield from _gguf_fields(data)
        return
    if (length := int.from_bytes(data[:8], "little")) < len(data) and data[8:9] == b"{":  # safetensors
        yield from ((position, "<B") for position in range(8 + length))
        yield 0, "<Q"
        return
    found = False
    for signature, fields in _ZIP.items():
        at = data.find(signature)
        while at >= 0:
            for offset, code in fields:
                if at + offset + struct.calcsize(code) <= len(data):
                    found = True
                    yield at + offset, code
            at = data.find(signature, at + 1)
    if not found:
        yield from ((position, "<B") for position in range(min(len(data), 4096)))


def _gguf_fields(data: bytes) -> Iterator[tuple[int, str]]:
    position = 4

    def number(code: str) -> int:
        nonlocal position
        (value,) = struct.unpack_from(code, data, position)
        position += struct.calcsize(code)
        return int(value) if value == value else 0

    def text() -> Iterator[tuple[int, str]]:
        nonlocal position
        yield position, "<Q"
        length = number("<Q")
        if length:
            yield position, "<B"
        position += length

    def value(kind: int) -> Iterator[tuple[int, str]]:
        if kind == 8:
            yield from text()
        elif kind == 9:
            yield position, "<I"
            inner = number("<I")
            yield position, "<Q"
            for count in range(number("<Q")):
                for field in value(inner):
                    if count < 3:
                        yield field
        else:
            yield position, _GGUF_SIZES[kind]
            number(_GGUF_SIZES[kind])

    yield position, "<I"
    number("<I")
    yield position, "<Q"
    num_tensors = number("<Q")
    yield position, "<Q"
    for _ in range(number("<Q")):
        yield from text()
        yield position, "<I"
        yield from value(number("<I"))
    for _ in range(num_tensors):
        yield from text()
        yield position, "<I"
        for code in (*["<Q"] * number("<I"), "<I", "<Q"):
            yield position, code
            number(code)
