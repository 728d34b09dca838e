"""Lets transformers look through its 1,638 model files once, and not twice in each program that imports it.

It does so for `transformers` and again for `transformers.models`, to learn which names are in which file: a seventh of
the way to a first step or token. What it finds is kept for the next program in the user's cache, with the size and time
of each of those files, and is found anew where any has changed. This can go when transformers keeps it by itself, as
its `lru_cache` of 128 places for 549 directories is to do. Imports no transformers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdp_shard.user_cache import user_cache

_MODULE, _FUNCTION = "transformers.utils.import_utils", "create_import_structure_from_path"

Found = dict[Any, Any]
"""Of a directory: {one in it: the same, of that; a frozen set of backends: {file: names that need them}}."""


def keep_what_transformers_finds() -> None:
    """Have that done as soon as its function is there; for a program that may import transformers, before it does."""
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds that one module, once, as Python itself does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads it, and gives it a function that remembers."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        look: Any = getattr(module, _FUNCTION, None)
        if look is not None:
            models = Path(self.path).parent.parent / "models"
            setattr(module, _FUNCTION, functools.partial(_find, look, models))


def _find(look: Callable[[Any], Found], models: Path, path: str | Path) -> Found:
    """`look(path)`, and for all models what was kept of it."""
    return _remembered(look, models) if Path(path) in (models, models / "__init__.py") else look(path)


@functools.cache
def _remembered(look: Callable[[Any], Found], models: Path) -> Found:
    state, file = _state(models), user_cache(f"transformers-models-{_digest(str(models))}.json")
    # Nothing is kept yet, or somebody else's program has written there: it is looked for and kept anew.
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["of"] == state:
            return _unpacked(kept["found"])
    found = look(str(models))
    with suppress(OSError):  # a home that cannot be written costs time only
        _write(file, json.dumps({"of": state, "found": _packed(found)}))
    return found


def _state(models: Path) -> str:
    """Of the files that are looked through and the one that looks: another when any is written, added or removed."""
    looks = (models.parent / "utils" / "import_utils.py").stat()
    return _digest(repr((looks.st_size, looks.st_mtime_ns, sorted(_files(str(models))))))


def _files(directory: str) -> Iterator[tuple[str, int, int]]:
    """Path, bytes and time of change of each."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from () if entry.name == "__pycache__" else _files(entry.path)
            elif entry.name.endswith(".py") and not entry.name.startswith(("convert_", "modular_")):
                found = entry.stat()
                yield entry.path, found.st_size, found.st_mtime_ns


def _packed(found: Found) -> list[Any]:
    """As JSON has it: directories, and names by backends."""
    directories = {key: _packed(value) for key, value in found.items() if isinstance(key, str)}
    names = [
        [sorted(key), {file: sorted(its) for file, its in value.items()}]
        for key, value in found.items()
        if not isinstance(key, str)
    ]
    return [names, directories]


def _unpacked(packed: list[Any]) -> Found:
    names, directories = packed
    found: Found = {frozenset(key): {file: set(its) for file, its in value.items()} for key, value in names}
    return found | {key: _unpacked(value) for key, value in directories.items()}


def _write(file: Path, text: str) -> None:
    """At once: another program may read it, or write it too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as directory:
        partial = Path(directory) / file.name
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
