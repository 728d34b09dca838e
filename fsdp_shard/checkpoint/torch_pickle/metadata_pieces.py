"""Reads tensor pieces in DCP's `.metadata` as a whole instead of opcode by opcode.

There are as many pieces as tensors times ranks, and torch's writer pickles each with the same 73 opcodes. They form two
patterns here: a chunk in its tensor's list, and its key and value in the table of storage locations. Anything else is
left to the machine. No decisions are made here: a pattern matches only input that the machine would accept, and a match
has the same effect on stack and memo.
"""

import re
from collections.abc import Sequence
from typing import Any

from fsdp_shard.checkpoint.torch_pickle.metadata_classes import ChunkStorageMetadata, MetadataIndex, StorageInfo
from fsdp_shard.checkpoint.torch_pickle.unpickler import Global, Shortcut

Memo = dict[int, Any]

_GET = rb"(h.|j.{4})"  # an object of the memo
_INT = rb"(?:K.|M..|J.{3}[\0-\x7f]|\x8a(?:\x05.{4}|\x06.{5}|\x07.{6}|\x08.{7})[\0-\x7f])"  # from 0 to 2**63 - 1
_NEW = _GET + rb"\)\x81\x94\}\x94\("  # an object of that class, and the dictionary of its attributes
_SHAPE = _GET + rb"(%b\x85|%b{2}\x86|%b{3}\x87)\x94\x85\x94R\x94" % (_INT, _INT, _INT)
_TEXT = rb"\x8c(.)([^\x94]{0,255})\x94"  # its length is checked after the match
_NUMBER = b"(%b)" % _INT
_CHUNK = re.compile(_NEW + _GET + _SHAPE + _GET + _SHAPE + b"ub", re.DOTALL)
_INDEX = _NEW + _GET + _TEXT + _GET + _NUMBER + _GET + _SHAPE + b"ub"
_INFO = _NEW + _GET + _GET + _GET + _NUMBER + _GET + _NUMBER + b"ub"
_STORED = re.compile(_INDEX + _INFO, re.DOTALL)
_NUMBERS = re.compile(_INT, re.DOTALL)
_LONG1 = 0x8A

# The objects that the patterns recall by `_GET`: class names and texts.
_CHUNK_CLASS = "torch.distributed.checkpoint.metadata.ChunkStorageMetadata"
_INDEX_CLASS = "torch.distributed.checkpoint.metadata.MetadataIndex"
_INFO_CLASS = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = Global, "torch.Size"
_CHUNK_GETS = [(Global, _CHUNK_CLASS), (str, "offsets"), _SIZE, (str, "sizes"), _SIZE]
_INDEX_GETS = [(Global, _INDEX_CLASS), (str, "fqn"), (str, "index"), (str, "offset"), _SIZE]
_INFO_GETS = [(Global, _INFO_CLASS), (str, "relative_path"), (str, "offset"), (str, "length")]
_MAX_PIECES = 1000  # in one call, after which the machine checks its limits; equals the pickler's batch size


def _read_chunks(data: bytes, at: int, memo: Memo, stack: list[Any]) -> int:
    known: set[tuple[bytes, ...]] = set()
    shapes: dict[bytes, tuple[int, ...]] = {}
    for _ in range(_MAX_PIECES):
        if (found := _CHUNK.match(data, at)) is None:
            break
        cls, offsets_key, size, offsets_bytes, sizes_key, size_again, sizes_bytes = found.groups()
        names = (cls, offsets_key, size, sizes_key, size_again)
        if names not in known and not _learn(names, _CHUNK_GETS, memo, known):
            break
        offsets = shapes.get(offsets_bytes) or _shape(offsets_bytes, shapes)
        sizes = shapes.get(sizes_bytes) or _shape(sizes_bytes, shapes)
        chunk = ChunkStorageMetadata(offsets, sizes)
        stack.append(chunk)
        made = (chunk, {"offsets": offsets, "sizes": sizes}, offsets, (offsets,), offsets, sizes, (sizes,), sizes)
        memo.update(enumerate(made, len(memo)))
        at = found.end()
    return at


def _read_stored(data: bytes, at: int, memo: Memo, stack: list[Any]) -> int:
    known: set[tuple[bytes, ...]] = set()
    shapes: dict[bytes, tuple[int, ...]] = {}
    for _ in range(_MAX_PIECES):
        if (found := _STORED.match(data, at)) is None:
            break
        index_gets, info_gets = found.group(1, 2, 5, 7, 8), found.group(10, 11, 13, 15)
        length, text, index_bytes, offset_bytes = found.group(3, 4, 6, 9)
        get_path, start_bytes, size_bytes = found.group(12, 14, 16)
        path, names = memo.get(_number(get_path)), index_gets + info_gets
        if names not in known and not _learn(names, _INDEX_GETS + _INFO_GETS, memo, known):
            break
        if len(text) != length[0] or not text.isascii() or not isinstance(path, str):
            break
        fqn, index = text.decode(), _number(index_bytes)
        offset = shapes.get(offset_bytes) or _shape(offset_bytes, shapes)
        start, num_bytes = _number(start_bytes), _number(size_bytes)
        key, info = MetadataIndex(fqn, offset, index), StorageInfo(path, start, num_bytes)
        stack += (key, info)
        key_state = {"fqn": fqn, "index": index, "offset": offset}
        info_state = {"relative_path": path, "offset": start, "length": num_bytes}
        made = (key, key_state, fqn, offset, (offset,), offset, info, info_state)
        memo.update(enumerate(made, len(memo)))
        at = found.end()
    return at


def _learn(
    gets: tuple[bytes, ...], expected: Sequence[tuple[type, str]], memo: Memo, known: set[tuple[bytes, ...]]
) -> bool:
    """Whether `gets` recall the expected objects from the memo; if so, they are remembered, as they do not change."""
    found = [memo.get(_number(get)) for get in gets]
    if [(type(one), one.name if isinstance(one, Global) else one) for one in found] != expected:
        return False
    known.add(gets)
    return True


def _shape(tagged: bytes, shapes: dict[bytes, tuple[int, ...]]) -> tuple[int, ...]:
    shape = shapes[tagged] = tuple(map(_number, _NUMBERS.findall(tagged[:-1])))
    return shape


def _number(tagged: bytes) -> int:
    """The integer after an opcode and, for LONG1, after its length."""
    return int.from_bytes(tagged[2:] if tagged[0] == _LONG1 else tagged[1:], "little")


SHORTCUTS: dict[str, Shortcut] = {_CHUNK_CLASS: _read_chunks, _INDEX_CLASS: _read_stored}
"""What reads the objects that begin where a class of this name is recalled: it adds them to the stack, and what the
pickle memoizes to the memo, and returns the byte after them. None matches if it returns where it began.
"""
