"""manifest.json: not what was written, and sealed again around a lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import DEEP, DIGITS, Damage, sealed_manifest

_FILE = "manifest.json"
_NAME = "model.layers.0.mlp.down_proj.weight"
_ANOTHER = {"kind": "another tool's", "files": []}


def _tensor(**values: Any) -> Damage:
    return sealed_manifest(lambda document: document["tensors"][_NAME].update(values))


def _file(name: str, **values: Any) -> Damage:
    return sealed_manifest(lambda document: document["files"][name].update(values))


def _renamed(old: str, new: str) -> Damage:
    return sealed_manifest(lambda document: document["files"].update({new: document["files"].pop(old)}))


def _top(**values: Any) -> Damage:
    return sealed_manifest(lambda document: document.update(values))


def _text(change: Callable[[str], str]) -> Damage:
    return lambda root: (root / _FILE).write_text(change((root / _FILE).read_text()))


def _doubled(root: Path) -> None:
    text = (root / _FILE).read_text()
    (root / _FILE).write_text(text.replace('"layout": "gathered"', '"layout": "gathered", "layout": "gathered"'))


_HEADERS: dict[str, Damage] = {
    # Not what was written.
    "cut short": edits.cut(_FILE, 500),
    "cut before its digest": edits.cut(_FILE, -60),
    "empty": edits.content(_FILE, b""),
    "a byte order mark": _text(lambda text: "\ufeff" + text),
    "UTF-16": lambda root: (root / _FILE).write_bytes((root / _FILE).read_text().encode("utf-16")),
    "a value changed, the old digest": _text(lambda text: text.replace('"F32"', '"I32"', 1)),
    "another digest": edits.matched(_FILE, r'"digest": "[0-9a-f]{32}"\n}', '"digest": "0000"\n}'),
    "the digest a number": edits.matched(_FILE, r'"digest": "[0-9a-f]{32}"\n}', '"digest": 7\n}'),
    "no digest": edits.edit(_FILE, lambda document: document.pop("digest") and None),
    "a key twice": _doubled,
    "deep nesting": edits.literal(_FILE, "mesh", DEEP),
    "an integer of 5,000 digits": edits.literal(_FILE, "step", DIGITS),
    "of kind 5": edits.fields(_FILE, kind=5),
    # Sealed again around a lie about itself.
    "version 2": _top(format_version=2),
    "version true": _top(format_version=True),
    "version 1.0": _top(format_version=1.0),
    "version a text": _top(format_version="1"),
    "an unknown key": _top(author="someone"),
    "a key missing": sealed_manifest(lambda document: document.pop("mesh") and None),
    "layout of a tree": _top(layout="tree"),
    "layout a list": _top(layout=["gathered"]),
    "a negative step": _top(step=-1),
    "a fractional step": _top(step=1.5),
    "a step of true": _top(step=True),
    "no ranks": _top(world_size=0),
    "ranks a text": _top(world_size="1"),
    "a mesh of texts": _top(mesh={"data": "two"}),
    "a mesh that is a list": _top(mesh=[2]),
    "files a list": _top(files=[]),
    "tensors a list": _top(tensors=[]),
    "tensors null": _top(tensors=None),
    "aliases a list": _top(aliases=[["lm_head.weight", _NAME]]),
    "an alias of nothing": _top(aliases={"lm_head.weight": "gone"}),
    "an alias of a number": _top(aliases={"lm_head.weight": 3}),
    "an alias of an alias": _top(aliases={"lm_head.weight": "other", "other": "lm_head.weight"}),
    # About files and tensors.
    "a file that is a list": sealed_manifest(lambda d: d["files"].update({"config.json": [1]})),
    "a record without size": sealed_manifest(lambda d: d["files"]["config.json"].pop("size") and None),
    "a negative size": _file("config.json", size=-1),
    "a digest of a number": _file("config.json", digest=5),
    "a tensor more": sealed_manifest(lambda d: d["tensors"].update(more=d["tensors"][_NAME])),
    "a tensor less": sealed_manifest(lambda d: d["tensors"].pop(_NAME) and None),
    "another dtype": _tensor(dtype="I32"),
    "an unknown dtype": _tensor(dtype="F31"),
    "a dtype that is a list": _tensor(dtype=["F32"]),
    "another shape": _tensor(shape=[85, 36]),
    "a negative shape": _tensor(shape=[-36, -85]),
    "a shape of texts": _tensor(shape=["36", "85"]),
    "a shape of 2^80": _tensor(shape=[2**80, 0]),
    "a shape that is a number": _tensor(shape=3060),
    "chunks missing": _tensor(chunks=[]),
    "chunks too many": _tensor(chunks=["0" * 32] * 3),
    "a chunk that is a number": _tensor(chunks=[5]),
    "a record that is null": sealed_manifest(lambda d: d["tensors"].update({_NAME: None})),
}
_VALUES: dict[str, Damage] = {  # verify compares them, and finetune before it goes on from a step
    "a file that is not there": sealed_manifest(lambda d: d["files"].update({"more.json": d["files"]["config.json"]})),
    "a file up and out": _renamed("config.json", "../secret"),
    "an absolute file": _renamed("config.json", "/etc/hostname"),
    "a file without name": _renamed("config.json", ""),
    "a file with NUL": _renamed("config.json", "a\0b"),
    "a file that is the directory": _renamed("config.json", "."),
    "another size": _file("config.json", size=10),
    "a size of 2^70": _file("model.safetensors", size=2**70),
    "another digest of a file": _file("config.json", digest="0" * 32),
    "another digest of the header": _file("model.safetensors", header_digest="0" * 32),
    "another digest of a tensor": _tensor(digest="0" * 32),
    "another digest of a chunk": _tensor(chunks=["0" * 32]),
    "a digest that is no digest": _tensor(digest="not hexadecimal"),
    "a chunk's digest that is no digest": _tensor(chunks=["not hexadecimal"]),
}

CASES = [
    *(
        Case(
            name,
            damaged("sealed", damage),
        )
        for name, damage in _HEADERS.items()
    ),
    *(Case(name, damaged("sealed", damage), damages="values") for name, damage in _VALUES.items()),
    Case("a list", damaged("model", edits.content(_FILE, "[]")), expect="accepted"),
    Case("a directory", damaged("model", edits.directory(_FILE)), expect="accepted"),
    Case("sharded, but gathered", damaged("sealed", _top(layout="sharded")), expect="any"),
    Case("of another tool", damaged("model", edits.content(_FILE, json.dumps(_ANOTHER))), expect="accepted"),
    Case("no JSON, of another tool", damaged("model", edits.content(_FILE, "version: 3\n")), expect="any"),
]
