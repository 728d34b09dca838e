"""shards.index.json: what all rank files of a directory hold, so that readers open only those whose bytes they need.

The headers of a thousand files say the same thing a thousand times. Tensors of one shape are divided in one way
(`divisions`), and files of one layout have their tensors at the same offsets behind their headers (`layouts`), so that
the index of 740,000 pieces takes some 300 KB. It ends with the digest of all bytes before it, and lists the digest of
each header, which a reader compares when it opens that rank file. `verify` compares the whole index with the headers.
"""

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from fsdp_shard.checkpoint.io import FileHeader, TensorSpec, is_known, itemsize, member
from fsdp_shard.checkpoint.piece_table import Division, Held, PieceTable, RankFiles
from fsdp_shard.checkpoint.steps.file_plan import FilePlan, shard_name
from fsdp_shard.checkpoint.steps.manifest import is_sealed, seal
from fsdp_shard.checkpoint.tensor_entry import TensorEntry
from fsdp_shard.checkpoint.tensor_slices import Box
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import format_count, parse_json, read_bounded, refuse_excess

SHARD_INDEX = "shards.index.json"
_KIND, _VERSION = "fsdp-shard rank files", 1
_KEYS = {"kind", "format_version", "step", "save", "aliases", "files", "layouts", "divisions", "tensors", "digest"}
_MAX_DIMS = 64
# The boxes of all ranges may take this much memory, and this much for each byte of the file.
_BOX_BYTES, _MEMORY_BYTES, _MEMORY_PER_BYTE = 16, 64 << 20, 40


@dataclass(frozen=True)
class RankFileSummary:
    """One rank's description of its file for the rank that writes the index, small enough to send.

    Attributes:
        header: Size of the file, and size and digest of its header.
        content: Name, dtype, number of the part, and offset behind the header of each tensor in the file. Most ranks
            say the same here, which is then read once for all of them.
        parts: Full shape, and first flat element and number of elements, or offsets and shape of a box.
    """

    header: FileHeader
    content: bytes
    parts: tuple[tuple[list[int], list[Any]], ...]

    @classmethod
    def of(
        cls, file: FilePlan, pieces: Sequence[tuple[TensorSpec, int, int]], boxes: Mapping[str, Box] | None = None
    ) -> "RankFileSummary":
        """The summary of the file that `plan_sharded` has planned for these pieces."""
        header = file.header
        numbers: dict[tuple[Any, ...], int] = {}
        tensors = []
        for spec, start, count in pieces:
            if spec.name in file.tensors:
                held = (boxes or {}).get(spec.name) or (start, count)
                number = numbers.setdefault((spec.shape, held), len(numbers))
                tensors.append([spec.name, spec.dtype, number, file.tensors[spec.name] - len(header)])
        parts = tuple((list(shape), json.loads(json.dumps(held))) for shape, held in numbers)
        digest = xxhash.xxh3_128_hexdigest(header)
        content = zlib.compress(json.dumps(tensors).encode(), 1)
        return cls(FileHeader(file.num_bytes, len(header), digest), content, parts)


def build_shard_index(
    reports: Sequence[RankFileSummary], step: int | None, save_id: str, aliases: Mapping[str, str]
) -> bytes:
    """The content of the index of the files that the ranks report, in the order of ranks.

    The work grows with the ranks and with the tensors, not with the pieces, if most ranks have the same content.
    """
    unique = dict.fromkeys(report.content for report in reports)
    contents = {content: content_number for content_number, content in enumerate(unique)}
    dtypes: dict[str, str] = {}
    parts_of: dict[str, list[tuple[int, int]]] = {}  # of each tensor: (number of the content, number of the part)
    offsets: list[tuple[tuple[int, int], ...]] = []
    for content, content_number in contents.items():
        held = json.loads(zlib.decompress(content))
        for name, dtype, part, _ in held:
            assert dtypes.setdefault(name, dtype) == dtype, f"ranks disagree on {name}"
            parts_of.setdefault(name, []).append((content_number, part))
        tensor_numbers = {name: number for number, name in enumerate(parts_of)}
        offsets.append(tuple((tensor_numbers[name], offset) for name, *_, offset in held))
    texts: dict[tuple[tuple[int, int], ...], str] = {}
    divisions: dict[str, int] = {}
    tensors = {}
    for name, parts in parts_of.items():
        key = tuple(parts)
        if key not in texts:
            texts[key] = _division_text(name, dict(parts), contents, reports)
        tensors[name] = [dtypes[name], divisions.setdefault(texts[key], len(divisions))]
    layouts: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
    files = []
    for report in reports:
        size, start, digest = report.header.num_bytes, report.header.header_bytes, report.header.digest
        # The same offsets up to the same end: so each tensor takes the same bytes.
        layout = (size - start, offsets[contents[report.content]])
        files.append([size, start, digest, layouts.setdefault(layout, len(layouts))])
    document = {"kind": _KIND, "format_version": _VERSION, "step": step, "save": save_id, "aliases": dict(aliases)}
    document |= {"files": files, "layouts": [pairs for _, pairs in layouts], "tensors": tensors}
    lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in document.items()]
    lines.append(f'"divisions": [{",".join(divisions)}]')
    return seal("{\n" + ",\n".join(lines) + ",\n").encode()


def _division_text(
    name: str, part_of: Mapping[int, int], contents: Mapping[bytes, int], reports: Sequence[RankFileSummary]
) -> str:
    """The JSON of a tensor's division; `part_of` maps a content number to the part that ranks with it have."""
    shapes, held = [], []
    for rank, report in enumerate(reports):
        number = part_of.get(contents[report.content])
        if number is not None:
            shape, part = report.parts[number]
            shapes.append(shape)
            held.append([rank, *part])
    assert all(shape == shapes[0] for shape in shapes), f"ranks disagree on {name}"
    problem = Division(tuple(shapes[0]), tuple(map(_held, held))).problem()
    assert problem is None, f"{name} is not written whole: {problem}"
    return json.dumps({"shape": shapes[0], "held": held}, separators=(",", ":"))


@dataclass(frozen=True)
class ShardIndex:
    """A checked index: the tensors with their pieces, the headers that the files must have, and what made them.

    `divisions` holds the division of each tensor, in the order of `tensors`; `files` locates the tensors in the files.
    """

    step: int | None
    save_id: str
    aliases: dict[str, str]
    tensors: dict[str, TensorEntry]
    headers: dict[str, FileHeader] = field(repr=False)
    divisions: Sequence[Division] = field(repr=False)
    files: RankFiles = field(repr=False)

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote the files."""
        return len(self.headers)


def read_shard_index(root: Path) -> ShardIndex:
    """Read the index in a directory of rank files.

    Raises:
        CheckpointError: It contradicts itself, is damaged, or is larger than `metadata_bytes`.
    """
    path = member(root, SHARD_INDEX)
    content = read_bounded(path, "metadata_bytes")
    document = parse_json(content, str(path))
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise CheckpointError(f"{path} is not an index of rank files of fsdp-shard: its kind is not {_KIND!r}.")
    if document.get("format_version") != _VERSION:
        raise CheckpointError(
            f"{path} has format version {document.get('format_version')!r}, but this fsdp-shard reads {_VERSION}: use "
            f"a newer version, or delete the file, after which the headers of all rank files are read."
        )
    if document.keys() != _KEYS or not is_sealed(content):
        raise CheckpointError(f"{path} does not have the digest that it ends with: it is not what was written.")
    try:
        return _Checker(document, len(content)).index()
    except _Wrong as problem:
        raise CheckpointError(f"{path} {problem}, so it is not what fsdp-shard writes.") from None
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not what fsdp-shard writes: {str(error)[:200] or type(error).__name__}."
        ) from None


class _Wrong(Exception):
    """A contradiction in an index; the message is the second half of a sentence."""


class _Checker:
    """Checks a parsed index: each element of a tensor is held once, and each byte of a file belongs to one tensor."""

    def __init__(self, document: dict[str, Any], num_bytes: int) -> None:
        self._document, self._num_bytes = document, num_bytes

    def index(self) -> ShardIndex:
        """The index; the errors of Python stand for values of a wrong type."""
        document = self._document
        step, save_id, aliases = document["step"], _text(document["save"]), document["aliases"]
        if step is not None:
            _counts([step])
        headers, layout_of = self._files()
        refuse_excess(len(document["tensors"]), "tensors", "an index of rank files has too many tensors")
        divisions = self._divisions(len(headers))
        specs = [
            (name, _dtype(dtype), divisions[_counts([division_number])[0]])
            for name, (dtype, division_number) in document["tensors"].items()
        ]
        layouts = [dict(_pairs(layout)) for layout in document["layouts"]]
        files = RankFiles(list(headers), [header.header_bytes for header in headers.values()], layout_of, layouts)
        self._check_layouts(specs, divisions, files, list(headers.values()))
        tensors = {
            name: TensorEntry(name, dtype, division.shape, PieceTable(division, files, number, itemsize(dtype)))
            for number, (name, dtype, division) in enumerate(specs)
        }
        for alias, kept in aliases.items():
            if _text(kept) not in tensors:
                raise _Wrong(f"ties tensor {alias} to {kept[:200]}, which no file holds")
        return ShardIndex(step, save_id, aliases, tensors, headers, [division for *_, division in specs], files)

    def _files(self) -> tuple[dict[str, FileHeader], list[int]]:
        rows = self._document["files"]
        if not rows:
            raise _Wrong("lists no files")
        headers, layout_of = {}, []
        for rank, (size, header_bytes, digest, layout) in enumerate(rows):
            _counts([size, header_bytes, layout])
            headers[shard_name(rank, len(rows))] = FileHeader(size, header_bytes, _text(digest))
            layout_of.append(layout)
        return headers, layout_of

    def _divisions(self, num_ranks: int) -> list[Division]:
        found, box_bytes = [], 0
        for item in self._document["divisions"]:
            shape = _counts(item["shape"])
            held = tuple(_held(values) for values in item["held"])
            if len(shape) > _MAX_DIMS or item.keys() != {"shape", "held"}:
                raise _Wrong(f"has a shape of {format_count(len(shape), 'dimension')}")
            ranks = [one.rank for one in held]
            if len(set(ranks)) != len(ranks) or max(ranks, default=0) >= num_ranks:
                raise _Wrong("has a tensor twice in a file, or in one that there is not")
            box_bytes += len(held) * max(2 * len(shape) - 1, 1) * max(len(shape), 1) * _BOX_BYTES
            if box_bytes > _MEMORY_BYTES + _MEMORY_PER_BYTE * self._num_bytes:
                raise _Wrong("divides tensors into more parts than any checkpoint of its size")
            division = Division(shape, held)
            if (problem := division.problem()) is not None:
                raise _Wrong(f"has tensors of shape {list(shape)} that are not whole: {problem}")
            found.append(division)
        return found

    def _check_layouts(
        self,
        specs: Sequence[tuple[str, str, Division]],
        divisions: Sequence[Division],
        files: RankFiles,
        headers: Sequence[FileHeader],
    ) -> None:
        """Check that the tensors of each file follow each other from the end of its header to its end."""
        num_files = Counter(files.layout_of)
        counts = {id(division): _counts_by_layout(division, files.layout_of, num_files) for division in divisions}
        num_listed = Counter(number for layout in files.layouts for number in layout)
        for number, (name, _, division) in enumerate(specs):
            if num_listed[number] != len(counts[id(division)]):
                raise _Wrong(f"has tensor {name[:200]} in other files than those that hold its elements")
        ends = []
        for layout_number, layout in enumerate(files.layouts):
            position = 0
            # Tensors without elements begin where others do.
            sizes = [
                (offset, counts[id(specs[number][2])][layout_number] * itemsize(specs[number][1]))
                for number, offset in layout.items()
            ]
            for offset, size in sorted(sizes):
                if offset != position:
                    raise _Wrong("has tensors in a file that overlap, or leave a gap")
                position += size
            ends.append(position)
        for name, layout_number, header in zip(files.names, files.layout_of, headers, strict=True):
            if header.header_bytes + ends[layout_number] != header.num_bytes:
                raise _Wrong(f"says that {name} has {header.num_bytes} bytes, but its tensors end elsewhere")


def _counts_by_layout(division: Division, layout_of: Sequence[int], num_files: Mapping[int, int]) -> dict[int, int]:
    """{layout: elements of the tensor in each file of that layout}; all of them must have it, and alike."""
    found: dict[int, int] = {}
    seen = Counter[int]()
    for rank, _, count, box in division.held:
        num_elements = count if box is None else math.prod(box[1])
        layout = layout_of[rank]
        seen[layout] += 1
        if found.setdefault(layout, num_elements) != num_elements:
            raise _Wrong("has files of one layout that hold different numbers of elements")
    if any(seen[layout] != num_files[layout] for layout in seen):
        raise _Wrong("has files of one layout that hold different tensors")
    return found


def _held(values: Any) -> Held:
    """`[rank, start, count]`, or `[rank, offsets, shape]` of a box."""
    rank, one, two = values
    if isinstance(one, list):
        _counts([rank])
        offsets, shape = _counts(one), _counts(two)
        if max(len(offsets), len(shape)) > _MAX_DIMS:
            raise _Wrong("has a box of too many dimensions")
        return Held(rank, 0, 0, (offsets, shape))
    _counts(values)
    return Held(rank, one, two)


def _pairs(values: Any) -> list[tuple[int, int]]:
    pairs = [(number, offset) for number, offset in values]
    _counts([number for pair in pairs for number in pair])
    if len({number for number, _ in pairs}) != len(pairs):
        raise _Wrong("has a tensor twice in a file")
    return pairs


def _counts(values: Any) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise _Wrong(f"has {str(value)[:100]!r} where a count belongs")
    return tuple(values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"has {str(value)[:100]!r} where a text belongs")
    return value


def _dtype(value: Any) -> str:
    if not isinstance(value, str) or not is_known(value):
        raise _Wrong(f"has the dtype {str(value)[:100]!r}, which is unknown")
    return value
