"""The recipes and configs that ship with the package.

In a checkout they are next to the package, in an installed wheel inside it.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(folder: str) -> Path:
    """Return the directory of the shipped `conf` or `recipes`."""
    inside = _PACKAGE / "_shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


@dataclass(frozen=True)
class Item:
    """A file that a user may copy, by the name that `ls` shows and `cp` takes."""

    name: str
    path: Path
    description: str


def recipes() -> list[Item]:
    """Return the shipped recipes, described by the first lines of their docstrings."""
    return [Item(file.stem, file, _docstring(file)) for file in sorted(shipped("recipes").glob("*.py"))]


def configs() -> list[Item]:
    """Return the shipped configs, named by their path below conf/, described by their first comments."""
    root = shipped("conf")
    found = (file for file in root.rglob("*.yaml") if file.parent.name != "lm_eval")  # whose tasks are no configs
    files = sorted(found, key=lambda file: (file.parent != root, file))
    return [Item(file.relative_to(root).as_posix(), file, _first_comment(file)) for file in files]


def _docstring(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def _first_comment(file: Path) -> str:
    """The first comment line but Hydra's `# @package` directives."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @"):
            return line.lstrip("# ")
    return ""
