"""Private names of other libraries stand behind one small module per library, and CONTRIBUTING.md lists them all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent.parent
_FILES = sorted((_ROOT / "fsdp_shard").rglob("*.py"))
_TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in _FILES}
_LIBRARIES = {"torch", "transformers", "accelerate", "datasets", "peft", "hydra", "omegaconf", "tokenizers"}
_PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}  # of named tuples and of os, which Python documents
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file itself gives to functions, classes, variables and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


_OURS = {name for tree in _TREES.values() for name in _defined(tree)}


def _foreign(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name of a library: imported, or an attribute of something that is not ours."""
    own = set(_defined(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for path in (f"{module}{alias.name}" for alias in node.names):
                if path.split(".")[0] in _LIBRARIES:
                    yield from ((node.lineno, part) for part in path.split(".") if _is_private(part))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            is_inherited = ast.unparse(node.value) in ("self", "cls", "super()") and node.attr in _OURS
            if not is_inherited and node.attr not in own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _BY_NAME and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(str(name.value)) and name.value not in own:
                yield node.lineno, str(name.value)


def _is_behind(file: Path) -> bool:
    return file.name.endswith("_private.py")


@pytest.mark.parametrize("file", _FILES, ids=lambda file: str(file.relative_to(_ROOT)))
def test_private_names_are_in_their_modules(file: Path) -> None:
    found = [f"{file.relative_to(_ROOT)}:{line} uses {name}" for line, name in _foreign(_TREES[file])]
    assert _is_behind(file) or not found


def test_each_private_name_is_listed() -> None:
    behind = [file for file in _FILES if _is_behind(file)]
    used = {name for file in behind for _, name in _foreign(_TREES[file])}
    text = (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Private names of libraries")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(_\w+)`", table))
    assert used <= listed
    code = "".join(file.read_text(encoding="utf-8") for file in behind)
    assert not [name for name in listed if name not in code], "listed, and used no more"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from torch._utils import f", ["_utils"]),
        ("from torch.x import _f", ["_f"]),
        ("import torch._dynamo", ["_dynamo"]),
        ("model._modules", ["_modules"]),
        ("getattr(model, '_tied', None)", ["_tied"]),
        ("class A:\n def __init__(self):\n  self._x = 1\n def f(self, other):\n  return other._x", []),
        ("row._replace(a=1)", []),
    ],
)
def test_the_scan_sees(code: str, found: list[str]) -> None:
    assert [name for _, name in _foreign(ast.parse(code))] == found
