"""Where the recipes and configs that come with the package lie, and what each is for.

In a checkout they are beside the package, in an installed wheel inside it. Reads only the first lines of files: it
knows neither Hydra nor what a recipe does.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(folder: str) -> Path:
    """Directory of the shipped `conf` or `recipes`."""
    inside = _PACKAGE / "_shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


@dataclass(frozen=True)
class Item:
    """One file that a user may copy: `name` is what `ls` shows and `cp` takes."""

    name: str
    path: Path
    description: str


def recipes() -> list[Item]:
    """The shipped recipes, by name."""
    files = sorted(shipped("recipes").glob("*.py"))
    return [Item(file.stem, file, _first_line_of_docstring(file)) for file in files]


def configs() -> list[Item]:
    """The shipped YAML files, named by their path below conf/ with its ending."""
    root = shipped("conf")
    files = sorted(root.rglob("*.yaml"), key=lambda file: (file.parent != root, file))
    return [Item(file.relative_to(root).as_posix(), file, _first_comment(file)) for file in files]


def _first_line_of_docstring(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def _first_comment(file: Path) -> str:
    """The first comment line that says something: Hydra's own `# @package` directives do not."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @"):
            return line.lstrip("# ")
    return ""
