"""The Python interface: the names of the package, and that none costs more than it must."""

from __future__ import annotations

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_shard

_RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))
_PUBLIC: list[str] = vars(fsdp_shard)["__all__"]


@pytest.mark.parametrize("name", _PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert name in dir(fsdp_shard)
    value = getattr(fsdp_shard, name)
    if name not in ("__version__", "errors"):
        assert value.__name__ == name
        assert "Example:" in value.__doc__, "every function of the interface shows its use"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="No fsdp_shard attribute nonsense"):
        fsdp_shard.nonsense  # type: ignore[attr-defined]  # noqa: B018 - the access is the test


def test_what_moves_bytes_only_loads_no_torch() -> None:
    code = (
        "import sys, fsdp_shard; fsdp_shard.open_checkpoint; fsdp_shard.convert; fsdp_shard.verify\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("file", _RECIPES, ids=lambda file: file.name)
def test_recipes_use_public_names_only(file: Path) -> None:
    tree = ast.parse(file.read_text())
    imported = [one for one in ast.walk(tree) if isinstance(one, (ast.Import, ast.ImportFrom))]
    ours = {ast.unparse(one) for one in imported if "fsdp_shard" in ast.unparse(one)}
    assert ours <= {"import fsdp_shard as fs", "from fsdp_shard import doctor"}
    used = {
        one.attr
        for one in ast.walk(tree)
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "fs"
    }
    assert used
    assert used <= set(_PUBLIC)
    (main,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "main")
    assert main.end_lineno is not None
    assert main.end_lineno - main.lineno < 60, "it fits a screen"


def test_examples_of_configs_run() -> None:
    for name in ("ConvertConfig", "DoctorConfig", "EvaluateConfig", "GenerateConfig", "PlanConfig"):
        (found,) = doctest.DocTestFinder(recurse=False).find(getattr(fsdp_shard, name), name, globs={"fs": fsdp_shard})
        result = doctest.DocTestRunner().run(found)
        assert (result.attempted, result.failed) == (1, 0)
