"""manifest.json: what a finished checkpoint consists of, with sizes and digests. Knows JSON only; reads no weights.

Its last entry is the digest of all bytes of the file before it, so that damage to the manifest itself is found too.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from fsdp_shard.checkpoint.io import dtypes
from fsdp_shard.checkpoint.io.files import has_file, member, open_regular, parse_json
from fsdp_shard.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
KIND = "fsdp-shard checkpoint"  # tells our manifest.json from anybody else's
_DIGEST = "digest"

T = TypeVar("T")


@dataclass(frozen=True)
class FileRecord:
    """A file: size in bytes; digest of the whole file, or of the header alone where tensors carry the rest."""

    size: int
    digest: str | None = None
    header_digest: str | None = None


@dataclass(frozen=True)
class TensorRecord:
    """A tensor: safetensors dtype, full shape, its digest, and the digest of each chunk (hex) for finding damage."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    chunks: tuple[str, ...]


@dataclass
class Manifest:
    """What was saved. `layout` is gathered or sharded; `mesh` names the device mesh's dimensions and sizes.

    `step` is None in a checkpoint that `convert` made, `world_size` the number of rank files (1 when gathered).
    """

    layout: str
    step: int | None = None
    world_size: int = 1
    mesh: dict[str, int] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        flat = {name: _plain(value) for name, value in vars(self).items()}
        document = {"kind": KIND, "format_version": self.format_version, **flat}
        # One record a line: a manifest of thousands of tensors stays readable and greppable.
        lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in document.items()]
        return _sealed("{\n" + ",\n".join(lines) + ",\n")

    @classmethod
    def from_json(cls, document: Any, where: str) -> Manifest:
        """Check and take over a parsed manifest.json; `where` names the file in the CheckpointError."""
        if not is_ours(document):
            raise CheckpointError(f"{where} is not a manifest of fsdp-shard: its kind is not {KIND!r}.")
        version = document.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{where} has format version {version!r}, but this fsdp-shard reads {FORMAT_VERSION}: "
                "use the version that wrote it, or a newer one."
            )
        known = {"kind", _DIGEST, *_keys()}
        if set(document) != known:
            raise CheckpointError(f"{where}: keys {sorted(set(document) ^ known)} are missing or unknown.")
        values = {key: value for key, value in document.items() if key not in ("kind", _DIGEST)}
        reader = _Reader(where)
        reader.expect(values["layout"] in ("gathered", "sharded"), "layout", "gathered or sharded")
        reader.expect(values["step"] is None or _is_count(values["step"]), "step", "a count or null")
        reader.expect(_is_count(values["world_size"]) and values["world_size"] > 0, "world_size", "a positive count")
        values["mesh"] = reader.map("mesh", values["mesh"], reader.count)
        values["files"] = reader.map("files", values["files"], reader.file)
        values["tensors"] = reader.map("tensors", values["tensors"], reader.tensor)
        values["aliases"] = reader.map("aliases", values["aliases"], reader.text)
        reader.expect(set(values["aliases"].values()) <= set(values["tensors"]), "aliases", "names of its tensors")
        return cls(**values)


def is_ours(document: Any) -> bool:
    """Whether a parsed manifest.json was written by fsdp-shard."""
    return isinstance(document, dict) and document.get("kind") == KIND


def read_manifest(root: Path) -> Manifest | None:
    """The manifest of the checkpoint directory `root`; None if it has none, or one that other software wrote."""
    if not has_file(root, MANIFEST):
        return None
    path = member(root, MANIFEST)
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read()
    document = parse_json(content, str(path))
    # Of damage to what tells ours from others', the other entries tell.
    is_like_ours = isinstance(document, dict) and len(document.keys() & _keys()) > len(_keys()) // 2
    if not is_ours(document) and not is_like_ours:
        return None
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, where: str) -> Manifest:
    """The manifest that a file has as its content; `where` names the file in the CheckpointError."""
    manifest = Manifest.from_json(parse_json(content, where), where)
    start = content.rfind(f'"{_DIGEST}"'.encode())
    if content != _sealed(content[:start].decode()).encode():
        raise CheckpointError(
            f"{where} does not have the digest that it ends with: it is not what was written, so nothing can be "
            "checked by it."
        )
    return manifest


def _keys() -> set[str]:
    return {field.name for field in dataclasses.fields(Manifest)}


def _sealed(text: str) -> str:
    """The content of a manifest that begins with `text`."""
    return f'{text}"{_DIGEST}": "{xxhash.xxh3_128_hexdigest(text.encode())}"\n}}\n'


def _plain(value: Any) -> Any:
    """As JSON has it. `dataclasses.asdict` copies all there is below too, and takes ten times as long."""
    is_records = isinstance(value, Mapping) and value and dataclasses.is_dataclass(next(iter(value.values())))
    return {name: vars(record) for name, record in value.items()} if is_records else value


def _lines(value: Any) -> str:
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


class _Reader:
    """Takes values of a parsed manifest, naming the place of the first one that is not what it must be."""

    def __init__(self, where: str) -> None:
        self._where = where

    def expect(self, is_right: bool, place: str, expected: str) -> None:
        if not is_right:
            raise CheckpointError(f"{self._where}: {place} must be {expected}.")

    def map(self, place: str, value: Any, read: Callable[[str, Any], T]) -> dict[str, T]:
        self.expect(isinstance(value, dict), place, "a map")
        return {name: read(f"{place}[{name!r}]", item) for name, item in value.items()}

    def count(self, place: str, value: Any) -> int:
        self.expect(_is_count(value), place, "a count")
        return int(value)

    def text(self, place: str, value: Any) -> str:
        self.expect(isinstance(value, str), place, "a string")
        return str(value)

    def file(self, place: str, value: Any) -> FileRecord:
        self._keys(place, value, FileRecord)
        for key in ("digest", "header_digest"):
            self.expect(value[key] is None or isinstance(value[key], str), f"{place}.{key}", "a digest or null")
        return FileRecord(self.count(f"{place}.size", value["size"]), value["digest"], value["header_digest"])

    def tensor(self, place: str, value: Any) -> TensorRecord:
        self._keys(place, value, TensorRecord)
        dtype, shape, chunks = self.text(f"{place}.dtype", value["dtype"]), value["shape"], value["chunks"]
        self.expect(dtypes.is_known(dtype), f"{place}.dtype", "a known dtype")
        self.expect(isinstance(shape, list) and all(map(_is_count, shape)), f"{place}.shape", "a list of counts")
        is_texts = isinstance(chunks, list) and all(isinstance(chunk, str) for chunk in chunks)
        self.expect(is_texts, f"{place}.chunks", "a list of digests")
        return TensorRecord(dtype, tuple(shape), self.text(f"{place}.digest", value["digest"]), tuple(chunks))

    def _keys(self, place: str, value: Any, record: type) -> None:
        names = {f.name for f in dataclasses.fields(record)}
        self.expect(isinstance(value, dict) and set(value) == names, place, f"a map with {', '.join(sorted(names))}")
