"""How the package is built: imports point down, without a circle, and from room to room through the doors only.

A room is a folder at the top of the package; its door is its `__init__.py`, whose stub lists the names that it hands on
and the files behind them. All imports count, those inside functions and for annotations too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent.parent
_PACKAGE = _ROOT / "fsdp_shard"

# From the top down. Rooms on one line never import each other.
_ROOMS = (
    ("integrations",),
    ("cli",),
    ("doctor",),
    ("config",),
    ("evaluation", "planning"),
    ("training", "inference"),
    ("sharding", "checkpoint", "data"),
    ("distributed", "models"),
    ("utils",),
    ("errors",),
)
_LEVEL = {room: -level for level, rooms in enumerate(_ROOMS) for room in rooms}

# Files that may be in several folders: what is inside follows from the name.
_RECURRING = ("__init__.py", "config.py", "registry.py")


@dataclass(frozen=True)
class _Import:
    importer: str  # module, dotted
    imported: str  # module or door, dotted
    name: str  # what is taken from it; "" for the module itself
    line: int


def _module_of(file: Path) -> str:
    parts = file.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


_FILES = {_module_of(file): file for file in sorted(_PACKAGE.rglob("*.py"))}
_USERS = [
    file for folder in ("recipes", "demo", "benchmarks", "examples", "tests") for file in (_ROOT / folder).rglob("*.py")
]


def _room(module: str) -> str:
    """`fsdp_shard.checkpoint.index` is in `checkpoint`; the package's own door is above all rooms."""
    return module.split(".")[1] if "." in module else ""


def _is_door(module: str) -> bool:
    """Of a room, or of a folder inside one that serves its own room."""
    return _FILES[module].name == "__init__.py" and _FILES[module].with_suffix(".pyi").exists() and "." in module


def _imports(file: Path) -> Iterator[_Import]:
    importer = _module_of(file)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "fsdp_shard":
                    yield _Import(importer, name.name, "", node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            if (node.module or "").split(".")[0] == "fsdp_shard":
                for name in node.names:
                    whole = f"{node.module}.{name.name}"
                    taken = (whole, "") if whole in _FILES else (str(node.module), name.name)
                    yield _Import(importer, *taken, node.lineno)


def _handed_on(door: str) -> dict[str, str]:
    """Name -> the module behind it, of the stub of `door`."""
    stub = _FILES[door].with_suffix(".pyi")
    nodes = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"{door}.{node.module}" for node in nodes for alias in node.names}


_DOORS = {module: _handed_on(module) for module in _FILES if _is_door(module)}


def _behind(one: _Import) -> str:
    """The file that an import depends on: the one behind the door, where it comes through one."""
    return _DOORS.get(one.imported, {}).get(one.name, one.imported)


_ALL = [one for file in _FILES.values() for one in _imports(file)]


def _say(one: _Import) -> str:
    return f"{one.importer}:{one.line} imports {one.name or 'all'} of {one.imported}"


def test_every_room_has_a_level() -> None:
    assert {_room(module) for module in _FILES} - {"", "__main__"} == set(_LEVEL)


def test_imports_point_down() -> None:
    inside = [one for one in _ALL if _room(one.importer) not in ("", "__main__") and _room(one.imported)]
    assert not [
        _say(one)
        for one in inside
        if _room(one.importer) != _room(one.imported) and _LEVEL[_room(one.imported)] >= _LEVEL[_room(one.importer)]
    ]


def test_no_circle_of_files() -> None:
    graph: dict[str, set[str]] = {module: set() for module in _FILES}
    for one in _ALL:
        if one.importer != _behind(one):
            graph[one.importer].add(_behind(one))
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_rooms_are_entered_through_their_doors() -> None:
    assert not [
        _say(one)
        for one in _ALL
        if _room(one.importer) != _room(one.imported)
        and one.imported.count(".") > 1
        and _room(one.importer) != "__main__"
    ]


def _own_room(file: Path) -> str:
    """tests/checkpoint/... may look into the room it tests; everything else outside is a user of all rooms."""
    parts = file.relative_to(_ROOT).parts
    return parts[1] if parts[0] == "tests" and len(parts) > 2 else ""


@pytest.mark.parametrize("file", _USERS, ids=_module_of)
def test_users_come_through_the_doors(file: Path) -> None:
    inside = [one for one in _imports(file) if one.imported.count(".") > 1]
    assert not [_say(one) for one in inside if _room(one.imported) != _own_room(file)]


@pytest.mark.parametrize("door", _DOORS)
def test_doors_hand_on_what_they_list(door: str) -> None:
    names = _DOORS[door]
    module = import_module(door)
    assert set(module.__all__) >= set(names)
    beside = {file.stem for file in _FILES[door].parent.iterdir()}
    assert not beside & set(names), "importing such a file would replace what the door hands on"
    for name, behind in names.items():
        assert not name.startswith("_")
        if _room(door) != "integrations" or _library_is_there(behind):
            assert getattr(module, name) is getattr(import_module(behind), name)


def _library_is_there(module: str) -> bool:
    """Whether the library that a file of `integrations` is named after, or transformers for `trainer`, is installed."""
    library = module.rpartition(".")[2]
    return find_spec({"trainer": "transformers"}.get(library, library)) is not None


def test_nothing_imports_recipes() -> None:
    for file in _FILES.values():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] in ("recipes", "tests", "demo", "benchmarks") for name in names), file


_OTHER_TEST = re.compile(r"\b(?:from (tests[\w.]*) import (?:\w+, )*|(tests[\w.]*)\.)(test_\w+)")


def test_what_tests_share_is_in_modules_that_are_no_tests() -> None:
    """Programs in strings count too; one may import the test that it is part of, to run a function of it."""
    found = []
    for file in (_ROOT / "tests").rglob("*.py"):
        for package, prefix, name in _OTHER_TEST.findall(re.sub(r"[\s(]+", " ", file.read_text(encoding="utf-8"))):
            module = f"{package or prefix}.{name}"
            if module != _module_of(file) and (_ROOT / module.replace(".", "/")).with_suffix(".py").exists():
                found.append(f"{_module_of(file)} imports {module}")
    assert not found


def test_folders_stay_small_and_names_single() -> None:
    entries = [item for item in _PACKAGE.iterdir() if item.suffix == ".py" or (item / "__init__.py").exists()]
    assert len([item for item in entries if not item.name.startswith("__")]) <= 16
    folders = Counter(file.parent for file in _FILES.values() if file.name != "__init__.py")
    assert max(folders.values()) <= 15, folders.most_common(1)
    names = Counter(file.name for file in _FILES.values() if file.name not in _RECURRING)
    assert max(names.values()) == 1, names.most_common(3)


def _loaded_by(code: str) -> set[str]:
    """Top-level names of all modules that are there after running `code` in a new interpreter."""
    program = f"{code}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=_ROOT)
    return set(done.stdout.split("\n")[-2].split())


_HEAVY = {"torch", "transformers", "datasets", "accelerate", "gguf", "matplotlib", "pandas", "pyarrow"}


@pytest.mark.parametrize(
    "code",
    [
        "import fsdp_shard",
        "from fsdp_shard.cli import main",
        "from fsdp_shard.config import FinetuneConfig",
        "from fsdp_shard.distributed import launch",
        "import fsdp_shard.config.reference",
    ],
)
def test_what_is_needed_first_imports_nothing_heavy(code: str) -> None:
    loaded = _loaded_by(code)
    assert "fsdp_shard" in loaded
    assert not loaded & (_HEAVY | {"numpy", "hydra", "omegaconf"})


def test_composing_imports_nothing_heavy() -> None:
    loaded = _loaded_by(
        "from fsdp_shard.config import FinetuneConfig, compose_jobs\n"
        "compose_jobs(FinetuneConfig, ['model.path=x', 'data.path=y'], 'test')"
    )
    assert "hydra" in loaded
    assert not loaded & (_HEAVY | {"numpy"})
