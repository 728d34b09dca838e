"""GGUF: headers that lie about counts, types, sizes and places, metadata of wrong types, tokenizers that do not fit."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf

from tests.faults.corpus import bases, edits
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import Damage

_FILE = "model.gguf"
_QUANTIZED = "blk.0.ffn_up.weight"
_NORM = "blk.0.attn_norm.weight"
_U32, _I32, _F32, _TEXT, _BOOL = (
    gguf.GGUFValueType.UINT32,
    gguf.GGUFValueType.INT32,
    gguf.GGUFValueType.FLOAT32,
    gguf.GGUFValueType.STRING,
    gguf.GGUFValueType.BOOL,
)


def _at(position: int, code: str, value: Any) -> Damage:
    def apply(root: Path) -> None:
        data = bytearray((root / _FILE).read_bytes())
        struct.pack_into(code, data, position, value)
        (root / _FILE).write_bytes(data)

    return apply


def _after(name: str, offset: int, code: str, value: Any) -> Damage:
    """A value `offset` bytes after the text `name` in the header, where it occurs the last time."""

    def apply(root: Path) -> None:
        data = bytearray((root / _FILE).read_bytes())
        text = struct.pack("<Q", len(name)) + name.encode()
        struct.pack_into(code, data, data.rindex(text) + len(text) + offset, value)
        (root / _FILE).write_bytes(data)

    return apply


def _renamed(old: str, new: str) -> Damage:
    """One name for another of any length; offsets count from the end of the header, which stays aligned or does not."""
    return edits.replaced(_FILE, struct.pack("<Q", len(old)) + old.encode(), struct.pack("<Q", len(new)) + new.encode())


def _metadata(**values: Any) -> Callable[[Path], None]:
    """A file that is written with such metadata."""

    def build(root: Path) -> None:
        root.mkdir()
        bases.write_gguf(root / _FILE, **values)

    return build


# A tensor's record: name, number of dimensions (uint32), dimensions (uint64), type (uint32), offset (uint64).
_HEADERS: dict[str, Damage] = {
    **{f"cut at {count}": edits.cut(_FILE, count) for count in (3, 10, 23, 30, 300, 900, 2000, 5000, -100, -40_000)},
    "empty": edits.content(_FILE, b""),
    "only its name": edits.content(_FILE, b"GGUF"),
    "version 1": _at(4, "<I", 1),
    "version 9": _at(4, "<I", 9),
    "of big endian": _at(4, ">I", 3),
    "2^60 tensors": _at(8, "<Q", 2**60),
    "one tensor more": _at(8, "<Q", 22),
    "no tensors": _at(8, "<Q", 0),
    "2^60 values": _at(16, "<Q", 2**60),
    "one value more": _at(16, "<Q", 21),
    "no values": _at(16, "<Q", 0),
    "a key of 2^63 bytes": _at(24, "<Q", 2**63),
    "a key of 2^40 bytes": _at(24, "<Q", 2**40),
    "a key that is no UTF-8": _at(32, "<B", 0xFF),
    "an unknown type of a value": _after("llama.context_length", 0, "<I", 99),
    "an array in an array": _after("tokenizer.ggml.tokens", 4, "<I", 9),
    "an array of an unknown type": _after("tokenizer.ggml.tokens", 4, "<I", 77),
    "an array of 2^62 texts": _after("tokenizer.ggml.tokens", 8, "<Q", 2**62),
    "an array of 2^62 numbers": _after("tokenizer.ggml.scores", 8, "<Q", 2**62),
    "a text of 2^62 bytes in an array": _after("tokenizer.ggml.tokens", 16, "<Q", 2**62),
    "a tensor of 0 dimensions": _after(_NORM, 0, "<I", 0),
    "a quantized tensor of 0 dimensions": _after(_QUANTIZED, 0, "<I", 0),
    "a tensor of 9 dimensions": _after(_NORM, 0, "<I", 9),
    "a tensor of 2^32 dimensions": _after(_NORM, 0, "<I", 2**32 - 1),
    "a dimension of 2^63": _after(_NORM, 4, "<Q", 2**63),
    "a dimension of 2^40": _after(_NORM, 4, "<Q", 2**40),
    "rows that blocks do not fill": _after(_QUANTIZED, 4, "<Q", 33),
    "an unknown type of a tensor": _after(_NORM, 12, "<I", 99),
    "a removed type of a tensor": _after(_NORM, 12, "<I", 4),
    "another type of a tensor": _after(_QUANTIZED, 20, "<I", 0),
    "a tensor beyond the file": _after(_NORM, 16, "<Q", 2**40),
    "a tensor at 2^64 - 1": _after(_NORM, 16, "<Q", 2**64 - 1),
    "tensors that overlap": _after(_NORM, 16, "<Q", 0),
    "a name twice": _renamed("blk.0.attn_v.weight", "blk.0.attn_k.weight"),
    "a key twice": _renamed("llama.context_length", "llama.embedding_length"),
    "a name of no model": _renamed("blk.0.attn_v.weight", "blk.0.attn_x.weight"),
    "a name with terminal codes": _renamed("blk.0.attn_v.weight", "blk.0.\x1b[31m.weight"),
    "no architecture": _renamed("general.architecture", "general.architekture"),
    "another architecture": _renamed("llama", "gpt42"),
    "no number of heads": _renamed("llama.attention.head_count", "llama.attention.head_kount"),
}
_METADATA: dict[str, Callable[[Path], None]] = {
    "an alignment of 0": _metadata(general__alignment=(0, _U32)),
    "an alignment of 3": _metadata(general__alignment=(3, _U32)),
    "an alignment that is a text": _metadata(general__alignment=("32", _TEXT)),
    "a part of several": _metadata(split__count=(3, _U32)),
    "a number of parts that is a text": _metadata(split__count=("x", _TEXT)),
}
_EITHER: dict[str, Callable[[Path], None]] = {
    "a rope base of 0": _metadata(llama__rope__freq_base=(0.0, _F32)),
    "a rope base that is a text": _metadata(llama__rope__freq_base=("x", _TEXT)),
    "a scaling that is unknown": _metadata(llama__rope__scaling__type=("spiral", _TEXT)),
    "a scaling that is a number": _metadata(llama__rope__scaling__type=(7, _U32)),
    "a factor that is a text": _metadata(
        llama__rope__scaling__type=("linear", _TEXT), llama__rope__scaling__factor=("two", _TEXT)
    ),
    "a length that is a text": _metadata(
        llama__rope__scaling__type=("yarn", _TEXT),
        llama__rope__scaling__factor=(2.0, _F32),
        llama__rope__scaling__original_context_length=("x", _TEXT),
    ),
    "a token beyond the vocabulary": _metadata(tokenizer__ggml__unknown_token_id=(10**6, _U32)),
    "a negative token": _metadata(tokenizer__ggml__padding_token_id=(-5, _I32)),
    "a token that is a text": _metadata(tokenizer__ggml__padding_token_id=("x", _TEXT)),
    "a token that is true": _metadata(tokenizer__ggml__padding_token_id=(True, _BOOL)),
    "add_bos that is a text": _metadata(tokenizer__ggml__add_bos_token=("x", _TEXT)),
    "merges that are a text": _metadata(tokenizer__ggml__merges=("x", _TEXT)),
    "a template that fails": _metadata(tokenizer__chat_template=("{% if", _TEXT)),
    "a template that is a number": _metadata(tokenizer__chat_template=(5, _U32)),
    "a name that is a number": _metadata(general__name=(5, _U32)),
    "a head size": _metadata(llama__attention__key_length=(7, _U32)),
    "experts": _metadata(llama__expert_count=(8, _U32)),
}
# What transformers finds wrong as it makes config and tokenizer; the tensors can be read.
_CONFIGS: dict[str, Damage] = {
    "a name of a far layer": _renamed("blk.0.attn_v.weight", "blk.9.attn_v.weight"),
    "a dimension of 0": _after(_NORM, 4, "<Q", 0),
    "no layers": _after("llama.block_count", 4, "<I", 0),
    "one layer less": _after("llama.block_count", 4, "<I", 1),
    "one layer more": _after("llama.block_count", 4, "<I", 3),
    "a context of 0": _after("llama.context_length", 4, "<I", 0),
    "another width": _after("llama.embedding_length", 4, "<I", 32),
    "a width of 0": _after("llama.embedding_length", 4, "<I", 0),
    "another inner width": _after("llama.feed_forward_length", 4, "<I", 32),
    "an unknown tokenizer": edits.replaced(
        _FILE, struct.pack("<Q", 5) + b"llama" + b"\x15", b"\x05" + bytes(7) + b"magic\x15"
    ),
    "fewer tokens": _after("tokenizer.ggml.scores", 8, "<Q", 31),
    "no tokens": _renamed("tokenizer.ggml.tokens", "tokenizer.ggml.tokenz"),
    "no scores": _renamed("tokenizer.ggml.scores", "tokenizer.ggml.scorez"),
}


def _damaged(damage: Damage) -> Callable[[Path], None]:
    return bases.damaged("gguf", damage)


CASES = [
    *(Case(name, _damaged(damage)) for name, damage in _HEADERS.items()),
    *(Case(name, build) for name, build in _METADATA.items()),
    *(Case(name, build, expect="any") for name, build in _EITHER.items()),
    *(Case(name, _damaged(damage), expect="any") for name, damage in _CONFIGS.items()),
]
