"""manifest.json: the files and tensors of a finished checkpoint, with sizes and digests. Reads no weights.

Its last entry is the digest of all preceding bytes of the file, so damage to the manifest itself is also detected.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import xxhash

from fsdp_shard.checkpoint.io import has_file, is_known, member
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import parse_json, read_bounded

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
KIND = "fsdp-shard checkpoint"  # distinguishes our manifest.json from that of other software
_DIGEST = "digest"


@dataclass(frozen=True)
class FileRecord:
    """A file: size in bytes, and digest of the whole file, or of only the header if tensors have their own digests."""

    size: int
    digest: str | None = None
    header_digest: str | None = None


@dataclass(frozen=True)
class TensorRecord:
    """A tensor: safetensors dtype, full shape, its digest, and the digest of each chunk (hex) for locating damage."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    chunks: tuple[str, ...]


@dataclass
class Manifest:
    """The content of a save. `layout` is gathered or sharded; `mesh` maps the device mesh's dimensions to sizes.

    `step` is None if it is not known, `world_size` the number of rank files (1 when gathered).
    """

    layout: str
    step: int | None = None
    world_size: int = 1
    mesh: dict[str, int] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The content of manifest.json, with its digest."""
        document = {"kind": KIND, "format_version": FORMAT_VERSION, **vars(self)}
        # One record per line: a manifest of thousands of tensors stays readable and greppable.
        lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in document.items()]
        return seal("{\n" + ",\n".join(lines) + ",\n")

    @classmethod
    def from_json(cls, document: Any, where: str) -> Self:
        """Check a parsed manifest.json.

        Args:
            document: The parsed file.
            where: Name of the file, for errors.

        Raises:
            CheckpointError: A value is invalid; the message names it.
        """
        if not is_ours(document):
            raise CheckpointError(f"{where} is not a manifest of fsdp-shard: its kind is not {KIND!r}.")
        version = document.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise CheckpointError(
                f"{where} has format version {version!r}, but this fsdp-shard reads {FORMAT_VERSION}: "
                "use the version that wrote it, or a newer one."
            )
        known = {"kind", "format_version", _DIGEST, *_MANIFEST_FIELDS}
        if set(document) != known:
            raise CheckpointError(f"{where}: keys {sorted(set(document) ^ known)} are missing or unknown.")
        values = {key: value for key, value in document.items() if key in _MANIFEST_FIELDS}
        _check_fields(values, _MANIFEST_FIELDS, where, "")
        for key, fields in (("files", _FILE_FIELDS), ("tensors", _TENSOR_FIELDS)):
            for name, item in values[key].items():
                path = f"{key}[{name!r}]"
                is_record = isinstance(item, dict) and item.keys() == fields.keys()
                _expect(is_record, where, path, f"a map with {', '.join(sorted(fields))}")
                _check_fields(item, fields, where, f"{path}.")
        for key, (is_right, expected) in (("mesh", _COUNT), ("aliases", _TEXT)):
            for name, item in values[key].items():
                _expect(is_right(item), where, f"{key}[{name!r}]", expected)
        is_tied = set(values["aliases"].values()) <= set(values["tensors"])
        _expect(is_tied, where, "aliases", "names of its tensors")
        values["files"] = {name: FileRecord(**item) for name, item in values["files"].items()}
        for item in values["tensors"].values():
            item.update(shape=tuple(item["shape"]), chunks=tuple(item["chunks"]))
        values["tensors"] = {name: TensorRecord(**item) for name, item in values["tensors"].items()}
        return cls(**values)


def is_ours(document: Any) -> bool:
    """Whether a parsed manifest.json was written by fsdp-shard."""
    return isinstance(document, dict) and document.get("kind") == KIND


def read_manifest(root: Path) -> Manifest | None:
    """Read the manifest of a checkpoint directory.

    Returns:
        The manifest; None if there is none, or if other software wrote it.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    if not has_file(root, MANIFEST):
        return None
    path = member(root, MANIFEST)
    content = read_bounded(path, "metadata_bytes")
    document = parse_json(content, str(path))
    # If `kind` itself is damaged, the other keys identify the manifest.
    keys = {"format_version", *_MANIFEST_FIELDS}
    if not is_ours(document) and not (isinstance(document, dict) and len(document.keys() & keys) > len(keys) // 2):
        return None
    return _sealed_manifest(document, content, str(path))


def read_manifest_of_folder(folder: Path) -> Manifest | None:
    """The part of a step's manifest about a folder of the step, such as ema/; None if it lists nothing there.

    File names stay relative to the step, and digests are of whole files. Records of tensors and aliases are left out,
    as they describe the step's weights.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    manifest = read_manifest(folder.parent)
    if manifest is None:
        return None
    files = {name: record for name, record in manifest.files.items() if name.startswith(f"{folder.name}/")}
    return replace(manifest, files=files, tensors={}, aliases={}) if files else None


def has_listed_files(root: Path, manifest: Manifest) -> bool:
    """Whether a directory has each file of its manifest, with the size that was written."""
    try:
        return all(member(root, name).stat().st_size == record.size for name, record in manifest.files.items())
    except (CheckpointError, OSError):
        return False


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse the content of a manifest.json and compare it with its digest; `where` names the file in errors."""
    return _sealed_manifest(parse_json(content, where), content, where)


def _sealed_manifest(document: Any, content: bytes, where: str) -> Manifest:
    """Return the manifest in a document, which must contain the digest of its content."""
    manifest = Manifest.from_json(document, where)
    if not is_sealed(content):
        raise CheckpointError(
            f"{where} does not have the digest that it ends with: it is not what was written, so nothing can be "
            "checked by it."
        )
    return manifest


def is_sealed(content: bytes) -> bool:
    """Whether a file ends with the digest of the preceding bytes, as written by `seal`."""
    start = content.rfind(f'"{_DIGEST}"'.encode())
    return start >= 0 and content == seal(content[:start].decode()).encode()


def seal(text: str) -> str:
    """Complete `text`, a JSON object up to a comma, with its digest."""
    return f'{text}"{_DIGEST}": "{xxhash.xxh3_128_hexdigest(text.encode())}"\n}}\n'


def _lines(value: Any) -> str:
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value)
    # `dataclasses.asdict` also copies everything below the records, which takes ten times as long.
    rows = (f"  {json.dumps(key)}: {json.dumps(item, default=vars)}" for key, item in value.items())
    return "{\n" + ",\n".join(rows) + "\n}"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


_Check = tuple[Callable[[Any], bool], str]  # (check of a value, description of valid values)
_COUNT: _Check = (_is_count, "a count")
_TEXT: _Check = (_is_text, "a string")
_MAP: _Check = (lambda value: isinstance(value, dict), "a map")
_OPTIONAL_DIGEST: _Check = (lambda value: value is None or _is_text(value), "a digest or null")
_MANIFEST_FIELDS: dict[str, _Check] = {
    "layout": (lambda value: value in ("gathered", "sharded"), "gathered or sharded"),
    "step": (lambda value: value is None or _is_count(value), "a count or null"),
    "world_size": (lambda value: _is_count(value) and value > 0, "a positive count"),
    **dict.fromkeys(("mesh", "files", "tensors", "aliases"), _MAP),
}
_FILE_FIELDS = {"size": _COUNT, "digest": _OPTIONAL_DIGEST, "header_digest": _OPTIONAL_DIGEST}
_TENSOR_FIELDS: dict[str, _Check] = {
    "dtype": (lambda value: _is_text(value) and is_known(value), "a known dtype"),
    "shape": (_is_list_of(_is_count), "a list of counts"),
    "digest": _TEXT,
    "chunks": (_is_list_of(_is_text), "a list of digests"),
}


def _check_fields(values: Mapping[str, Any], checks: Mapping[str, _Check], where: str, path: str) -> None:
    for key, (is_right, expected) in checks.items():
        _expect(is_right(values[key]), where, f"{path}{key}", expected)


def _expect(is_right: bool, where: str, path: str, expected: str) -> None:
    if not is_right:
        raise CheckpointError(f"{where}: {path} must be {expected}.")
