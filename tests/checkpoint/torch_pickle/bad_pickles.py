"""Damaged and hostile files of torch.save: sound ones, the damage, the message."""

from __future__ import annotations

import builtins
import importlib
import io
import json
import os
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TENSORS = {"a": torch.arange(600.0).reshape(20, 30), "b": torch.arange(4.0)}
SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
FIRST, SECOND = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def single(root: Path, **options: Any) -> Path:
    """Both tensors in one file: a zip archive, unless `options` say otherwise."""
    root.mkdir()
    torch.save(TENSORS, root / SINGLE, **options)
    return root / SINGLE


def stream(root: Path) -> Path:
    """Both tensors in one file, in the older stream."""
    return single(root, _use_new_zipfile_serialization=False)


def indexed(root: Path) -> Path:
    """Two files with a tensor each, and an index."""
    root.mkdir()
    for file, name in ((FIRST, "a"), (SECOND, "b")):
        torch.save({name: TENSORS[name]}, root / file)
    (root / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}))
    return root / INDEX


# Changes to the file.


def cut(count: int) -> Callable[[Path], object]:
    """Its first `count` bytes."""
    return lambda path: path.write_bytes(path.read_bytes()[:count])


def replaced(old: bytes, new: bytes) -> Callable[[Path], object]:
    """The file with every `old` replaced, which must be there and be as long as `new`."""

    def apply(path: Path) -> None:
        data = path.read_bytes()
        assert old in data
        assert len(old) == len(new)
        path.write_bytes(data.replace(old, new))

    return apply


def rezipped(change: Callable[[dict[str, bytes]], object], **options: Any) -> Callable[[Path], object]:
    """The archive written anew by Python's zipfile, after `change` of its members."""

    def apply(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        change(members)
        with zipfile.ZipFile(path, "w", **options) as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    return apply


def member(name: str, data: bytes) -> Callable[[Path], object]:
    """The archive with other data, or new, of this name."""
    return rezipped(lambda members: members.__setitem__(f"pytorch_model/{name}", data))


def without(name: str) -> Callable[[Path], object]:
    """The archive without this member."""
    return rezipped(lambda members: members.pop(f"pytorch_model/{name}"))


def pickled(old: bytes, new: bytes) -> Callable[[Path], object]:
    """The pickle in the archive with every `old` replaced, which must be there."""

    def change(members: dict[str, bytes]) -> None:
        data = members["pytorch_model/data.pkl"]
        assert old in data
        members["pytorch_model/data.pkl"] = data.replace(old, new)

    return rezipped(change)


def entry(field: int, value: int, width: str = "<I") -> Callable[[Path], object]:
    """Another value at byte `field` of the first entry of the central directory."""

    def apply(path: Path) -> None:
        data = bytearray(path.read_bytes())
        struct.pack_into(width, data, data.index(b"PK\x01\x02") + field, value)
        path.write_bytes(data)

    return apply


def end_record(field: int, value: int, width: str) -> Callable[[Path], object]:
    """Another value at byte `field` of the record at the archive's end."""

    def apply(path: Path) -> None:
        data = bytearray(path.read_bytes())
        struct.pack_into(width, data, data.rindex(b"PK\x05\x06") + field, value)
        path.write_bytes(data)

    return apply


def far_locator(path: Path) -> None:
    """The zip64 record is said to lie where no file reaches."""
    data = path.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    path.write_bytes(data[:end] + struct.pack("<4sIQI", b"PK\x06\x07", 0, 1 << 63, 1) + data[end:])


def overlapping(path: Path) -> None:
    """The second member is said to lie where the first one does."""
    data = bytearray(path.read_bytes())
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 1)
    struct.pack_into("<I", data, second + 42, struct.unpack_from("<I", data, first + 42)[0] + 1)
    path.write_bytes(data)


class Asks:
    """Asks for a call when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def hostile(function: Any, *arguments: Any, is_zip: bool = True) -> Callable[[Path], object]:
    """The weights, with a call among them that runs as soon as anything unpickles it."""

    def apply(path: Path) -> None:
        calls = {**TENSORS, "c": Asks(function, *arguments)}
        torch.save(calls, path, _use_new_zipfile_serialization=is_zip)

    return apply


def weight_map(**changes: Any) -> Callable[[Path], object]:
    """The index with other files of these tensors."""

    def apply(path: Path) -> None:
        document = json.loads(path.read_text())
        document["weight_map"].update(changes)
        path.write_text(json.dumps(document))

    return apply


def link_outside(name: str = "") -> Callable[[Path], object]:
    """A file of the directory is a link to one outside of it."""

    def apply(path: Path) -> None:
        inside, outside = path.parent / (name or path.name), path.parent.parent / "outside.bin"
        inside.rename(outside)
        inside.symlink_to(outside)

    return apply


def fifo(name: str = "") -> Callable[[Path], object]:
    """A FIFO instead of a file of the directory."""

    def apply(path: Path) -> None:
        (path.parent / (name or path.name)).unlink()
        os.mkfifo(path.parent / (name or path.name))

    return apply


def saved(value: Any) -> Callable[[Path], object]:
    """A file with this value."""
    return lambda path: torch.save(value, path)


def in_itself(path: Path) -> None:
    """A dictionary that holds itself."""
    state: dict[str, Any] = {"a": TENSORS["a"]}
    state["again"] = state
    torch.save(state, path)


def doubled(path: Path) -> None:
    """Forty lists, each of which holds the one before twice: a trillion leaves in a kilobyte."""
    nested: list[Any] = [TENSORS["a"]]
    for _ in range(20):
        nested = [nested, nested]
    torch.save({"a": nested}, path)


CANARY = "CANARY"
Case = tuple[Callable[[Path], Path], Callable[[Path], object], str]
CASES: dict[str, Case] = {
    # The zip archive.
    "cut in the first member": (single, cut(300), "without its end"),
    "cut in the data": (single, cut(2500), "without its end"),
    "cut in the directory": (single, lambda p: cut(p.stat().st_size - 60)(p), "without its end"),
    "cut in the end": (single, lambda p: cut(p.stat().st_size - 5)(p), "without its end"),
    "only a signature": (single, lambda p: p.write_bytes(b"PK\x03\x04"), "without its end"),
    "something appended": (single, lambda p: p.write_bytes(p.read_bytes() + b"xyz"), "something after its end"),
    "something in front": (single, lambda p: p.write_bytes(b"PK\x03\x04" + p.read_bytes()), "zip64 locator that leads"),
    "a directory elsewhere": (single, end_record(16, 77, "<I"), "at its end that its central directory"),
    "a directory of another length": (single, end_record(12, 7, "<I"), "at its end that its central directory"),
    "another number of members": (single, end_record(10, 3, "<H"), "at its end that its central directory"),
    "a member elsewhere": (single, entry(42, 12345), "no member at byte|overlap"),
    "a member that is larger": (single, entry(24, 10**6), "compressed or encrypted"),
    "a member beyond the file": (
        single,
        lambda p: (entry(24, 10**6)(p), entry(20, 10**6)(p)),
        "overlap|in the central directory",
    ),
    "a bomb": (
        single,
        rezipped(lambda m: m.update({"pytorch_model/data/0": bytes(10**7)}), compression=zipfile.ZIP_DEFLATED),
        "compressed or encrypted; it is not unpacked",
    ),
    "encrypted": (single, entry(8, 1, "<H"), "compressed or encrypted"),
    "members overlap": (single, overlapping, "overlap|no member at byte"),
    "two of a name": (
        single,
        lambda p: zipfile.ZipFile(p, "a").writestr("pytorch_model/data/0", b"x"),
        "two members named",
    ),
    "up and out": (single, member("../../x", b"x"), "outside the archive"),
    "an absolute name": (single, rezipped(lambda m: m.update({"/etc/x": b"x"})), "outside the archive"),
    "renamed in place": (
        single,
        lambda p: p.write_bytes(p.read_bytes().replace(b"byteorder", b"byteOrder", 1)),
        "calls",
    ),
    "a record beyond all files": (single, far_locator, "leads to no zip64 record"),
    "no pickle": (single, without("data.pkl"), "no data.pkl"),
    "another archive": (single, rezipped(lambda m: (m.clear(), m.update({"x": b"y"}))), "no data.pkl"),
    "big endian": (single, member("byteorder", b"big"), "byte order b'big'"),
    "storage missing": (single, without("data/0"), "no storage '0'"),
    "storage shorter than its tensor": (single, member("data/0", b"1234"), "4 bytes of storage '0'"),
    "TorchScript": (
        single,
        rezipped(lambda m: m.update({"pytorch_model/code/x.py": b"x" * 99}), compression=zipfile.ZIP_DEFLATED),
        "TorchScript",
    ),
    # Its pickle.
    "pickle cut": (single, rezipped(lambda m: m.update({"pytorch_model/data.pkl": b"\x80\x02}q"})), "cut short"),
    "pickle of nothing": (single, member("data.pkl", b""), "cut short"),
    "an unknown dtype": (single, pickled(b"FloatStorage", b"FancyStorage"), "asks to run 'torch.FancyStorage'"),
    "a wider dtype": (single, pickled(b"FloatStorage", b"DoubleStorage"), "storage '0'"),
    "a larger shape": (single, pickled(b"K\x14K\x1e\x86", b"K\x15K\x1e\x86"), "ends at byte"),
    "a negative shape": (single, pickled(b"K\x14K\x1e\x86", b"J\xff\xff\xff\xffK\x1e\x86"), "than counts"),
    "a huge shape": (
        single,
        pickled(b"K\x14K\x1e\x86", b"\x8a\x07" + b"\xff" * 6 + b"\x01K\x1e\x86"),
        "ends at byte",
    ),
    "other strides": (single, pickled(b"K\x1eK\x01\x86", b"K\xffK\x01\x86"), "ends at byte"),
    "too few strides": (single, pickled(b"K\x1eK\x01\x86", b"K\x1e\x85"), "2 dimensions with 1 strides"),
    "another storage": (single, pickled(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x009"), "no storage '9'"),
    "no storage reference": (single, pickled(b"storage", b"strange"), "in a way that torch does not"),
    # What would run.
    "os.system": (single, hostile(os.system, f"touch {CANARY}"), "asks to run 'posix.system'"),
    "os.system in a stream": (
        single,
        hostile(os.system, f"touch {CANARY}", is_zip=False),
        "asks to run 'posix.system'",
    ),
    "eval": (single, hostile(eval, f"open('{CANARY}', 'w')"), "asks to run 'builtins.eval'"),
    "exec": (single, hostile(exec, f"open('{CANARY}', 'w')"), "asks to run 'builtins.exec'"),
    "open": (single, hostile(builtins.open, CANARY, "w"), "asks to run '_?io.open'"),
    "import": (single, hostile(importlib.import_module, "antigravity"), "asks to run 'importlib.import_module'"),
    "a process": (single, hostile(subprocess.Popen, ["touch", CANARY]), "asks to run '(subprocess|commands).Popen'"),
    "torch.load": (single, hostile(torch.load, CANARY), "asks to run 'torch.serialization.load'"),
    "a class of numpy": (single, hostile(io.FileIO, CANARY, "w"), "asks to run '_io.FileIO'"),
    "a module": (single, saved(torch.nn.Linear(1, 1)), "asks to run 'torch.nn.modules.linear.Linear'"),
    # What is in it.
    "no tensors": (single, saved({"epoch": 1}), "no tensors at all, and no weights"),
    "only an optimizer": (single, saved({"optimizer": {"state": TENSORS}}), "optimizer tensors, and no weights"),
    "in itself": (single, in_itself, "nested in itself"),
    "doubled": (single, doubled, "nested in itself"),
    "sparse": (single, saved({**TENSORS, "s": torch.eye(3).to_sparse()}), "tensor s is sparse"),
    "meta": (single, saved({**TENSORS, "m": torch.empty(3, device="meta")}), "tensor m is on the meta device"),
    "complex128": (single, saved({"z": torch.zeros(2, dtype=torch.complex128)}), "tensor z .* safetensors cannot hold"),
    # The older stream.
    "stream cut in the pickle": (stream, cut(200), "cut short"),
    "stream cut in the data": (stream, lambda p: cut(p.stat().st_size - 8)(p), "damaged or cut short"),
    "stream with an end": (stream, lambda p: p.write_bytes(p.read_bytes() + b"x"), "1 bytes after its last storage"),
    "stream of big endian": (stream, replaced(b"little_endianq\x02\x88", b"little_endianq\x02\x89"), "big-endian"),
    "stream of another version": (stream, replaced(b"\x80\x02M\xe9\x03.", b"\x80\x02M\xe8\x03."), "version"),
    "a plain pickle": (stream, lambda p: p.write_bytes(b"\x80\x02}."), "plain pickle"),
    # The file, and several with an index.
    "a FIFO": (single, fifo(), "not a checkpoint|not a regular file"),
    "a link outside": (single, link_outside(), "outside the directory"),
    "empty": (single, lambda p: p.write_bytes(b""), "is empty"),
    "text": (single, lambda p: p.write_text("version https://git-lfs"), "begins as no file of torch.save does"),
    "index no JSON": (indexed, lambda p: p.write_text("{"), "not valid JSON"),
    "index without map": (indexed, lambda p: p.write_text("{}"), "no weight_map"),
    "index with nothing": (indexed, lambda p: p.write_text('{"weight_map": {}}'), "empty weight_map"),
    "index to a missing file": (indexed, weight_map(a="gone.bin"), "is missing"),
    "index up and out": (indexed, weight_map(a="../../x.bin"), "outside the directory"),
    "index to an absolute name": (indexed, weight_map(a="/etc/passwd"), "outside the directory"),
    "index to the wrong file": (indexed, weight_map(a=SECOND), "does not list|does not hold it"),
    "index of a name too many": (indexed, weight_map(c=SECOND), "tensor c is in"),
    "a linked shard": (indexed, link_outside(FIRST), "outside the directory"),
    "a FIFO among shards": (indexed, fifo(SECOND), "not a regular file"),
    "a shard missing": (indexed, lambda p: (p.parent / SECOND).unlink(), "is missing"),
    "a tensor in two shards": (
        indexed,
        lambda p: torch.save({"a": TENSORS["b"], "b": TENSORS["b"].clone()}, p.parent / SECOND),
        "tensor a is both in",
    ),
}
