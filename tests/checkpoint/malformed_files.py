"""Every way a safetensors file, its index or a rank file can be wrong: sound ones, the damage, the message."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fsdp_shard.checkpoint.steps.file_plan import SHARD_KEY, plan_gathered, shard_name
from tests.checkpoint.files import edit_header, even_edges, spec_of, write_huggingface, write_ranks

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0)}
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"


def single(root: Path) -> Path:
    """One file with both tensors."""
    return write_huggingface(root, TENSORS) / MODEL


def indexed(root: Path) -> Path:
    """Two files, `a` in the first and `b` in the second, with an index."""
    plans, index = plan_gathered([spec_of(name, tensor) for name, tensor in TENSORS.items()], 1)
    root.mkdir()
    for plan in plans:
        (root / plan.name).write_bytes(plan.header + bytes(plan.num_bytes - len(plan.header)))
    assert index is not None
    (root / INDEX).write_bytes(index)
    return root / INDEX


def ranks(root: Path, **kwargs: Any) -> Path:
    """The file of the second of three ranks."""
    return write_ranks(root, TENSORS, even_edges(TENSORS, 3), **kwargs) / shard_name(1, 3)


def length(value: int) -> Callable[[Path], None]:
    """The first eight bytes give the header this length."""

    def edit(path: Path) -> None:
        path.write_bytes(struct.pack("<Q", value) + path.read_bytes()[8:])

    return edit


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The header after `change` of its document."""
    return lambda path: edit_header(path, change)


def text(content: bytes) -> Callable[[Path], None]:
    """These bytes instead of the header's document."""
    return header(lambda document: content)


def entry(name: str, key: str, value: Any) -> Callable[[Path], None]:
    """Another value in the header's entry of a tensor."""
    return header(lambda document: document[name].__setitem__(key, value))


def weight_map(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The index after `change` of its weight map."""

    def apply(path: Path) -> None:
        document = json.loads(path.read_text())
        change(document["weight_map"])
        path.write_text(json.dumps(document))

    return apply


def shard_info(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A rank file after `change` of what it says of its ranges."""

    def apply(document: dict[str, Any]) -> None:
        info = json.loads(document["__metadata__"][SHARD_KEY])
        change(info)
        document["__metadata__"][SHARD_KEY] = json.dumps(info)

    return header(apply)


def everywhere(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """The same damage in the files of all ranks."""

    def apply(path: Path) -> None:
        for file in path.parent.glob("shard-*"):
            damage(file)

    return apply


def link_outside(path: Path) -> None:
    """The file is a link to one outside of the directory."""
    outside = path.parent.parent / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)


def fifo(path: Path) -> None:
    """A FIFO instead of the file."""
    path.unlink()
    os.mkfifo(path)


def first_file(path: Path, *names: str) -> None:
    """The first of several files with other tensors."""
    save_file({name: torch.zeros(2) for name in names}, path.parent / "model-00001-of-00002.safetensors")


def other_save(path: Path) -> None:
    """The file of this rank is of another save."""
    write_ranks(path.parent.parent / "other", TENSORS, even_edges(TENSORS, 3), save="two")
    (path.parent.parent / "other" / path.name).rename(path)


def other_world(path: Path) -> None:
    """Beside the files lie those of a save by two ranks."""
    write_ranks(path.parent, TENSORS, even_edges(TENSORS, 2))


def swap_ranks(path: Path) -> None:
    """Two ranks have each other's file."""
    other = path.parent / shard_name(2, 3)
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


Case = tuple[Callable[[Path], Path], Callable[[Path], object], str]
CASES: dict[str, Case] = {
    # One safetensors file.
    "empty file": (single, lambda p: p.write_bytes(b""), "0 bytes, too few"),
    "cut in the length": (single, lambda p: p.write_bytes(p.read_bytes()[:5]), "5 bytes, too few"),
    "cut in the header": (single, lambda p: p.write_bytes(p.read_bytes()[:40]), r"truncated.*Copy it again\."),
    "cut in the data": (single, lambda p: p.write_bytes(p.read_bytes()[:-1]), r"is truncated\. Copy it again\."),
    "bytes appended": (single, lambda p: p.write_bytes(p.read_bytes() + b"x"), "appended"),
    "length beyond the file": (single, length(10**6), "says that its header takes 1000000 bytes"),
    "length of 2^63": (single, length(2**63), "says that its header takes"),
    "no JSON": (single, text(b"{nonsense"), "not valid JSON"),
    "no UTF-8": (single, text(b'{"\xff": 1}'), "not valid JSON"),
    "a list": (single, text(b"[]"), "not a JSON object"),
    "deep nesting": (single, text(b'{"a":' + b"[" * 200_000), "nested too deeply|not valid JSON"),
    "duplicate key": (single, text(b'{"a": {}, "a": {}}'), "duplicate key 'a'"),
    "metadata no map": (single, header(lambda d: d.__setitem__("__metadata__", {"x": 1})), "__metadata__"),
    "unknown dtype": (single, entry("a", "dtype", "F31"), "'F31', which is unknown"),
    "dtype no text": (single, entry("a", "dtype", ["F32"]), "unknown"),
    "negative shape": (single, entry("a", "shape", [-2, -3]), "list of counts"),
    "shape of booleans": (single, entry("a", "shape", [True, 6]), "list of counts"),
    "shape too large": (single, entry("a", "shape", [2**40, 2**40]), "takes 24 bytes, but F32"),
    "shape beyond all": (single, entry("a", "shape", [10**4000, 0]), "not valid JSON|list of counts"),
    "shape beyond 2^63": (single, entry("a", "shape", [2**63, 0]), "list of counts"),
    "half a surrogate": (single, header(lambda d: d.__setitem__("a\ud800", d.pop("a"))), "not valid JSON"),
    "wrong dtype": (single, entry("a", "dtype", "F64"), "takes 24 bytes, but F64"),
    "offsets swapped": (single, entry("a", "data_offsets", [24, 0]), "takes -24 bytes"),
    "three offsets": (single, entry("a", "data_offsets", [0, 24, 25]), "two byte positions"),
    "fractional offset": (single, entry("a", "data_offsets", [0.0, 24]), "two byte positions"),
    "overlap": (single, entry("b", "data_offsets", [8, 24]), "overlap"),
    "gap": (single, entry("b", "data_offsets", [25, 41]), "no tensor owns the 1 bytes"),
    "missing key": (single, header(lambda d: d["a"].pop("dtype")), "must have exactly"),
    "extra key": (single, entry("a", "stride", [1]), "must have exactly"),
    "entry no map": (single, header(lambda d: d.__setitem__("a", 5)), "must have exactly"),
    "link outside": (single, link_outside, "outside the directory"),
    "FIFO": (single, fifo, "not a regular file"),
    "a directory": (single, lambda p: (p.unlink(), p.mkdir()), "cannot be read|not a regular file|no checkpoint"),
    # Several files with an index.
    "index cut": (indexed, lambda p: p.write_bytes(p.read_bytes()[:-9]), "not valid JSON"),
    "index without map": (indexed, lambda p: p.write_text("{}"), "no weight_map"),
    "index a list": (indexed, lambda p: p.write_text("[]"), "no weight_map"),
    "index empty": (indexed, lambda p: p.write_text('{"weight_map": {}}'), "empty weight_map"),
    "index to a number": (indexed, weight_map(lambda m: m.update(a=1)), "no weight_map"),
    "file missing": (indexed, lambda p: (p.parent / "model-00002-of-00002.safetensors").unlink(), "is missing"),
    "up and out": (indexed, weight_map(lambda m: m.update(a="../../x.safetensors")), "outside the directory"),
    "up inside": (indexed, weight_map(lambda m: m.update(a="sub/../x.safetensors")), "outside the directory"),
    "absolute": (indexed, weight_map(lambda m: m.update(a="/etc/passwd")), "outside the directory"),
    "empty name": (indexed, weight_map(lambda m: m.update(a="")), "not a file name"),
    "half a surrogate in a name": (indexed, weight_map(lambda m: m.update(a="a\ud800")), "not a file name"),
    "NUL in a name": (indexed, weight_map(lambda m: m.update(a="a\0b")), "not a file name"),
    "a linked file": (
        indexed,
        lambda p: link_outside(p.parent / "model-00001-of-00002.safetensors"),
        "outside the dir",
    ),
    "a FIFO among files": (
        indexed,
        lambda p: fifo(p.parent / "model-00001-of-00002.safetensors"),
        "not a regular file",
    ),
    "a linked index": (indexed, link_outside, "outside the directory"),
    "wrong file": (indexed, weight_map(lambda m: m.update(a=m["b"])), "does not hold it|does not list"),
    "name too many": (indexed, weight_map(lambda m: m.update(c=m["b"])), "tensor c is in"),
    "name too few": (indexed, lambda p: first_file(p, "a", "c"), "does not list tensor c"),
    "tensor in two files": (indexed, lambda p: first_file(p, "a", "b"), "tensor b is both in"),
    # Rank files.
    "rank missing": (ranks, lambda p: p.unlink(), "file of rank 1 is missing; the checkpoint was written by 3 ranks"),
    "of another save": (ranks, other_save, "at step .*, but .* files of different saves"),
    "of another step": (ranks, shard_info(lambda i: i.update(step=9)), "at step 9, but .* of different saves"),
    "of another world": (ranks, other_world, "saves by 2 and 3 ranks"),
    "ranks swapped": (ranks, swap_ranks, "renamed or mixed up"),
    "no info": (ranks, header(lambda d: d["__metadata__"].pop(SHARD_KEY)), "not written by fsdp-shard"),
    "info no JSON": (ranks, header(lambda d: d["__metadata__"].update({SHARD_KEY: "{"})), "not valid JSON"),
    "info of the future": (ranks, shard_info(lambda i: i.update(format_version=2)), "format version 2"),
    "info without ranges": (ranks, shard_info(lambda i: i.pop("tensors")), "KeyError"),
    "info with a negative start": (ranks, shard_info(lambda i: i["tensors"]["a"].update(start=-1)), "not a count"),
    "overlapping ranges": (ranks, shard_info(lambda i: i["tensors"]["a"].update(start=1)), "overlap"),
    "beyond the shape": (ranks, shard_info(lambda i: i["tensors"]["a"].update(start=5)), "part of the full shape"),
    "shapes differ": (
        ranks,
        shard_info(lambda i: i["tensors"]["a"].update(shape=[3, 2])),
        "files of different saves|not a part of",
    ),
    "range without tensor": (
        ranks,
        shard_info(lambda i: i["tensors"].update(z={"shape": [], "start": 0})),
        "only in one",
    ),
    "tensor without range": (ranks, shard_info(lambda i: i["tensors"].pop("a")), "only in one"),
    "tied to nothing": (ranks, everywhere(shard_info(lambda i: i.update(aliases={"head": "gone"}))), "tied to gone"),
    "tied in one file": (
        ranks,
        shard_info(lambda i: i.update(aliases={"head": "a"})),
        "tied tensors .* different saves",
    ),
    "a rank is a link": (ranks, link_outside, "outside the directory"),
    "a rank is a FIFO": (ranks, fifo, "not a regular file"),
    # No checkpoint at all.
    "nothing there": (single, lambda p: [f.unlink() for f in p.parent.iterdir()], "the directory is empty"),
    "other files": (single, lambda p: p.unlink(), r"the directory holds config\.json"),
    "no pickle": (single, lambda p: p.rename(p.parent / "pytorch_model.bin"), "begins as no file of torch"),
    "several files": (
        single,
        lambda p: (p.rename(p.parent / "x.safetensors"), (p.parent / "y.safetensors").touch()),
        "several",
    ),
}
