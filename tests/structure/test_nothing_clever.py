"""The package leaves other people's modules and the process that imports it as they are."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import run

_ROOT = Path(__file__).resolve().parent.parent.parent
_MODULES = sorted((_ROOT / "fsdp_shard").rglob("*.py"))

# What is never named, whatever is done with it.
_FORBIDDEN = {"sys.meta_path", "sys.path_hooks", "os.nice", "os.setpriority", "os.sched_setscheduler", "os.SCHED_IDLE"}
_GC_TUNING = {"gc.disable", "gc.enable", "gc.freeze", "gc.unfreeze", "gc.set_threshold"}
_ENVIRONMENT_CHANGES = {f"os.environ.{name}" for name in ("update", "setdefault", "pop", "popitem", "clear")} | {
    "os.putenv",
    "os.unsetenv",
}

# (module, what it does): why that is right.
_ALLOWED = {
    ("utils.environment", "changes os.environ"): "the context manager that restores it",
    ("data.tokenized.token_cache", "assigns os.environ"): "`datasets` puts a copy in its place; it is restored",
    ("cli.exit", "tunes gc"): "the command line's own start and end",
    ("cli.exit", "assigns an attribute of sys"): "outputs that the command line's own process was started without",
    ("distributed.signals", "assigns sys.unraisablehook"): "in the command line's own process and its ranks",
    ("utils.limited_process", "tunes gc"): "in the process that it forked, which ends there",
    ("distributed.process_group", "assigns sys.excepthook"): "puts back what torch replaced for the process group",
    ("config.compose", "assigns sys.argv"): "hydra.main reads it; it is restored",
    ("training.seeding", "assigns torch.backends.cudnn.deterministic"): "a documented setting; it is restored",
    ("training.seeding", "assigns torch.backends.cudnn.benchmark"): "a documented setting; it is restored",
    (
        "inference.offload.offloaded_model",
        "assigns __class__",
    ): "nothing else makes `model.device` right when weights are offloaded",
}


class _Names:
    """The dotted names outside of this package that a module uses: those it imports, and aliases of them."""

    def __init__(self, tree: ast.Module) -> None:
        self._known: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    self._known[name.asname or name.name.split(".")[0]] = (
                        name.name if name.asname else name.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                self._known |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        self._known = {name: full for name, full in self._known.items() if not full.startswith("fsdp_shard")}
        for node in ast.walk(tree):
            for target, value in _assignments(node):
                if (
                    isinstance(target, ast.Name)
                    and isinstance(value, ast.Attribute | ast.Name)
                    and (full := self.of(value))
                ):
                    self._known[target.id] = full

    def of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self.of(node.value)):
            return f"{owner}.{node.attr}"
        return None


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Each target that a statement assigns to or deletes, with its value where that is plain to see."""
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    value = getattr(node, "value", None)
    for target in targets:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
            yield from zip(target.elts, values, strict=False)
        else:
            yield target, value


def _findings(source: str) -> set[str]:
    tree = ast.parse(source)
    names, found = _Names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and (full := names.of(node)):
            found |= {f"uses {full}"} if full in _FORBIDDEN else set()
            found |= {"tunes gc"} if full in _GC_TUNING else set()
            found |= {"changes os.environ"} if full in _ENVIRONMENT_CHANGES else set()
        for target, _ in _assignments(node):
            found |= _assigned(target, names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            owner, name = names.of(node.args[0]), node.args[1]
            found |= {f"assigns an attribute of {owner}"} if owner else set()
            found |= {"assigns __class__"} if isinstance(name, ast.Constant) and name.value == "__class__" else set()
    return found


def _assigned(target: ast.expr, names: _Names) -> set[str]:
    if isinstance(target, ast.Subscript):
        return {"changes os.environ"} if names.of(target.value) == "os.environ" else set()
    if not isinstance(target, ast.Attribute):
        return set()
    return (
        {"assigns __class__"}
        if target.attr == "__class__"
        else {f"assigns {full}" for full in [names.of(target)] if full}
    )


@pytest.mark.long
def test_modules_change_nothing_that_is_not_theirs() -> None:
    found = {
        (".".join(file.relative_to(_ROOT / "fsdp_shard").with_suffix("").parts), what)
        for file in _MODULES
        for what in _findings(file.read_text(encoding="utf-8"))
    }
    assert found - set(_ALLOWED) == set(), "not allowed"
    assert set(_ALLOWED) - found == set(), "allowed, but not needed any more"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sys\nsys.meta_path.insert(0, 1)", "uses sys.meta_path"),
        ("import os\nos.sched_setscheduler(0, 1, 2)", "uses os.sched_setscheduler"),
        ("import gc as g\ng.disable()", "tunes gc"),
        ("from gc import freeze\nfreeze()", "tunes gc"),
        ("import os\nos.environ['A'] = 'b'", "changes os.environ"),
        ("import os\ndel os.environ['A']", "changes os.environ"),
        ("from os import environ\nenviron.setdefault('A', 'b')", "changes os.environ"),
        ("import torch.nn\ntorch.nn.Linear = None", "assigns torch.nn.Linear"),
        ("from torch import nn\nmodule: object = nn\nmodule.Linear = None", "assigns torch.nn.Linear"),
        ("from torch import nn\na, nn.Linear = 1, 2", "assigns torch.nn.Linear"),
        ("from torch import nn\nsetattr(nn, name, 1)", "assigns an attribute of torch.nn"),
        ("def f(layer):\n    layer.__class__ = int", "assigns __class__"),
    ],
)
def test_each_of_them_is_seen(source: str, expected: str) -> None:
    assert _findings(source) == {expected}


@pytest.mark.long
def test_starting_ranks_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    program = """
import gc, os
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.distributed import LaunchConfig, launch

before = dict(os.environ), gc.get_freeze_count()
launch(lambda config: None, FinetuneConfig(run_dir="run", launch=LaunchConfig(ranks=2, device="cpu")))
print((dict(os.environ), gc.get_freeze_count()) == before, gc.isenabled())
"""
    done = run([sys.executable, "-c", program], tmp_path)
    assert (done.status, done.out, done.err) == (0, "True True\n", "")
