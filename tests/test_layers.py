"""Imports point down only, and what has to be quick to start imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "fsdp_shard"

# From the bottom up. Modules on one line never import each other; packages count as one.
_LAYERS = (
    ("environment", "redact", "user_cache"),
    ("errors", "results", "memory"),
    ("settings", "sizes", "signals"),
    ("shards", "gguf_side", "codes"),
    ("models",),
    ("blocks", "positions", "distributed", "quantised"),
    ("sharding", "checkpoint", "data"),
    ("training", "inference"),
    ("evaluation", "planning"),
    ("meeting", "agent"),
    ("elastic",),
    ("launch", "shipped"),
    ("shell", "config"),
    ("reference", "doctor"),
    ("explain",),
    ("compose",),
    ("recipe", "commands"),
    ("cli",),
)
_LEVEL = {name: level for level, names in enumerate(_LAYERS) for name in names}

# `fsdp_shard/__init__.py` is the interface: it names modules of any layer and imports one when it is asked for.
_ABOVE_ALL = ("__init__", "__main__")

_MODULES = sorted(_PACKAGE.rglob("*.py"))


def _part(module: str) -> str:
    """`fsdp_shard.checkpoint.index` belongs to `checkpoint`."""
    return module.split(".")[1]


def _module_of(file: Path) -> str:
    return ".".join(file.relative_to(_ROOT).with_suffix("").parts)


def _imported(file: Path) -> Iterator[tuple[str, int]]:
    """Every module of the package that a file imports anywhere, inside functions and for annotations too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names if name.name.startswith("fsdp_shard."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            module = node.module or ""
            if module == "fsdp_shard":
                yield from ((f"fsdp_shard.{name.name}", node.lineno) for name in node.names if name.name in _LEVEL)
            elif module.startswith("fsdp_shard."):
                yield module, node.lineno


def _wrong(importer: str, imported: str) -> bool:
    """Whether the part `importer` may not import the part `imported`."""
    return importer != imported and _LEVEL[imported] >= _LEVEL[importer]


def test_every_module_has_a_layer() -> None:
    parts = {_part(_module_of(file)) for file in _MODULES} - set(_ABOVE_ALL)
    assert parts == set(_LEVEL)


@pytest.mark.parametrize("file", _MODULES, ids=_module_of)
def test_imports_point_down(file: Path) -> None:
    importer = _part(_module_of(file))
    if importer in _ABOVE_ALL:
        return
    found = [f"line {line}: {module}" for module, line in _imported(file) if _wrong(importer, _part(module))]
    assert not found


def test_the_rule_itself() -> None:
    assert _wrong("data", "training")
    assert _wrong("data", "checkpoint")  # on one line
    assert _wrong("errors", "settings")
    assert not _wrong("training", "data")
    assert not _wrong("data", "data")


def test_recipes_import_the_package_and_nothing_imports_recipes() -> None:
    for file in _MODULES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] in ("recipes", "tests", "demo", "benchmarks") for name in names), file


def _loaded_by(code: str) -> set[str]:
    """Top-level names of all modules that are there after running `code` in a new interpreter."""
    program = f"{code}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=_ROOT)
    return set(done.stdout.split("\n")[-2].split())


_HEAVY = {"torch", "transformers", "datasets", "accelerate", "gguf", "matplotlib", "pandas", "pyarrow"}


@pytest.mark.parametrize(
    "module", ["fsdp_shard", "fsdp_shard.cli", "fsdp_shard.config", "fsdp_shard.launch", "fsdp_shard.reference"]
)
def test_config_modules_import_nothing_heavy(module: str) -> None:
    loaded = _loaded_by(f"import {module}")
    assert "fsdp_shard" in loaded
    assert not loaded & (_HEAVY | {"numpy", "hydra", "omegaconf"})


def test_composing_imports_nothing_heavy() -> None:
    loaded = _loaded_by(
        "from fsdp_shard.compose import compose; from fsdp_shard.config import FinetuneConfig\n"
        "compose(FinetuneConfig, ['model.path=x', 'data.path=y'], 'test')"
    )
    assert "hydra" in loaded
    assert not loaded & (_HEAVY | {"numpy"})
