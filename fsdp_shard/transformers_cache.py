"""Lets transformers look through its 1,638 model files once instead of twice when it is imported.

It does so for `transformers` and again for `transformers.models`, and what it finds is kept in an `lru_cache` of 128
places, for 549 directories in the same order: by the second time each has gone. A tenth of the way to a first step or
token. This can go when that cache has room for all. Imports no transformers.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_MODULE, _FUNCTION = "transformers.utils.import_utils", "create_import_structure_from_path"


def keep_what_transformers_finds() -> None:
    """Enlarge that cache as soon as it is there; for a program that may import transformers, before it does."""
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
    """Loads it, and gives it a cache without an end."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        found: Any = getattr(module, _FUNCTION, None)
        if hasattr(found, "cache_parameters"):
            setattr(module, _FUNCTION, functools.cache(found.__wrapped__))
