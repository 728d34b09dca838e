"""Ways to damage the files of a directory."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from fsdp_shard.checkpoint import MANIFEST

Damage = Callable[[Path], object]

DIGITS = "1" * 5000  # of an integer: more than Python turns into one
DEEP = "[" * 100_000 + "]" * 100_000


def edit(file: str, change: Callable[[Any], Any]) -> Damage:
    """The JSON of `file` as `change` leaves it, or returns it if that is not None."""

    def apply(root: Path) -> None:
        document = json.loads((root / file).read_text())
        changed = change(document)
        (root / file).write_text(json.dumps(document if changed is None else changed))

    return apply


def fields(file: str, **values: Any) -> Damage:
    """The JSON of `file` with these values at its top."""
    return edit(file, lambda document: document.update(values))


def literal(file: str, key: str, value: str) -> Damage:
    """The JSON of `file` where the value of `key` is the text `value`, which need not be JSON."""

    def apply(root: Path) -> None:
        document = json.loads((root / file).read_text())
        _set(document, key, "\0HERE")
        (root / file).write_text(json.dumps(document).replace('"\\u0000HERE"', value))

    return apply


def without(file: str, key: str) -> Damage:
    """The JSON of `file` without a key at its top."""
    return edit(file, lambda document: document.pop(key) and None)


def content(file: str, data: bytes | str) -> Damage:
    """The file with this content."""
    return lambda root: (root / file).write_bytes(data.encode() if isinstance(data, str) else data)


def cut(file: str, count: int) -> Damage:
    """Only the first `count` bytes of the file; or, if negative, all but the last ones."""
    return lambda root: (root / file).write_bytes((root / file).read_bytes()[:count])


def replaced(file: str, old: bytes, new: bytes) -> Damage:
    """The file with the first `old` replaced."""

    def apply(root: Path) -> None:
        data = (root / file).read_bytes()
        assert old in data, f"{old!r} is not in {file}"
        (root / file).write_bytes(data.replace(old, new, 1))

    return apply


def matched(file: str, pattern: str, new: str) -> Damage:
    """The file with the first match of a pattern replaced."""

    def apply(root: Path) -> None:
        text = (root / file).read_text()
        assert re.search(pattern, text), f"{pattern} is not in {file}"
        (root / file).write_text(re.sub(pattern, lambda match: new, text, count=1))

    return apply


def gone(file: str) -> Damage:
    """Without the file."""
    return lambda root: (root / file).unlink()


def directory(file: str) -> Damage:
    """A directory where the file was."""
    return lambda root: ((root / file).unlink(missing_ok=True), (root / file).mkdir())


def fifo(file: str) -> Damage:
    """A FIFO where the file was."""
    return lambda root: ((root / file).unlink(missing_ok=True), os.mkfifo(root / file))


def both(*damages: Damage) -> Damage:
    """One after the other."""
    return lambda root: [damage(root) for damage in damages]


def unpickled(file: str, change: Callable[[Any], Any]) -> Damage:
    """What torch.load finds in `file`, saved again as `change` leaves it."""

    def apply(root: Path) -> None:
        state = torch.load(root / file, weights_only=False)
        changed = change(state)
        torch.save(state if changed is None else changed, root / file)

    return apply


def metadata(change: Callable[[Any], Any]) -> Damage:
    """DCP's .metadata as `change` leaves it."""

    def apply(root: Path) -> None:
        found = pickle.loads((root / ".metadata").read_bytes())
        changed = change(found)
        (root / ".metadata").write_bytes(pickle.dumps(found if changed is None else changed))

    return apply


def sealed_manifest(change: Callable[[Any], Any]) -> Damage:
    """The manifest with a lie in it, and its digest of that."""
    return lambda root: seal(root, change)


def seal(root: Path, change: Callable[[Any], Any], name: str = MANIFEST) -> None:
    """Write the manifest of `root`, or its index of rank files, anew, after `change` of the parsed one."""
    file = root / name
    document = json.loads(file.read_text())
    del document["digest"]
    changed = change(document)
    text = json.dumps(document if changed is None else changed)[:-1] + ","
    file.write_text(f'{text}"digest": "{xxhash.xxh3_128_hexdigest(text.encode())}"\n}}\n')


def sealed(*damages: Damage) -> Damage:
    """The damages, and then a manifest that has the sizes and digests of the damaged small files."""

    def apply(root: Path) -> None:
        both(*damages)(root)

        def record(document: Any) -> None:
            for name, held in document["files"].items():
                if held["digest"] is not None and (root / name).is_file():
                    data = (root / name).read_bytes()
                    held.update(size=len(data), digest=xxhash.xxh3_128_hexdigest(data))

        seal(root, record)

    return apply


def _set(document: Any, key: str, value: Any) -> None:
    *owners, last = key.split(".")
    for owner in owners:
        document = document[owner]
    document[last] = value
