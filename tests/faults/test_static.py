"""What no line of the package may do: run what a file says, or read through a reader that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
_SOURCES = sorted([*(ROOT / "fsdp_shard").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])
# Writes pickles, and knows opcodes by `pickle`'s names for them; neither module has a name that loads one.
_WRITERS = {"pickler.py", "unpickler.py"}
_LOADERS = {"load", "loads", "Unpickler", "_Unpickler", "_load", "_loads"}
_FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# `import_module` and `exec_module` load the recipe that the user names on the command line.
_FORBIDDEN_NAMES = {"instantiate", "FileSystemReader", "dcp_to_torch_save", "eval", "exec", "system", "popen"}


def _found(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            names = {alias.name for alias in node.names}
            if {module.split(".")[0] for module in modules} & _FORBIDDEN_MODULES and name not in _WRITERS:
                yield f"line {node.lineno} imports {modules}"
            if names & _FORBIDDEN_NAMES or any("_utils.instantiate" in module for module in modules):
                yield f"line {node.lineno} imports {names}"
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            is_method = isinstance(node.func, ast.Attribute)
            if called in _FORBIDDEN_NAMES and not (is_method and called in ("eval", "exec")):  # model.eval()
                yield f"line {node.lineno} calls {called}"
            if owner in _FORBIDDEN_MODULES and called in _LOADERS:
                yield f"line {node.lineno} calls {owner}.{called}"
            if owner == "torch" and called == "load":
                yield f"line {node.lineno} calls torch.load"
            for keyword in node.keywords:
                if keyword.arg == "weights_only" and not getattr(keyword.value, "value", False):
                    yield f"line {node.lineno} has weights_only=False"
                if keyword.arg == "trust_remote_code" and getattr(keyword.value, "value", None) is True:
                    yield f"line {node.lineno} trusts remote code"


@pytest.mark.long
def test_nothing_runs_what_a_file_says() -> None:
    found = {
        str(source.relative_to(ROOT)): problems
        for source in _SOURCES
        if (problems := list(_found(ast.parse(source.read_text(encoding="utf-8")), source.name)))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "pickle.load(f)",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "f(weights_only=flag)",
        "from hydra.utils import instantiate",
        "hydra.utils.instantiate(c)",
        "FileSystemReader(p)",
        "f(trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert list(_found(ast.parse(line), "any.py"))
